"""What can be configured about data: the keys of the section `data`."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from tokenformer.strict import Section, key, need

IGNORED = -100  # a label that counts in no loss
Verify = Literal["auto", "quick", "full"]


@dataclass(frozen=True)
class DataConfig(Section, section="data"):
    """Prepared sets, and the order in which their samples come."""

    path: str | dict[str, float] | None = key(
        "a set made by `tokenformer prepare` (or an official one), or a blend: {path: weight, …}", None, above=0
    )
    order: Literal["permutation", "official"] = key(
        "of the samples: a keyed permutation of each epoch, or the document, sample and shuffle order of GPT-NeoX",
        "permutation",
    )
    split: list[float] = key("shares of train, validation and test documents", make=lambda: [969.0, 30.0, 1.0], least=0)
    boundaries: bool = key("documents in one sample do not see each other (batches carry `documents`)", False)
    boundary_labels: Literal["next", "ignore"] = key(
        "with boundaries: what the end of a document predicts: the next document's first token, or nothing", "next"
    )
    tokenizer: str | None = key("name or path; absent = the one that the set was prepared with", None)
    verify: Verify = key(
        "on opening: quick = sizes and structure, full = all checksums too, auto = full for sets up to 4 GB", "auto"
    )
    workers: int = key(
        "threads (processes, where samples are decoded) that read ahead per rank; 0 = none", 2, least=0, most=1024
    )
    prefetch: int = key("micro-batches that are read ahead", 8, above=0, most=10**5)
    cache: str | None = key("folder for the index of order official; absent = beside the set", None)

    @property
    def sets(self) -> dict[str, float]:
        """Return the paths of the sets, with their weights in the blend."""
        if isinstance(self.path, dict):
            return self.path
        return {self.path: 1.0} if self.path else {}

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):  # YAML is checked before; this is for Python
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            value = getattr(self, field.name)
            need(not choices or value in choices, f"data.{field.name} is '{value}', not one of {', '.join(choices)}")
        fits = 1 <= len(self.split) <= 3 and sum(self.split) > 0
        need(fits, f"data.split is {self.split}: give up to three shares (train, validation, test), as [969, 30, 1]")
