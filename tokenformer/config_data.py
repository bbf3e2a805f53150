"""What can be configured about data: the keys of the section `data`."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from tokenformer.strict import key, need

IGNORED = -100  # a label that counts in no loss
Verify = Literal["auto", "quick", "full"]


@dataclass(frozen=True)
class DataConfig:
    """Prepared sets, and the order in which their samples come."""

    path: str | dict[str, float] | None = key(
        "a set made by `tokenformer prepare` (or an official one), or a blend: {path: weight, …}", None
    )
    order: Literal["permutation", "official"] = key(
        "of the samples: a stateless permutation of each epoch, or the document, sample and shuffle order of GPT-NeoX",
        "permutation",
    )
    split: list[float] = key("shares of train, validation and test, by documents", make=lambda: [969.0, 30.0, 1.0])
    boundaries: bool = key("documents in one sample do not see each other (batches carry `documents`)", False)
    boundary_labels: Literal["next", "ignore"] = key(
        "with boundaries: what the end of a document is to predict: the next document's first token, or nothing", "next"
    )
    tokenizer: str | None = key("name or path; absent = the one that the set was prepared with", None)
    verify: Verify = key(
        "on opening: quick = sizes and structure, full = all checksums too, auto = full for sets up to 4 GB", "auto"
    )
    workers: int = key(
        "threads (processes, where samples are decoded) that read ahead on each rank; 0 reads alone", 2, most=1024
    )
    prefetch: int = key("micro-batches that are read ahead", 8, most=10**5)
    cache: str | None = key("folder for the index of order official; absent = beside the set", None)

    @property
    def sets(self) -> dict[str, float]:
        """Paths of the sets, with their weights in the blend."""
        if isinstance(self.path, dict):
            return self.path
        return {self.path: 1.0} if self.path else {}

    def __post_init__(self) -> None:
        for name, weight in self.sets.items():
            need(0 < weight < float("inf"), f"data.path gives {name} the weight {weight}: give a number above 0")
        for field in fields(self):  # YAML is checked before; this is for Python
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            value = getattr(self, field.name)
            need(not choices or value in choices, f"data.{field.name} is '{value}', not one of {', '.join(choices)}")
        shares = self.split
        fits = 1 <= len(shares) <= 3 and min(shares, default=-1) >= 0 and 0 < sum(shares) < float("inf")
        need(fits, f"data.split is {shares}: give up to three shares (train, validation, test), such as [969, 30, 1]")
        need(self.workers >= 0, f"data.workers is {self.workers}: give 0 or more")
        need(self.prefetch > 0, f"data.prefetch is {self.prefetch}: give a number above 0")
