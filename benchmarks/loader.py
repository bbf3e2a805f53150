"""The loader alone: tokens per second at context 2048, against torch's DataLoader with processes on the same samples.

  python benchmarks/loader.py [--tokens 200e6] [--seconds 4]

The set is random and in the page cache: this is the loader's own cost, not the disk's.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from tokenformer.config import DataConfig
from tokenformer.data.text.indexed import Indexed, write_index
from tokenformer.data.text.samples import text_loader

CONTEXT, MICRO = 2048, 16


def make_set(prefix: Path, tokens: int) -> None:
    """Random tokens in documents of about a thousand."""
    rng = np.random.default_rng(0)
    rng.integers(1, 50_277, tokens, dtype=np.uint16).tofile(f"{prefix}.bin")
    sizes = rng.integers(100, 2000, tokens // 1000)
    sizes = np.append(sizes[np.cumsum(sizes) < tokens], 0)
    sizes[-1] = tokens - sizes.sum()
    write_index(Path(f"{prefix}.idx"), np.dtype(np.uint16), sizes)


def rate(batches: Iterable, seconds: float) -> float:
    """M tokens per second, from the third batch on."""
    stream = iter(batches)
    for _ in range(2):
        next(stream)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(stream)
        count += batch.fields["ids"].size if hasattr(batch, "fields") else batch[0].numel()
    return count / (time.perf_counter() - start) / 1e6


class Plain(torch.utils.data.Dataset):
    """What one would write by hand: a shuffled index, a slice of the memory map, two tensors."""

    def __init__(self, prefix: Path) -> None:
        self.tokens = Indexed(prefix).tokens
        self.order = np.random.default_rng(0).permutation((len(self.tokens) - 1) // CONTEXT)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.order[i] * CONTEXT
        sample = torch.from_numpy(self.tokens[start : start + CONTEXT + 1].astype(np.int64))
        return sample[:-1], sample[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=200e6)
    parser.add_argument("--seconds", type=float, default=4)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "random"
        make_set(prefix, int(args.tokens))
        rival = rate(torch.utils.data.DataLoader(Plain(prefix), MICRO, num_workers=2), args.seconds)
        kinds = {
            "permutation": DataConfig(path=str(prefix)),
            "permutation, boundaries": DataConfig(path=str(prefix), boundaries=True),
            "official": DataConfig(path=str(prefix), order="official"),
            "official, boundaries": DataConfig(path=str(prefix), order="official", boundaries=True),
        }
        for name, config in kinds.items():
            loader = text_loader(config, context=CONTEXT, batch=64, micro_batch=MICRO, vocab=50_304, samples=100_000)
            value = rate(loader, args.seconds)
            line = {"name": "loader", "model": name, "value": round(value, 1), "unit": "M tokens/s"}
            line |= {"rival": "torch DataLoader, 2 processes", "rival_value": round(rival, 1)}
            line |= {"ratio": round(value / rival, 2), "context": CONTEXT, "threads": config.workers}
            line |= {"device": f"{platform.machine()}, {os.cpu_count()} cores", "commit": commit}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
