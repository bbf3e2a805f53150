"""The memory that `tokenformer plan` estimates for one GPU, and the peak that training really has there.

  python benchmarks/plan_memory.py [--cells 150m:adamw:none:8 450m:muon:none:4 900m:muon:full:8] [--out FILE]

A cell is preset:optimizer:activation checkpointing:micro-batch[:setting…]. Each trains three steps of two micro-batches
on random ids, compiled as training would be, in a process of its own, all cells at once. Prints a JSON line each; the
estimate should be within 15 %.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from step import commit, parsed

CELLS = ["150m:adamw:none:8", "450m:muon:none:4", "900m:muon:full:8"]


def measure(cell: str) -> dict:
    import torch

    from tokenformer.config import load
    from tokenformer.models import build
    from tokenformer.parallel.estimate import estimate
    from tokenformer.parallel.layout import Layout
    from tokenformer.parallel.mesh import Degrees
    from tokenformer.train.compile import choose_compiler, wrap
    from tokenformer.train.optim import Optimizer

    preset, optimizer, again, micro, *more = cell.split(":")
    settings = [f"batch={2 * int(micro)}", f"micro_batch={micro}", f"optimizer.kind={optimizer}"]
    settings += ["train.precision=bf16", f"train.activation_checkpointing={again}", *more]
    config = load(f"lm/{preset}", overrides=settings)
    expected = estimate(config, Degrees())
    device = torch.device("cuda")
    compiler = choose_compiler(config.train, device)
    with torch.device("meta"):
        model = build(config.model)
    model.to_empty(device=device).compute_dtype = torch.bfloat16
    with torch.no_grad():  # any values will do
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    for block in model.blocks:
        wrap(block, config.train, compiler)
    rule = Optimizer(Layout(model), config.optimizer)
    one, go = torch.ones((), device=device), torch.zeros((), device=device)
    for _ in range(3):
        for _ in range(2):
            ids = torch.randint(config.model.vocab, (int(micro), config.model.context), device=device)
            loss = model(ids, labels=ids).loss_sum
            assert loss is not None
            (loss / ids.numel()).backward()
            del loss
        rule.step(1e-4, one, go)
        model.zero_grad()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"name": "plan: peak memory of one GPU", "model": cell, "value": expected.total, "unit": "bytes",
            "rival": "measured", "rival_value": peak, "ratio": round(expected.total / peak, 3), "compile": compiler,
            "parts": expected.memory, "reserved": reserved, "device": torch.cuda.get_device_name(),
            "torch": torch.__version__, "commit": commit()}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--out", help="also append the lines to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parsed(parser)
    if args.one:
        print(json.dumps(measure(args.one)), flush=True)
    else:
        commands = [[sys.executable, __file__, "--one", cell] for cell in args.cells]
        measured = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        lines = "".join(process.communicate()[0] for process in measured)
        print(lines, end="")
        if args.out:
            with Path(args.out).open("a") as file:
                file.write(lines)
        sys.exit(any(process.returncode for process in measured))
