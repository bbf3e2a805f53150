"""Which tiles of Θ's kernels are fastest on this GPU through a while, where the power limit counts, not in a burst.

  python benchmarks/tiles.py [--widths 768 3072 …] [--seconds 0.3]

For each width of a row (scores of one segment) and kernel (Θ and its gradient, in bf16 and in fp8): what `_tile` of
ops/kernels/pattention.py chooses beside every other tile, sustained. Prints a JSON line per kernel and width with the
five best; a tile that is better for many widths belongs into `_tile`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator

import torch
from bound import timed
from step import commit, parsed

import tokenformer.ops.kernels.fp8  # noqa: F401  (registers the operators)
from tokenformer.ops.kernels import pattention as kernels

WIDTHS = [576, 768, 1024, 1536, 2176, 3072, 4096, 5120, 6144, 8576, 19456, 34496]
SCORES = 1 << 27  # of a launch
OPS = torch.ops.tokenformer


def tiles(width: int) -> Iterator[dict[str, int]]:
    """Rows at once of a whole row, or a row in blocks, by different numbers of warps."""
    whole = 1 << (width - 1).bit_length()
    for block, rows in [(whole, 1), (whole, 2), (whole, 4), (2048, 1), (4096, 1), (8192, 1)]:
        if rows * block <= 32768 and (block == whole or block < width):
            for warps in (1, 2, 4, 8, 16):
                if 8 <= rows * block // (32 * warps) <= 128:  # numbers per thread
                    yield {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def works(width: int, device: str) -> dict[str, Callable[[], object]]:
    rows = max(1, SCORES // width)
    scores, grad = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    layout = [width], [1], [width**0.5], "l2_norm_gelu"
    _, totals = OPS.theta(scores, *layout)
    factors = torch.ones(rows, 1, device=device)
    return {
        "theta": lambda: OPS.theta(scores, *layout),
        "gradient": lambda: OPS.theta_backward([grad], scores, totals, *layout),
        "theta, fp8": lambda: OPS.theta_fp8(scores, 2.0, *layout),
        "gradient, fp8": lambda: OPS.theta_fp8_backward([grad], scores, totals, factors, *layout),
    }


def measure(width: int, seconds: float, device: str = "cuda") -> Iterator[dict]:
    own = kernels._tile
    for name, work in works(width, device).items():
        mine = own(width, name.startswith("gradient"))
        taken = {}
        for tile in [mine, *(tile for tile in tiles(width) if tile != mine)]:
            kernels._tile = lambda width, backward, tile=tile: dict(tile)
            work()
            timed(work, seconds / 2)
            taken[tuple(tile.items())] = timed(work, seconds / 2)
        kernels._tile = own
        best = sorted(taken, key=lambda tile: taken[tile][0])[:5]
        yield {
            "name": "tile", "part": name, "width": width, "value": taken[best[0]][0] * 1e3, "unit": "ms sustained",
            "rival": str(mine), "rival_value": taken[tuple(mine.items())][0] * 1e3,
            "ratio": taken[tuple(mine.items())][0] / taken[best[0]][0],
            "best": [{**dict(tile), "ms": taken[tile][0] * 1e3, "joules": taken[tile][1]} for tile in best],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each tile")
    args = parsed(parser)
    begun = time.monotonic()
    for width in args.widths:
        if width % kernels.TILE:
            parser.error(f"--widths {width}: give multiples of {kernels.TILE}, to which segments are padded")
        for line in measure(width, args.seconds):
            print(json.dumps(line | {"device": torch.cuda.get_device_name(), "commit": commit()}), flush=True)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
