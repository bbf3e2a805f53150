"""All runs that these tests compare, by name: on how many ranks, laid out how, from where they go on."""

from typing import NamedTuple

SHORT = [
    "steps=10", "log.every=1", "batch=8", "micro_batch=2", "validation.every=5", "optimizer.rate=1e-2",
    "checkpoint.every=5", "checkpoint.keep=0", "model.heads=4", "model.rotary_fraction=0.5",
]  # fmt: skip
ODD = ["model.qkv_tokens=11", "model.proj_tokens=[7,9]", "model.ffn_tokens=[13,9,10]"]  # nothing divides
ONE = ["model.qkv_tokens=11", "model.proj_tokens=9", "model.ffn_tokens=13"]
THREE = ["model.qkv_tokens=[5,6,4]", "model.proj_tokens=[7,9,4]", "model.ffn_tokens=[13,9,10]"]
EDGE = ["model.vocab=258"]  # the second rank's first id is byte 128, which every curly quote has: a label at the edge
PLAIN = ["model.qkv_tokens=null", "model.proj_tokens=null", "model.ffn_tokens=null", "model.ffn_dim=37"]
DEEP = ["model.layers=4"]
GROW = [
    "growth=[{at: {step: 3}, ffn_tokens: 45, layers: 3, old_tokens: 0.5}, "
    "{at: {step: 7}, qkv_tokens: 20, new_tokens: zero_key, noise: 0.01}]"
]
CHAIN = [  # the numbers of the growth chain, which 8 does not divide
    "micro_batch=8", "model.layers=1", "model.heads=8", "model.rotary_fraction=1", "model.ffn_tokens=2140",
    "growth=[{at: {step: 3}, ffn_tokens: 4850}, {at: {step: 7}, ffn_tokens: 8620}]",
]  # fmt: skip
MIXED = [
    "train.precision=bf16",
    "train.activation_checkpointing=full",
    "train.compile=aot_eager",
    "data.split=[100,0,0]",
]
LARGE = ["micro_batch=4"]  # fewer messages
SMALL = ["micro_batch=1"]  # four ranks, too, accumulate
ZERO2 = ["parallel.reshard_after_forward=false"]
MUON, ADAMW = ["optimizer.kind=muon"], ["optimizer.kind=adamw"]


class Run(NamedTuple):
    settings: tuple[str, ...]
    mesh: tuple[str, ...] = ()
    dtype: str = "float64"
    since: str | None = None  # goes on from step 5 of this run

    @property
    def world(self) -> int:
        world = 1
        for setting in self.mesh:
            name, value = setting.split("=")
            world *= int(value) if name.removeprefix("parallel.") in ("replicate", "shard", "token", "pipeline") else 1
        return world


def mesh(**degrees: int | str) -> tuple[str, ...]:
    return tuple(f"parallel.{name}={value}" for name, value in degrees.items())


def run(*settings: list[str], on: tuple[str, ...], dtype: str = "float64", since: str | None = None) -> Run:
    return Run(tuple(s for group in (SHORT, *settings) for s in group), on, dtype, since)


EQUAL = {  # every mesh, under both optimizers, in float64 and in fp32
    "replicate2": ([], mesh(replicate=2)),
    "shard2": ([], mesh(shard=2)),
    "token2": ([], mesh(token=2)),
    "pipeline2-gpipe": ([], mesh(pipeline=2, schedule="gpipe")),
    "pipeline2": ([], mesh(pipeline=2)),
    "pipeline2-interleaved": (DEEP, mesh(pipeline=2, schedule="interleaved")),
    "shard4": ([], mesh(shard=4)),
    "hybrid": ([], mesh(replicate=2, shard=2)),
    "token4": ([], mesh(token=4)),
    "shard2-token2": ([], mesh(shard=2, token=2)),
    "pipeline2-shard2": ([], mesh(pipeline=2, shard=2)),
    "pipeline2-token2": ([], mesh(pipeline=2, token=2)),
    "pipeline4-gpipe": (DEEP, mesh(pipeline=4, schedule="gpipe")),
    "pipeline4": (DEEP, mesh(pipeline=4)),
    "pipeline4-interleaved": (["model.layers=8"], mesh(pipeline=4, schedule="interleaved")),
    "pipeline2-shard2-token2": ([], mesh(pipeline=2, shard=2, token=2)),
}
FAST = ["steps=3", "checkpoint.every=0", "validation.every=0"]
TWO, BOTH = mesh(token=2), mesh(shard=2, token=2)
RUNS: dict[str, Run] = {
    **{f"{name}-{o[0][15:]}": run(ODD, d, o, on=on) for name, (d, on) in EQUAL.items() for o in (ADAMW, MUON)},
    **{
        f"fp32-{name}-{o[0][15:]}": run(ODD, FAST, d, o, on=on, dtype="float32")
        for name, (d, on) in EQUAL.items()
        for o in (ADAMW, MUON)
    },
    "one-token2": run(LARGE, ONE, EDGE, on=TWO),
    "three-token2": run(LARGE, THREE, on=TWO),
    **{
        f"theta-{t}": run(LARGE, ODD, [f"model.theta={t}"], on=TWO) for t in ("gelu_l2_norm", "softmax", "l1_norm_gelu")
    },
    "whole-token2": run(LARGE, THREE, MUON, on=mesh(token=2, segments="per-rank")),
    "whole-softmax": run(LARGE, THREE, ["model.theta=softmax"], on=mesh(token=2, segments="per-rank")),
    "whole-shard2-token2": run(LARGE, THREE, MUON, on=mesh(shard=2, token=2, segments="per-rank")),
    "joint": run(LARGE, ODD, MUON, ["optimizer.segments=joint"], on=BOTH),
    "transformer-token2": run(LARGE, PLAIN, ["model.kind=transformer"], on=TWO),
    "llama-both": run(LARGE, PLAIN, ["model.kind=llama", "model.kv_heads=2", "model.tied=false"], on=BOTH),
    "zero2": run(LARGE, ODD, ZERO2, on=mesh(shard=2)),
    "once-sharded": run(ODD, SMALL, on=mesh(replicate=2, shard=2)),
    "once-whole": run(ODD, SMALL, MUON, ["parallel.accumulate=whole"], on=mesh(replicate=2, shard=2)),
    "zero2-sharded": run(ODD, ZERO2, ["parallel.accumulate=sharded"], on=mesh(shard=2)),
    "offload": run(LARGE, ODD, ["parallel.offload=true"], on=mesh(shard=2)),
    "background": run(LARGE, ODD, ["checkpoint.background=true"], on=mesh(shard=2)),
    "untied-pipeline4": run(ODD, DEEP, ["model.tied=false"], on=mesh(pipeline=4)),
    "grow-shard2": run(LARGE, ODD, GROW, on=mesh(shard=2)),
    "grow-token2": run(LARGE, ODD, GROW, ADAMW, on=TWO),
    "grow-both": run(LARGE, ODD, GROW, MUON, on=BOTH),
    "grow-pipeline2": run(ODD, GROW, MUON, on=mesh(pipeline=2)),
    "chain-token8": run(CHAIN, on=mesh(token=8)),
    "mixed": run(ONE, MIXED, on=BOTH, dtype="float32"),
    "mixed-fp8": run(ONE, MIXED, ["train.precision=fp8"], on=mesh(shard=2), dtype="float32"),
    "resume-shard2-shard4": run(LARGE, ODD, MUON, on=mesh(shard=4), since="shard2-muon"),
    "resume-shard2-both": run(LARGE, ODD, MUON, on=BOTH, since="shard2-muon"),
    "resume-token2-hybrid": run(LARGE, ODD, ADAMW, on=mesh(replicate=2, shard=2), since="token2-adamw"),
    "resume-pipeline2-both": run(ODD, ADAMW, on=BOTH, since="pipeline2-adamw"),
    "resume-grown-both-pipeline2-shard2": run(ODD, GROW, MUON, on=mesh(pipeline=2, shard=2), since="grow-both"),
    "resume-grown-shard2-both": run(LARGE, ODD, GROW, on=BOTH, since="grow-shard2"),
}
