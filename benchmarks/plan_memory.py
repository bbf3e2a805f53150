"""The memory that `tokenformer plan` estimates for one GPU, and the peak that training really has there.

  python benchmarks/plan_memory.py [--cells 150m:adamw:none:8 450m:muon:none:4 900m:muon:full:8]

A cell is preset:optimizer:activation checkpointing:micro-batch. Each trains three steps on random ids in a process
of its own (without a trainer: model, optimizer, loss). Prints JSON lines; the estimate should be within 15 %.
"""

import argparse
import json
import subprocess
import sys

CELLS = ["150m:adamw:none:8", "450m:muon:none:4", "900m:muon:full:8"]


def measure(cell: str) -> dict:
    import torch

    from tokenformer.config import load
    from tokenformer.models import LanguageModel
    from tokenformer.parallel.mesh import Degrees
    from tokenformer.parallel.plan import estimate
    from tokenformer.train.optim import Optimizer
    from tokenformer.train.wrap import wrap

    preset, optimizer, again, micro = cell.split(":")
    settings = [f"batch={micro}", f"micro_batch={micro}", f"optimizer.kind={optimizer}"]
    settings += ["train.precision=bf16", f"train.activation_checkpointing={again}"]
    config = load(f"lm/{preset}", overrides=settings)
    expected = estimate(config, Degrees())
    with torch.device("cuda"):
        model = LanguageModel(config.model)
    model.compute_dtype = torch.bfloat16
    for block in model.blocks:
        wrap(block, config.train, "none")
    rule = Optimizer(model.named_parameters(), config.optimizer)
    one, go = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    for _ in range(3):
        ids = torch.randint(config.model.vocab, (int(micro), config.model.context), device="cuda")
        out = model(ids, labels=ids)
        assert out.loss_sum is not None
        (out.loss_sum / ids.numel()).backward()
        rule.step(1e-4, one, go)
        rule.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    return {"name": "plan: peak memory of one GPU", "model": cell, "value": expected.total, "unit": "bytes",
            "rival": "measured", "rival_value": peak, "ratio": round(expected.total / peak, 3),
            "parts": expected.memory, "device": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)), flush=True)
    else:
        for cell in args.cells:
            subprocess.run([sys.executable, __file__, "--one", cell], check=False)
