"""The largest batch, and the longest context of one sample, that a GPU trains for each preset.

  python benchmarks/memory.py [--presets lm/150m lm/1.5b …] [--out FILE]

bf16, AdamW, kernels, no checkpointing of activations, blocks not compiled. Peak memory of one and of two samples tells
what a sample takes; the batch that should just fit is then tried, and fewer until it does. Prints JSON lines.
"""

import argparse
import gc
import json
from pathlib import Path

import torch
from step import Ours, commit, parsed

from tokenformer.config import ModelConfig, load

PRESETS = ["lm/150m", "lm/450m", "lm/900m", "lm/1.5b", "grow/354m", "grow/1.4b"]


def peak(config: ModelConfig, samples: int, context: int) -> int | None:
    """Bytes at the fullest moment of a step, moments of AdamW being there already; None where it does not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        model = Ours(config)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(config.vocab, (samples, context), device="cuda")
        for batch in (ids[:1, :64], ids):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated()


def largest(config: ModelConfig, free: int) -> tuple[int, int]:
    """Samples of the preset's context, and positions of one sample."""
    one, two = (peak(config, n, config.context) for n in (1, 2))
    assert one is not None and two is not None
    guess = int((0.97 * free - one) // (two - one)) + 1

    def tried(samples: int, fits) -> int:
        while samples > 1 and fits(samples) is None:
            samples = int(samples * 0.97) if samples > 40 else samples - 1
        return samples

    batch = tried(guess, lambda n: peak(config, n, config.context))
    return batch, tried(batch, lambda n: peak(config, 1, n * config.context)) * config.context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--out", type=Path)
    args = parsed(parser)
    free, lines = torch.cuda.mem_get_info()[0], []
    for preset in args.presets:
        config = load(preset).model
        batch, context = largest(config, free)
        line = {
            "name": "largest batch", "model": preset, "value": batch, "unit": "samples", "context": config.context,
            "longest_context_of_one": context, "memory_gb": round(free / 1e9, 1),
            "device": torch.cuda.get_device_name(), "commit": commit(),
        }  # fmt: skip
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
