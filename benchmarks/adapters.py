"""Memory and time of a step that tunes lm/1.5b: an adapter of 1 % new tokens, full training, and LoRA through peft.

  python benchmarks/adapters.py [--cells full:compiled:8 adapter:compiled:8 …] [--seconds 540] [--out FILE]
  python benchmarks/adapters.py --check          # toy sizes on the CPU, to see that it runs

A cell is who:how:samples. Who: full, adapter, lora; `-bf16` behind it: what is frozen is held in bf16 (fp32 else). LoRA
has as many parameters as the adapter (rank 10, keys and values of all projections, rslora) and is peft's own, by
`target_parameters`, around our class of transformers. How: compiled (each block, as the trainer does it) or eager. peft
changes the model at every call, which the compiler does not take, so LoRA is eager, and an eager adapter is measured
beside it. AdamW on what learns, bf16, random ids. Each cell runs in its own process. `time_of_full` and
`memory_of_full` are shares of full training, compiled, in the same call.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from step import commit
from torch import Tensor

from tokenformer.adapters import with_segments
from tokenformer.config import ModelConfig, load
from tokenformer.config_train import AdapterConfig
from tokenformer.models import build
from tokenformer.models.cost import cost
from tokenformer.train.adapting import Base, builder

FULL = "full:compiled:8"
CELLS = [FULL, "adapter:compiled:8", "adapter-bf16:compiled:8", "adapter:eager:8", "lora:eager:8", "lora-bf16:eager:8"]
RANK = 10
TOY = {"layers": 2, "dim": 64, "heads": 2, "qkv_tokens": 64, "proj_tokens": 64, "ffn_tokens": 256, "vocab": 128,
       "context": 32}  # fmt: skip


def made(c: ModelConfig, who: str, device: str) -> Any:
    """Return the model with random values; what does not learn is frozen."""
    kind, _, hold = who.partition("-")
    with torch.device("meta"):
        names = {name for name, _ in build(c).named_parameters()}
        if kind == "adapter":
            sizes = {w: RANK * (c.segments(w)[0][0] + c.dim) // c.dim for w in ("qkv", "proj", "ffn")}
            new = {(which, layer): [n] for which, n in sizes.items() for layer in range(c.layers)}
            settings = AdapterConfig(ffn_tokens=sizes["ffn"], hold=hold or "fp32")  # pyrefly: ignore
            base = Base(None, dict.fromkeys(names), c, [])  # pyrefly: ignore
            model = builder(build, base, settings)(with_segments(c, new, settings.name))
        else:
            model = build(c)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if kind == "lora":
        for parameter in model.parameters() if hold else ():
            parameter.data = parameter.data.bfloat16()
    model.compute_dtype = torch.bfloat16 if device == "cuda" else None
    return model.train()


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    from tokenformer.hub.hf import TokenFormerForCausalLM

    how = {"r": RANK, "use_rslora": True, "target_parameters": ["key_tokens", "value_tokens"]}
    return get_peft_model(TokenFormerForCausalLM.from_native(model), LoraConfig(**how)).train()


def measure(cell: str, repeats: int, check: bool) -> dict[str, Any]:
    who, how, samples = cell.split(":")
    device = "cpu" if check else "cuda"
    c = load("lm/1.5b").model
    c = ModelConfig(**{**{f: getattr(c, f) for f in c.__dataclass_fields__}, **(TOY if check else {})}).resolved()
    torch.manual_seed(0)
    model = made(c, who, device)
    for block in model.blocks if how == "compiled" and not check else ():
        block.compile(dynamic=False)
    ids = torch.randint(c.vocab, (int(samples), c.context), device=device)
    if who.startswith("lora"):
        tuned = with_lora(model)

        def loss() -> Tensor:
            return tuned(input_ids=ids, labels=ids).loss
    else:

        def loss() -> Tensor:
            out = model(ids, labels=ids)
            return out.loss_sum / out.count

    learning = [p for p in model.parameters() if p.requires_grad]  # peft's are inside of it, too
    optimizer = torch.optim.AdamW(learning, lr=1e-4, fused=not check)

    def step() -> Tensor:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    def wait() -> None:
        if not check:
            torch.cuda.synchronize()

    for _ in range(1 if check else 4):
        found = step()
    assert torch.isfinite(found), f"{cell}: the loss is {found.item()}"
    if not check:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            step()
        wait()
        times.append((time.perf_counter() - begun) / repeats)
    taken, count, parameters = sorted(times)[1], sum(p.numel() for p in learning), cost(c).parameters
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "name": "tuning step", "model": cell, "value": round(taken * 1000, 2), "unit": "ms",
        "tokens_per_second": round(ids.numel() / taken), "spread": round((max(times) - min(times)) / taken, 4),
        "memory_gb": None if check else round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "held_bytes": held, "parameters": parameters, "learning": count, "share": round(count / parameters, 5),
        "device": "cpu" if check else torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="a cell that would not end in time is not begun")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="toy sizes on the CPU, in this process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.check and not torch.cuda.is_available():
        parser.error("this is measured on a GPU, and PyTorch sees none here; --check runs toy sizes")
    if args.one:
        print(json.dumps(measure(args.one, args.repeats, False)))
        return
    lines: list[dict[str, Any]] = []
    begun, longest = time.monotonic(), 0.0
    for cell in args.cells:
        now = time.monotonic()
        if now - begun + 1.2 * longest > args.seconds:
            print(f"not begun, {1.2 * longest:.0f} s are needed: {cell}", file=sys.stderr)
            continue
        if args.check:
            lines.append(measure(cell.rpartition(":")[0] + ":2", 1, True))
        else:  # in a process of its own: what one compiled or allocated, another would inherit
            command = [sys.executable, __file__, "--one", cell, "--repeats", str(args.repeats)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            longest = max(longest, time.monotonic() - now)
            if done.returncode:  # out of memory, or peft is missing: the others are measured all the same
                print(f"{cell} failed with code {done.returncode}", file=sys.stderr)
                continue
            lines.append(json.loads(done.stdout.splitlines()[-1]))
        line, full = lines[-1], next((x for x in lines if x["model"].startswith("full:compiled")), None)
        if full:
            line["time_of_full"] = round(line["value"] / full["value"], 4)
            if line["memory_gb"]:
                line["memory_of_full"] = round(line["memory_gb"] / full["memory_gb"], 4)
        print(json.dumps(line), flush=True)
        if args.out:
            args.out.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
