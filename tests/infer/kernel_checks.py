"""How far a fused step is from the packed forward, which other tests tie to the model. Run as a program it checks in
Triton's interpreter (which must be chosen before triton is imported) and prints one JSON object.
"""

import dataclasses
import json

import torch
from small_models import make

from tokenformer.config import LayerOverride
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.kernel_step import FusedModel, Tuning
from tokenformer.infer.packed import Packed
from tokenformer.infer.quantised import rounded
from tokenformer.infer.skipping import skipping
from tokenformer.models import LanguageModel

PARTS = {"apart": True, "pdl": False, "one_rows": 8, "one_words": 32, "value_rows": 32}
SMALL = Tuning(
    one_programs=4, one_values=4, one_wide=8, one_depth=3, one_slots=2, score_rows=32, value_programs=8, block=32,
    slots=4, slot_programs=20, **PARTS,
)  # fmt: skip
WHOLE = Tuning(
    one_programs=1, one_values=1, one_wide=1, one_depth=9, one_slots=8, value_programs=1, slots=8, slot_programs=1,
    **PARTS,
)  # fmt: skip
SHAPES = {
    "one segment": {"qkv_tokens": 64, "proj_tokens": 128, "ffn_tokens": 256},
    "segments": {"qkv_tokens": [70, 20], "proj_tokens": 50, "ffn_tokens": [100, 65, 3]},  # no multiples of 64
}

UNEVEN = {"layer_overrides": {1: LayerOverride(ffn_tokens=[100, 65])}}


def model_of(shape: str, **keys) -> LanguageModel:
    return make(**{"dim": 64, "heads": 4, "vocab": 96, "context": 64, **SHAPES[shape], **keys})


def prefilled(packed: Packed, prompts: list[list[int]]) -> StaticCache:
    """Every row of the cache filled with its own prompt, the slots behind it with noise that nobody may see."""
    cache = StaticCache(packed.config, len(prompts), 32, packed.device, packed.dtype)
    cache.k.normal_(generator=torch.Generator(packed.device).manual_seed(0))
    cache.v.normal_(generator=torch.Generator(packed.device).manual_seed(1))
    for i, prompt in enumerate(prompts):
        alone = StaticCache(packed.config, 1, 32, packed.device, packed.dtype)
        places = torch.arange(len(prompt), device=packed.device)
        packed.hidden(torch.tensor([prompt], device=packed.device), places, alone, 0)
        for whole, one in ((cache.k, alone.k), (cache.v, alone.v)):
            whole[:, i, :, : len(prompt)] = one[:, 0, :, : len(prompt)]
    return cache


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()


@torch.no_grad()
def step_error(model: LanguageModel, lengths: list[int], tuning: Tuning, fp8: bool = False) -> float:
    """The largest error of logits and cache over two steps of rows at different positions. `fp8`: of weights in 8 bits,
    against the model that was rounded to them.
    """
    model = rounded(model) if fp8 else model
    packed = Packed(model)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(96, (n,), generator=draw).tolist() for n in lengths]
    step = FusedModel(model, packed.dtype, fp8).step(len(lengths), tuning)
    assert step is not None
    ours, theirs = prefilled(packed, prompts), prefilled(packed, prompts)
    positions = torch.tensor(lengths, device=packed.device)
    worst = 0.0
    for _ in range(2):
        ids = torch.randint(96, (len(lengths),), generator=draw).to(packed.device)
        expected = packed.logits(packed.hidden(ids[:, None], positions[:, None], theirs)[:, 0])
        errors = [relative(step(ids, positions, ours), expected)]
        rows = torch.arange(len(lengths), device=packed.device)
        errors += [
            relative(a[:, rows, :, positions], b[:, rows, :, positions])
            for a, b in ((ours.k, theirs.k), (ours.v, theirs.v))
        ]
        assert all(e == e for e in errors), "NaN"
        worst, positions = max(worst, *errors), positions + 1
    return worst


@torch.no_grad()
def prefill_error(model: LanguageModel) -> float:
    """Two chunks of two rows: what the head reads, and the cache."""
    packed, fused = Packed(model), FusedModel(model, torch.float32)
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(1))
    ours, theirs = (StaticCache(model.config, 2, 16, "cpu", torch.float32) for _ in range(2))
    errors = []
    for start, stop in ((0, 7), (7, 12)):
        expected = packed.hidden(ids[:, start:stop], torch.arange(start, stop), theirs, start)
        errors.append(relative(fused.hidden(ids[:, start:stop], ours, start), expected))
    return max(*errors, relative(ours.k, theirs.k), relative(ours.v, theirs.v))


SWITCHED = {
    "qkv_tokens": [70, 20, 9],
    "proj_tokens": 50,
    "ffn_tokens": [100, 65, 3],
    "switch": {"qkv": ["", "", "a"], "ffn": ["", "a", "b"]},
    "layer_overrides": {1: LayerOverride(ffn_tokens=[100, 5], switch={"ffn": ["", "b"]})},
}
WEIGHTS = {"a": torch.tensor([1.0, 0.0, -0.5]), "b": torch.tensor([0.0, 0.0, 2.0])}  # of three rows


@torch.no_grad()
def adapter_errors(device: str = "cpu", tuning: Tuning = SMALL) -> dict[str, float]:
    """Rows with other switches each, in a step and in prefill: against the packed model, and one row at a time."""
    model = model_of("segments", layers=2, **SWITCHED).to(device)
    packed, fused = Packed(model), FusedModel(model, torch.float32)
    ids = torch.randint(96, (3, 6), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.full((3,), 5, device=device)
    given = {name: weight.to(device) for name, weight in WEIGHTS.items()}
    none = {name: torch.zeros_like(weight) for name, weight in given.items()}

    def run(rows: slice, weights: dict[str, torch.Tensor], kernels: bool) -> tuple[torch.Tensor, torch.Tensor]:
        some, switches = ids[rows], {name: weight[rows] for name, weight in weights.items()}
        cache = StaticCache(model.config, len(some), 16, device, torch.float32)
        if kernels:
            hidden = fused.hidden(some[:, :5], cache, 0, switches)
            return hidden, fused.step(len(some), tuning)(some[:, 5], positions[rows], cache, switches)
        hidden = packed.hidden(some[:, :5], torch.arange(5, device=device), cache, 0, switches)
        return hidden, packed.logits(packed.hidden(some[:, 5:], positions[rows, None], cache, None, switches)[:, 0])

    def worst(one: tuple, other: tuple) -> float:
        return max(map(relative, one, other))

    together, every = run(slice(3), given, True), run(slice(3), given, False)
    alone = [run(slice(i, i + 1), given, True) for i in range(3)]
    assert relative(together[1], run(slice(3), none, True)[1]) > 0.01  # they matter
    return {
        "adapters, 3 rows": worst(together, every),
        "adapters, all off": worst(run(slice(3), none, True), run(slice(3), {}, False)),
        "adapters, together and alone": worst(together, tuple(torch.cat(parts) for parts in zip(*alone, strict=True))),
    }


KEPT = dataclasses.replace(SMALL, kept_rows=32, kept_cols=32)


@torch.no_grad()
def skipped_error(fp8: bool) -> float:
    """A step that skips half of the values, against the packed model that does so; a step that skips none differs."""
    two = {} if fp8 else UNEVEN
    model = model_of("segments", layers=1 + len(two), qkv_tokens=[20, 9], ffn_tokens=[40, 3], vocab=100, **two)
    model = rounded(model) if fp8 else model
    ids = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(2))
    whole, (packed, skips) = Packed(model), skipping(model, torch.float32, ids, 0.5)
    step, prompts = FusedModel(model, torch.float32, fp8, skips).step(1, KEPT), [ids[0, :9].tolist()]
    (expected, other), position = (prefilled(whole, prompts) for _ in range(2)), torch.tensor([9])
    logits, dense = (p.logits(p.hidden(ids[:1, 9:10], position[:, None], cache)[:, 0])
                     for p, cache in ((packed, expected), (whole, other)))  # fmt: skip
    assert relative(logits, dense) > 0.01
    return relative(step(ids[0, 9:10], position, prefilled(whole, prompts)), logits)


def unread_error() -> float:
    """Values of tokens that are skipped may be anything, even NaN; one token of each member is kept."""
    from tokenformer.ops.kernels import decode_one

    score = torch.full((2, 64), -1.0)
    score[:, 5] = 50.0
    values, out = torch.full((2, 64, 40), torch.nan), torch.ones(2, 40)
    values[:, 5] = torch.arange(80.0).view(2, 40)
    rule, base = torch.tensor([[-1.0, 0.5, -0.1, 0.0]] * 2), torch.full((2, 40), 3.0)
    tau, bounds = torch.tensor([8.0]), torch.tensor([0, 64], dtype=torch.int32)
    part, counter = torch.empty(2 * 4 * 40), torch.zeros(8, dtype=torch.int32)
    decode_one.values_kept(
        score, tau, bounds, values, rule, base, out, part, counter, add=True, rows=16, cols=32, warps=4, pdl=False
    )
    weight = torch.nn.functional.gelu(50.0 * 8 / score[0].norm())
    return relative(out, 1 + 3 + values[:, 5] * (weight + 0.1))


def greedy_error() -> float:
    """The share of numbers that differ from what the engine's own operations give."""
    from tokenformer.ops.kernels import decode

    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    logits[1, [7, 30]] = 9.0  # the first of equals
    logits[2, 45] = 10.0  # no token of the vocabulary
    logits[3, 11] = 10.0  # a stop token
    token, position, out = torch.zeros(4, dtype=torch.long), torch.tensor([5, 6, 7, 8]), torch.zeros(4, 6).long()
    last, limit, done = position - 2, torch.tensor([3, 9, 9, 9]), torch.tensor([False, False, True, False])
    decode.greedy(logits, 40, token, out, position, last, limit, done.view(torch.int8), torch.tensor([11, 12]))
    expected = logits[:, :40].argmax(-1)
    assert expected[1] == 7
    wrong = [
        token != expected,
        out[:, 2] != torch.where(torch.tensor([False, False, True, False]), 0, expected),
        out[:, [0, 1, 3, 4, 5]] != 0,
        position != torch.tensor([6, 7, 7, 9]),
    ]
    wrong.append(done != torch.tensor([True, False, True, True]))
    return torch.cat([w.flatten() for w in wrong]).float().mean().item()


def zeros_error() -> float:
    """A row of zeros, and keys of zeros: the statistic is zero, and nothing may become NaN."""
    model = model_of("one segment", layers=1)
    with torch.no_grad():
        model.embedding.weight[3] = 0
        model.blocks[0].attention.query.segments[0].key_tokens.zero_()
    cache = StaticCache(model.config, 1, 16, "cpu", torch.float32)
    ids, positions, packed = torch.tensor([3]), torch.tensor([0]), Packed(model)
    with torch.no_grad():
        ours = FusedModel(model, torch.float32).step(1, SMALL)(ids, positions, cache)
        return relative(ours, packed.logits(packed.hidden(ids[:, None], positions[:, None], cache)[:, 0]))


def mend_interpreter() -> None:
    """Triton 3.6 makes numbers of one-element arrays by int(), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    mend_interpreter()
    results = {}
    results["one segment, 1 rows"] = step_error(model_of("one segment", layers=1), [9], SMALL)
    for shape in SHAPES:
        results[f"{shape}, 3 rows"] = step_error(model_of(shape, layers=1), [5, 1, 12], SMALL)
    results["layers of two shapes"] = step_error(model_of("segments", layers=2, **UNEVEN), [9], SMALL)
    for lengths in ([9], [5, 1]):  # a vocabulary of no whole tiles
        uneven = model_of("segments", layers=1, qkv_tokens=[20, 9], ffn_tokens=[40, 3], vocab=100)
        results[f"fp8, {len(lengths)} rows"] = step_error(uneven, lengths, SMALL, fp8=True)
    results |= {f"skipped values{', fp8' * fp8}": skipped_error(fp8) for fp8 in (False, True)}
    results["skipped values are not read"] = unread_error()
    results["prefill"] = prefill_error(model_of("segments", layers=1))
    results["greedy"] = greedy_error()
    results["zeros"] = zeros_error()
    results |= adapter_errors()
    for lengths in ([9], [5, 1]):
        half = model_of("one segment", layers=1).half()
        results[f"half precision, {len(lengths)} rows, undivided"] = step_error(half, lengths, WHOLE)
    print(json.dumps(results))
