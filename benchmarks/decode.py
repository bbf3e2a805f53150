"""Decoding on one GPU: our engine and transformers' GPT-NeoX of equal size (static cache, compile), in one run.

  python benchmarks/decode.py [--cells 1.5b:1 1.5b:32 150m:1] [--weights bf16 fp8] [--skip 0.6]
      [--tune 1.5b:1 …] [--parts check ours rival]

First it checks: tokens and logits against the reference, which kernels ran. Every cell is measured with weights in bf16
and in fp8, and those of batch 1 also with value tokens skipped. Cells under --tune try shapes of the kernels one after
another and keep what is fastest and right. Prints JSON lines; a short table comes last. Tokens/s are new tokens over
the whole call, prefill included, for both. Needs torch and triton; transformers for the rival.
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from pathlib import Path

import torch
from step import commit, parsed

from tokenformer.config import ModelConfig
from tokenformer.infer import Engine
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.kernel_step import FusedModel, Tuning
from tokenformer.infer.packed import Packed
from tokenformer.infer.quantised import rounded
from tokenformer.infer.skipping import skipping
from tokenformer.models import LanguageModel, cost

SHAPES = {
    "1.5b": {"layers": 40, "dim": 1536, "heads": 16, "qkv_tokens": 1536, "proj_tokens": 1536, "ffn_tokens": 6144},
    "150m": {"layers": 12, "dim": 768, "heads": 12, "qkv_tokens": 768, "proj_tokens": 768, "ffn_tokens": 3072},
}
RIVALS = {"1.5b": ("GPT-NeoX 1.4B", 24, 2048, 16), "150m": ("GPT-NeoX 160M", 12, 768, 12)}
PROMPT, NEW, SLOTS = 128, 256, 384
ONE: list[dict] = [
    {"one_slot_warps": 4},
    {"one_slot_warps": 2},
    {"one_slots": 32, "one_slot_warps": 4},
    {"one_slots": 32, "one_slot_warps": 2},
    {"one_slots": 32, "one_slot_warps": 1},
    {"one_slots": 16, "one_slot_warps": 1, "slot_programs": 256},
    {"slot_programs": 64},
    {"one_programs": 396, "one_depth": 12},
    {"one_programs": 192, "one_depth": 24},
    {"one_programs": 528},
    {"one_values": 192},
    {"one_values": 396},
    {"one_wide": 96},
    {"one_depth": 24},
    {"one_depth": 12, "one_registers": 96},
    {"one_rows": 4, "one_warps": 4, "one_programs": 528, "one_values": 528, "one_wide": 264},
    {"one_rows": 16, "one_warps": 16, "one_registers": 64, "one_wide": 96},
    {"one_words": 64},
    {"one_words": 256, "one_rows": 4},
    {"one_programs": 132, "one_values": 132},
    {"one_registers": 96},
]
KEPT: list[dict] = [
    {"kept_rows": 128},
    {"kept_rows": 512},
    {"kept_warps": 4},
    {"kept_cols": 256, "kept_rows": 128},
    {"kept_cols": 64, "kept_rows": 512},
    {"kept_cols": 256, "kept_rows": 256, "kept_warps": 16},
]
MANY: list[dict] = [
    {"slot_warps": 1},
    {"slot_warps": 4},
    {"slots": 64},
    {"slots": 64, "slot_stages": 2},
    {"slots": 16},
    {"slot_stages": 2},
    {"slot_stages": 4},
    {"slot_programs": 1024},
    {"value_programs": 96},
    {"value_programs": 264},
    {"stages": 4},
    {"stages": 6},
    {"pdl": False},
    {"warps": 8},
]
BEGUN = time.time()


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def random_model(shape: str, dtype: torch.dtype, values: float = 0.04, **keys) -> LanguageModel:
    """Made on the GPU; with `values` of 4 the layers outweigh the embedding, and greedy text does not repeat itself."""
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(**{**SHAPES[shape], **keys}))
    model = model.to_empty(device="cuda").to(dtype).eval()
    draw = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight") or name.endswith("norm.bias"):
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                p.normal_(std=values / math.sqrt(len(p)) if "value_tokens" in name else 0.02, generator=draw)
    return model


def seconds(work, repeat: int) -> float:
    """Median of device time, by events."""
    times = []
    for _ in range(repeat):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]


def peaks() -> dict[str, float]:
    """TB/s of a copy (read and written) and of reading alone, over more than any cache holds."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
        a.sum()
    copy, read = seconds(lambda: b.copy_(a), 10), seconds(lambda: a.sum(), 10)
    return {"copy": 2 * a.nbytes / copy / 1e12, "read": a.nbytes / read / 1e12}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@torch.no_grad()
def check(shape: str, tuning: Tuning) -> None:
    """fp32: greedy tokens equal. bf16: logits as near to fp32 as the reference's own, tokens as far as they agree."""
    few = {"layers": 4, "vocab": 2048}
    model = random_model(shape, torch.float32, 4.0, **few)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2048, (n,), generator=draw).tolist() for n in (17, 64, 5)]
    eight = rounded(model)
    for backend, weights in itertools.product(("torch", "triton"), (None, "fp8")):
        engine = Engine(model, backend=backend, tuning=tuning, weights=weights)
        expected = [(eight if weights else model).generate(torch.tensor([p], device="cuda"), 32)[0, len(p) :].tolist()
                    for p in prompts]  # fmt: skip
        batched = [r.ids for r in engine.generate(prompts, 32)]
        single = [engine.generate([p], 32)[0].ids for p in prompts]
        equal = batched == expected and single == expected
        again = [r.ids for r in engine.generate(prompts, 32)] == batched
        say(name="check", model=shape, what="greedy tokens, fp32", weights=weights or "fp32", backend=engine.backend,
            graph=engine.graph, equal=equal, repeats=again, distinct=len({t for e in expected for t in e}))  # fmt: skip
    skipped = [[Engine(model, backend=backend, tuning=tuning, skip=0.5).generate([p], 32)[0].ids for p in prompts]
               for backend in ("torch", "triton")]  # fmt: skip
    say(
        name="check",
        model=shape,
        what="greedy tokens, fp32, half of the values skipped",
        equal=skipped[0] == skipped[1],
    )
    for weights in ("bf16", "fp8"):
        check_logits(shape, tuning, prompts, weights == "fp8", **few)


@torch.no_grad()
def check_logits(shape: str, tuning: Tuning, prompts: list, fp8: bool, **few) -> None:
    half = random_model(shape, torch.bfloat16, **few)
    half = rounded(half) if fp8 else half
    exact = random_model(shape, torch.float32, **few)
    for p, q in zip(exact.parameters(), half.parameters(), strict=True):
        p.copy_(q)
    ids = torch.tensor([prompts[1], prompts[1][::-1]], device="cuda")
    truth = exact(ids).logits[:, -1].double()
    errors = {"reference": relative(half(ids).logits[:, -1], truth)}
    for batch in (1, 2):
        for name, how in (("plain", dataclasses.replace(tuning, pdl=False)), ("as set", tuning)):
            packed, step = Packed(half), FusedModel(half, torch.bfloat16, fp8).step(batch, how)
            cache = StaticCache(half.config, batch, 128, "cuda", torch.bfloat16)
            packed.hidden(ids[:batch, :-1], torch.arange(63, device="cuda"), cache, 0)
            got = step(ids[:batch, -1], torch.full((batch,), 63, device="cuda"), cache)
            errors[f"batch {batch}, {name}"] = relative(got, truth[:batch])
    say(
        name="check",
        model=shape,
        what="logits in bf16 against fp32",
        weights="fp8" if fp8 else "bf16",
        errors={k: round(e, 5) for k, e in errors.items()},
    )


class Timed:
    """The step alone in a graph, at a position in the middle."""

    def __init__(self, model: LanguageModel, batch: int, fp8: bool, skip: float) -> None:
        model, self.batch, self.packed, skips = rounded(model) if fp8 else model, batch, None, None
        if skip:
            ids = torch.randint(50000, (1, 256), device="cuda")
            self.packed, skips = skipping(model, torch.bfloat16, ids, skip)
        self.packed = self.packed or Packed(model)
        self.fused = FusedModel(model, torch.bfloat16, fp8, skips)
        self.trials = KEPT if skip else ONE if batch == 1 else MANY
        self.bytes = self.fused.nbytes - round(skip * self.fused.value_bytes)
        self.cache = StaticCache(model.config, batch, SLOTS, "cuda", torch.bfloat16)
        self.cache.k.normal_()
        self.cache.v.normal_()
        self.ids = torch.randint(50000, (batch,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        self.positions = torch.full((batch,), (PROMPT + NEW // 2), device="cuda")
        with torch.no_grad():
            hidden = self.packed.hidden(self.ids[:, None], self.positions[:, None], self.cache)
            self.expected = self.packed.logits(hidden[:, 0])

    @torch.no_grad()
    def run(self, tuning: Tuning) -> tuple[float, float]:
        """Seconds of a step, and how far its logits are from those of the packed forward."""
        step = self.fused.step(self.batch, tuning)
        for _ in range(2):
            step(self.ids, self.positions, self.cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(self.ids, self.positions, self.cache)
        for _ in range(5):
            graph.replay()
        took = seconds(lambda: [graph.replay() for _ in range(20)], 5) / 20  # as they follow each other in decoding
        return took, relative(out, self.expected)


def tune(timed: Timed, shape: str, weights: str, best: Tuning, deadline: float) -> Tuning:
    """One change at a time, kept when it is faster and right."""
    least, error = timed.run(best)
    least = least if error < 0.05 else math.inf
    about = {"name": "tune", "model": shape, "batch": timed.batch, "weights": weights, "skips": timed.trials is KEPT}
    say(**about, ms=least * 1e3, error=round(error, 5), change="defaults")
    for change in timed.trials:
        if time.time() > deadline:
            break
        trial = dataclasses.replace(best, **change)
        try:
            took, error = timed.run(trial)
        except Exception as failure:  # a shape that does not compile or fit is a result too
            say(**about, change=change, failed=str(failure)[-200:])
            torch.cuda.synchronize()
            continue
        right = error < 0.05
        say(**about, ms=round(took * 1e3, 4), error=round(error, 5), change=change, kept=right and took < least)
        if right and took < least:
            best, least = trial, took
    return best


@torch.no_grad()
def profile(timed: Timed, tuning: Tuning, shape: str, weights: str) -> None:
    """Microseconds of a step by kernel, and what is left between them."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    step = timed.fused.step(timed.batch, tuning)
    step(timed.ids, timed.positions, timed.cache)
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            step(timed.ids, timed.positions, timed.cache)
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    parts = {e.key[:48]: [round(e.self_device_time_total / 3, 1), e.count // 3] for e in kernels}
    what = "[microseconds a step, launches]"
    say(name="profile", model=shape, batch=timed.batch, weights=weights, what=what, kernels=parts)


def throughput(engine: Engine, batch: int) -> float:
    """New tokens per second, prefill and the copy to the host included; the best of three after a warm-up."""
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(50000, (PROMPT,), generator=draw).tolist() for _ in range(batch)]
    engine.generate(prompts, NEW)
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        rows = engine.generate(prompts, NEW)
        torch.cuda.synchronize()
        best = max(best, sum(len(r.ids) for r in rows) / (time.perf_counter() - start))
    return best


def rival(shape: str, batches: list[int]) -> dict[int, float]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    _, layers, dim, heads = RIVALS[shape]
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * dim, max_position_embeddings=2048, rotary_pct=0.25,
    )  # fmt: skip
    with torch.device("cuda"):
        model = GPTNeoXForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    out = {}
    for batch in batches:
        ids = torch.randint(50000, (batch, PROMPT), device="cuda")
        keys = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static"}
        keys["attention_mask"] = torch.ones_like(ids)
        begun = time.time()
        for _ in range(2):
            model.generate(ids, **keys)
        best = 0.0
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            made = model.generate(ids, **keys).shape[1] - PROMPT
            torch.cuda.synchronize()
            best = max(best, batch * made / (time.perf_counter() - start))
        assert made == NEW
        out[batch] = best
        say(name="rival", model=RIVALS[shape][0], batch=batch, value=round(best, 1), unit="tokens/s",
            warm_up_seconds=round(time.time() - begun, 1))  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["1.5b:1", "1.5b:32", "150m:1"], help="model:batch")
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    help = "also skip this share of value tokens at batch 1; 0: no"
    parser.add_argument("--skip", type=float, default=0.6, metavar="SHARE", help=help)
    parser.add_argument("--tune", nargs="+", default=[], metavar="CELL", help="try shapes of the kernels for these")
    parser.add_argument("--parts", nargs="+", default=["check", "ours", "rival"], choices=["check", "ours", "rival"])
    parser.add_argument("--seconds", type=float, default=90.0, help="no new trial of a cell is begun after these")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of Tuning, such as pdl=false")
    parser.add_argument("--out", type=Path, help="a file for the final lines")
    args = parsed(parser)
    start = Tuning(**{key: json.loads(value) for key, _, value in (word.partition("=") for word in args.set)})
    torch.manual_seed(0)
    device, made, top = torch.cuda.get_device_name(), commit(), peaks()
    say(name="peak", device=device, torch=torch.__version__, **{k: round(v, 3) for k, v in top.items()}, unit="TB/s")
    cells: dict[str, list[int]] = {}
    for cell in args.cells:
        shape, _, batch = cell.partition(":")
        cells.setdefault(shape, []).append(int(batch))
    if "check" in args.parts:
        for shape in cells:
            check(shape, start)
    finals = []
    for shape, batches in cells.items() if "ours" in args.parts else ():
        model = random_model(shape, torch.bfloat16)
        cache = cost(model.config).cache_bytes() * (PROMPT + NEW // 2)
        every = itertools.product(batches, args.weights, (0.0, args.skip) if args.skip else (0.0,))
        for batch, weights, skip in (cell for cell in every if cell[0] == 1 or not cell[2]):
            timed = Timed(model, batch, weights == "fp8", skip)
            chosen = f"{shape}:{batch}" in args.tune
            tuning = tune(timed, shape, weights, start, time.time() + args.seconds) if chosen else start
            step, error = timed.run(tuning)
            profile(timed, tuning, shape, weights)
            read = timed.bytes + batch * cache
            del timed
            engine = Engine(
                model, tuning=tuning, every=64, weights="fp8" if weights == "fp8" else None, skip=skip or None
            )
            assert engine.backend == "triton"
            value = throughput(engine, batch)
            plain = [f["value"] for f in finals if (f["model"], f["batch"], f["weights"]) == (shape, batch, "bf16")][:1]
            finals.append({
                "name": "decode", "model": shape, "batch": batch, "weights": weights, "skip": skip,
                "prompt": PROMPT, "new": NEW,
                "value": round(value, 1), "unit": "tokens/s", "of_bf16": round(value / plain[0], 3) if plain else 1.0,
                "step_ms": round(step * 1e3, 4), "error": round(error, 5),
                "bytes_a_step": read, "TB/s": round(read / step / 1e12, 3),
                "share_of_copy_peak": round(read / step / 1e12 / top["copy"], 3),
                "share_of_read_peak": round(read / step / 1e12 / top["read"], 3),
                "tuning": dataclasses.asdict(tuning), "device": device, "commit": made,
            })  # fmt: skip
            say(**finals[-1])
            del engine
            torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()
        say(name="time", seconds=round(time.time() - BEGUN, 1))
    if "rival" in args.parts:
        for shape, batches in cells.items():
            theirs = rival(shape, batches)
            for line in finals:
                if line["model"] == shape:
                    other = theirs[line["batch"]]
                    line |= {"rival": f"transformers {RIVALS[shape][0]}, static cache, compile",
                             "rival_value": round(other, 1), "ratio": round(line["value"] / other, 3)}  # fmt: skip
            torch.cuda.empty_cache()
    for line in finals:
        say(**line)
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in finals))
    print(f"{'model':6} {'batch':>5} {'weights':>7} {'skip':>4} {'tokens/s':>9} {'of bf16':>7} {'step ms':>8} "
          f"{'of read peak':>12} {'rival':>9} {'ratio':>6}")  # fmt: skip
    for f in finals:
        print(f"{f['model']:6} {f['batch']:5} {f['weights']:>7} {f['skip']:4.1f} {f['value']:9.1f} {f['of_bf16']:7.3f} "
              f"{f['step_ms']:8.4f} {f['share_of_read_peak']:12.3f} {f.get('rival_value', 0):9.1f} "
              f"{f.get('ratio', 0):6.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
