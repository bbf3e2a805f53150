"""What a rank of test_token_kernels.py runs, in Triton's interpreter: distances of token-parallel kernels to the truth.

A program of its own: TRITON_INTERPRET counts when Triton is imported.
"""

import json
import os
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.ops.training_kernel_checks import Seen, far
from tests.parallel.counting import Bytes
from tests.parallel.workers import become
from tokenformer.config import ModelConfig
from tokenformer.models import build
from tokenformer.ops import pattention as ops
from tokenformer.ops.pattention import THETAS, pattention_group
from tokenformer.parallel.collectives import Team, copied, summed
from tokenformer.parallel.partial import partial_group
from tokenformer.parallel.tokens import owners, split_tokens, tiled

HALVES = {f"tokenformer::theta{half}" for half in ("_sums", "_rest", "_backward_sums", "_backward_rest")}
WHOLE = {"tokenformer::theta", "tokenformer::theta_backward"}
# rows, d_in, members: (segments, d_out); a slice of 2140 over 4 ranks is not a multiple of 64
SHAPES = {
    "qkv": (13, 64, [((70,), 64)] * 3),
    "odd": (5, 48, [((2140,), 40)]),
    "segments": (9, 32, [((30, 70, 5, 9), 24), ((30, 70, 5, 9), 24)]),
}
SOME = ("l2_norm_gelu", "softmax")


def draw(shape: str, dtype: torch.dtype):
    rows, d_in, kinds = SHAPES[shape]
    g = torch.Generator().manual_seed(len(shape))
    x = torch.randn(rows, d_in, generator=g).to(dtype)
    members = [
        [
            ((torch.randn(n, d_in, generator=g) * 0.3).to(dtype), torch.randn(n, d_out, generator=g).to(dtype), n**0.5)
            for n in sizes
        ]
        for sizes, d_out in kinds
    ]
    return x, members, [torch.randn(rows, d_out, generator=g).to(dtype) for _, d_out in kinds]


def differentiated(work, x, members, up) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    members = [[(k.clone().requires_grad_(), v.clone().requires_grad_(), tau) for k, v, tau in m] for m in members]
    outputs = work(x, members)
    leaves = [x, *(t for m in members for k, v, _ in m for t in (k, v))]
    return [*outputs, *torch.autograd.grad(list(outputs), leaves, up)]


def rows_of(team: Team, sizes: list[int]) -> list[slice]:
    """The rows of each segment that this rank holds."""
    if not team.whole:
        return [slice(*list(pairwise(tiled(n, team.ranks)))[team.rank]) for n in sizes]
    return [slice(0, n if owner == team.rank else 0) for n, owner in zip(sizes, owners(sizes, team.ranks), strict=True)]


def check_op(shape: str, theta: str, dtype: torch.dtype, team: Team) -> dict:
    """Distances to the reference of one process in float64: of the kernels and of the reference on slices."""
    x, members, up = draw(shape, dtype)
    wide = [[(k.double(), v.double(), tau) for k, v, tau in m] for m in members]
    truth = differentiated(
        lambda x, m: pattention_group(x, m, theta=theta, choice="reference"), x.double(), wide, [u.double() for u in up]
    )
    mine = [rows_of(team, [len(k) for k, _, _ in m]) for m in members]
    slices = [
        [(k[at], v[at], tau) for (k, v, tau), at in zip(m, places, strict=True)]
        for m, places in zip(members, mine, strict=True)
    ]
    flat = [at for places in mine for at in places for _ in range(2)]  # of the keys and the values of each segment
    n = len(members)
    wanted = [*truth[: n + 1], *(t[at] for t, at in zip(truth[n + 1 :], flat, strict=True))]
    found = {}
    for choice in ("triton", "reference"):
        ops.CHOICE = choice
        with Seen() as seen, Bytes() as moved:
            got = differentiated(
                lambda x, m: [summed(out, team) for out in partial_group(copied(x, team), m, theta, team)],
                x, slices, up,
            )  # fmt: skip
        found[choice] = far([t for t in got if t.numel()], [t for t in wanted if t.numel()])
        ran = {name for name in seen.names if name.startswith("tokenformer::theta")}
        assert ran == (set() if choice == "reference" else WHOLE if team.whole else HALVES), (choice, ran)
        outputs = sum(t.nbytes for t in [*got[: n + 1]])  # each is summed once, and so is the gradient of x
        found[f"{choice} bytes"] = moved.total - outputs
    return found


def check_model(team: Team, group, compiler: str) -> tuple[float, float]:
    """Distances to the loss and gradients of one process in float64: of the kernels and of the reference on slices."""
    tokens = {"qkv_tokens": [16, 24, 9, 7], "proj_tokens": [20, 30, 8, 12], "ffn_tokens": [70, 64, 11, 13]}
    shape = ModelConfig(layers=1, dim=32, heads=4, vocab=128, context=16, rotary_fraction=0.5, **tokens)
    ids = torch.arange(18).reshape(2, 9) * 7 % 128
    ops.CHOICE = "reference"
    alone = build(shape)
    whole = {name: p.detach().clone() for name, p in alone.named_parameters()}
    truth = alone.double()(ids, labels=ids).loss_sum
    truth.backward()
    distances = []
    for choice in ("triton", "reference"):
        ops.CHOICE = choice
        model = build(shape)
        place = SimpleNamespace(degrees=SimpleNamespace(token=team.ranks), groups={"token": group}, token=team.rank)
        place.config = SimpleNamespace(segments="per-rank" if team.whole else "split")
        splits = split_tokens(model, place)
        model.load_state_dict({n: whole[n][split.box(team.rank, 0, 1)] for n, split in splits.items()}, assign=True)
        model.requires_grad_()
        if compiler != "none" and choice == "triton":
            model.blocks[0].compile(backend=compiler, dynamic=False, fullgraph=True)
        with Seen() as seen:
            loss = model(ids, labels=ids).loss_sum
            loss.backward()
        ran = {name for name in seen.names if name.startswith("tokenformer::theta")}
        assert ran == (set() if choice == "reference" else WHOLE if team.whole else HALVES), (choice, ran)
        ours = {n: p.grad for n, p in model.named_parameters() if p.numel()}
        theirs = {n: p.grad[splits[n].box(team.rank, 0, 1)] for n, p in alone.named_parameters() if n in ours}
        distances.append(far([loss, *ours.values()], [truth, *theirs.values()]))
    return distances[0], distances[1]


def check(rank: int, world: int, port: int, out: str, compiler: str) -> None:
    become(rank, world, port, out)
    code = 1
    try:
        dist.init_process_group("gloo")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        found: dict = {"op": {}, "model": {}}
        for ranks, group in ((4, dist.group.WORLD), (2, pairs[rank // 2])):
            for whole in (False, True):
                team = Team(group.group_name, rank % ranks, ranks, whole)
                if whole == (ranks == 2):
                    found["model"][f"{ranks} ranks, whole {whole}"] = check_model(team, group, compiler)
                cases = [("segments", theta, torch.float32) for theta in (SOME if whole else THETAS)]
                if not whole:
                    cases += [("qkv", "l2_norm_gelu", torch.float16), *(("odd", t, torch.float32) for t in SOME)]
                for case in cases if compiler == "none" else ():
                    found["op"][f"{ranks}, {case[0]}, {case[1]}, {case[2]}, {whole}"] = check_op(*case, team)
        Path(f"{out}/{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    check(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
