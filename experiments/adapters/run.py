"""Tuning by new parameter tokens, beside LoRA and others: what is learned of a new text, what is forgotten of the old.

  python experiments/adapters/run.py --data DATA [--phase sweep variants back] [--seconds 540] [--processes 3] [--out O]
  python experiments/adapters/run.py --check          # all phases at toy size on a CPU, in half a minute

DATA holds enwik8.xz and books.txt.xz, in folders below it if need be. The base is trained first and kept in O. Finished
arms are skipped, and each is written to O/arms.jsonl as it ends: the study can be done in parts, a stop loses the arms
under way.
"""

import dataclasses
import functools
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(1, str(Path(__file__).parents[1]))

from methods import SHARES, Arm, Chosen, projections, tuned
from study import Arms, arguments, best_of_grid, each, threefold
from training import OTHER, Size, Workshop, base_files, read, toy

from tokenformer.config import ModelConfig

MODEL = ModelConfig(layers=5, dim=256, heads=4, vocab=384, context=256, qkv_tokens=512, proj_tokens=512,
                    ffn_tokens=1792).resolved()  # fmt: skip
STUDY = Size(MODEL, base_steps=10_000, steps=1200, sequences=64)
RATES = {  # four each, extended until the best is inside
    "segment": (1e-3, 3e-3, 1e-2, 3e-2), "lora": (3e-4, 1e-3, 3e-3, 1e-2), "chosen": (3e-4, 1e-3, 3e-3, 1e-2),
    "ia3": (3e-3, 1e-2, 3e-2, 1e-1), "last": (1e-4, 3e-4, 1e-3, 3e-3), "full": (3e-5, 1e-4, 3e-4, 1e-3),
}  # fmt: skip
SEEDS = (0, 1, 2)
FIRST = 20  # seconds that an arm is thought to need before one was measured
PLAIN = [Arm(m, share) for share in SHARES for m in ("segment", "lora", "chosen")]
PLAIN += [Arm(m) for m in ("ia3", "last", "full")]
VARIANTS = [Arm("segment", "1.3", keys="copies"), Arm("segment", "1.3", place="ffn")]
VARIANTS += [Arm("segment", "1.3", keys="copies", place="ffn")]
READY: dict[str, Workshop] = {}  # of a worker process


class Study:
    """The arms of the study, and the bases that they begin from."""

    rates, extensions = 4, 2  # of a grid, and how often it is extended at most

    def __init__(self, size: Size, raw: dict, out: Path, seconds: float, processes: int, device: str) -> None:
        self.size, self.out, self.device = size, out, device
        self.arms = Arms(out, _told, seconds, processes, _begin, (size, raw, out, device))

    def once(self, name: str, keys: dict, work: Callable, given: Any, length: float) -> dict:
        def needed() -> float:
            return 15 + length * self.arms.pace(lambda entry: entry["seconds"] if "method" in entry else None, FIRST)

        return self.arms.once(name, keys | {"device": self.device}, work, given, needed)

    def base(self, name: str) -> dict:
        """Train the base if its weights are not there; return what it gives on both texts."""
        if not all(file.exists() for file in base_files(self.out, name)):
            self.arms.done.pop(f"base {name}", None)
        return self.once(f"base {name}", {}, _base, name, self.size.base_steps / self.size.steps)

    def run(self, arms: Sequence[Arm]) -> list[dict]:
        """Return what arms gave, in their order. What is not done yet runs at once, as far as there are processes."""
        for name in {arm.base for arm in arms}:
            self.base(name)
        return each(arms, lambda arm: self.once(arm.name, dataclasses.asdict(arm), _tune, arm, 1.0))

    def best_rate(self, arm: Arm, rates: Sequence[float]) -> Arm:
        """Choose a rate by `dev` of the new text; a grid is extended threefold until its best is inside."""

        def losses(grid: list[float]) -> list[float]:
            tried = self.run([replace(arm, rate=rate) for rate in grid])
            return [entry["bits"][OTHER[arm.base]]["dev"] for entry in tried]

        return replace(arm, rate=best_of_grid(rates, losses, self.extensions, threefold))

    def tune(self, arms: Sequence[Arm]) -> list[Arm]:
        """Choose the rate of every arm, then run the other seeds at it."""
        for name in {arm.base for arm in arms}:
            self.base(name)

        def one(arm: Arm) -> Arm:
            best = self.best_rate(arm, RATES[arm.method][-self.rates :])
            self.run([replace(best, seed=seed) for seed in SEEDS])
            return best

        return each(arms, one)

    def phases(self, names: Sequence[str]) -> None:
        self.arms.phases({name: functools.partial(PHASES[name], self) for name in names})


def _told(entry: dict) -> str:
    return ", ".join(f"{text} {found['test']:.4f}" for text, found in entry["bits"].items()) + " bits per byte"


def _begin(size: Size, raw: dict, out: Path, device: str) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    READY["here"] = Workshop(size, raw, out, device)


def _base(name: str) -> dict:
    return READY["here"].train_base(name)


def _tune(arm: Arm) -> dict:
    return READY["here"].tune(arm)


def sweep(study: Study) -> list[Arm]:
    """Every method and size: four rates, three seeds at the best."""
    return study.tune(PLAIN)


def variants(study: Study) -> None:
    """Other segments of 1.3 %: keys that are copies of used ones, all tokens in the feed-forward layer, both."""
    study.tune(VARIANTS)


def back(study: Study) -> None:
    """The other way round: a base trained on the books, tuned to enwik8 by the best size of segment and of LoRA, and by
    full tuning, each at the rate that was chosen before. Nothing is chosen here.
    """
    chosen = sweep(study)
    for method in ("segment", "lora", "full"):
        mine = [arm for arm in chosen if arm.method == method]
        losses = [entry["bits"]["books"]["dev"] for entry in study.run(mine)]
        best = mine[losses.index(min(losses))]
        study.run([replace(best, base="books", seed=seed) for seed in SEEDS])


PHASES = {"sweep": sweep, "variants": variants, "back": back}


def check() -> None:
    """Run every phase at toy size on made texts, and assert what the study rests on."""
    size, random = toy(STUDY), np.random.default_rng(0)
    raw = {"enwik8": random.integers(97, 110, 20_000), "books": random.integers(104, 123, 20_000)}
    raw = {name: some.astype(np.uint8) for name, some in raw.items()}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        shop = Workshop(size, raw, out, "cpu")
        shop.train_base("enwik8")
        check_methods(shop)
        Study.rates, Study.extensions = 2, 0
        late, study = (Study(size, raw, out, seconds, 2, "cpu") for seconds in (1, 1e9))
        late.phases(list(PHASES))
        assert not late.arms.ran, "an arm was begun that would not end in time"
        study.phases(list(PHASES))
        again = Study(size, raw, out, 1e9, 1, "cpu")
        again.phases(list(PHASES))
        ran, entries = study.arms.ran, list(study.arms.done.values())
        assert len(ran) == len(set(ran)) and not again.arms.ran, "a finished arm was run again"
        assert all(math.isfinite(e["bits"][t]["test"]) for e in entries for t in raw), entries
        from report import tables

        print(tables(entries))
        print(f"all is well: {len(ran)} arms")


def check_methods(shop: Workshop) -> None:
    c, base, uses = shop.size.model, shop.base("enwik8"), shop.uses_of("enwik8")
    ids = torch.randint(1, 257, (3, 20), generator=torch.Generator().manual_seed(0))
    plain = tuned(c, base, Arm("full"), uses)(ids).logits
    counts: dict[str, set[int]] = {}
    for arm in [*PLAIN, *VARIANTS]:
        model = tuned(c, base, arm, uses)
        assert torch.equal(model(ids).logits, plain), f"{arm.what} does not begin as the base"
        learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if arm.share:
            counts.setdefault(arm.share, set()).add(learning)
        model(ids, labels=ids).loss_sum.backward()
        assert all((p.grad is None) is not p.requires_grad for p in model.parameters()), arm.what
    assert all(len(found) == 1 for found in counts.values()), f"sizes are not equal: {counts}"
    for layer in projections(tuned(c, base, Arm("chosen", "0.5"), uses)).values():
        part: Any = layer.segments[0]
        assert isinstance(part, Chosen)
        with torch.no_grad():
            part.key.add_(1)
        moved = (part(torch.float32)[0] != part.segment.key_tokens).any(1).nonzero().flatten()
        assert torch.equal(moved, part.rows), "other tokens than the chosen ones moved"
    check_lora(c, base)
    layer = next(iter(projections(tuned(c, base, Arm("ia3"), uses)).values()))
    x, factor = torch.randn(5, c.dim), torch.rand(c.segments("qkv")[0][0])
    plain_layer = next(iter(projections(tuned(c, base, Arm("full"), uses)).values()))
    with torch.no_grad():
        layer.segments[0].factor_N.copy_(factor)  # pyrefly: ignore
    by_hand = (plain_layer.activations(x)[0][1] * factor) @ plain_layer.segments[0].value_tokens
    torch.testing.assert_close(layer(x), by_hand, rtol=1e-5, atol=1e-6)


def check_lora(c: ModelConfig, base: dict) -> None:
    """Our LoRA is peft's (rslora, by `target_parameters`), if peft is here to be asked."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        return
    ours, theirs = tuned(c, base, Arm("lora", "1.3"), {}), tuned(c, base, Arm("full"), {})
    how = {
        "r": 3,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": ["key_tokens", "value_tokens"],
    }
    rank = {"rank_pattern": {r".*ffn\.segments\.0(\.base_layer)?\.(key|value)_tokens": 2}}
    inject_adapter_in_model(LoraConfig(**how, **rank), theirs)
    for name, layer in projections(ours).items():
        wrapper: Any = theirs.get_submodule(name).segments[0]
        while hasattr(wrapper, "lora_A"):
            half: Any = wrapper.parameter_name.removesuffix("_tokens")
            for letter in ("a", "b"):
                mine: Any = getattr(layer.segments[0], f"{half}_{letter}")
                with torch.no_grad():
                    mine.normal_()
                    getattr(wrapper, f"lora_{letter.upper()}")["default"].weight.copy_(mine)
            wrapper = wrapper.base_layer
    ids = torch.arange(1, 13)[None]
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


def main() -> None:
    parser = arguments(__file__, __doc__, PHASES, processes=3)
    args = parser.parse_args()
    if args.check:
        return check()
    if args.data is None:
        parser.error("say with --data where enwik8.xz and books.txt.xz are")
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    Study(STUDY, read(args.data), args.out, args.seconds, args.processes, device).phases(args.phase)


if __name__ == "__main__":
    main()
