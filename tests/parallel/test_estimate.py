"""Estimates of memory: those of the formulas, and of what was measured."""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenformer.config import load
from tokenformer.models import build
from tokenformer.parallel.estimate import estimate, memory
from tokenformer.parallel.layout import Layout
from tokenformer.parallel.mesh import Degrees
from tokenformer.parallel.traffic import Cut
from tokenformer.train.compile import wrap
from tokenformer.train.optim import Optimizer


def config(*settings: str):
    return load("lm/1.5b", overrides=["batch=512", "micro_batch=4", *settings])


def test_sharding_divides_what_is_held_and_tokens_divide_the_activations():
    one, shard, token = (estimate(config(), d).memory for d in (Degrees(), Degrees(shard=8), Degrees(token=8)))
    for part in ("parameters", "gradients", "optimizer"):
        assert one[part] == pytest.approx(8 * shard[part], rel=1e-6) == pytest.approx(8 * token[part], rel=1e-3)
    assert one["activations"] == shard["activations"] > token["activations"]


def test_parameters_and_state_of_one_gpu_are_those_of_the_model():
    found = estimate(config("optimizer.kind=adamw"), Degrees()).memory
    assert found["parameters"] == 4 * 1_587_219_456
    assert found["optimizer"] == 8 * 1_587_219_456


def test_the_average_of_the_weights_is_held_too():
    one, more = (estimate(config(f"train.ema={decay}"), Degrees(shard=8)) for decay in (0, 0.999))
    assert more.total - one.total == more.memory["average"] == more.memory["parameters"] > 0


@pytest.mark.parametrize("preset, samples, measured", [("150m", 16, 11.46), ("150m", 64, 38.85), ("1.5b", 8, 51.66)])
def test_the_peak_that_was_measured_on_a_gpu_is_met(preset, samples, measured):
    """Gigabytes of benchmarks/results/step, within 15 %."""
    settings = [f"batch={samples}", f"micro_batch={samples}", "optimizer.kind=adamw", "train.precision=bf16"]
    found = estimate(load(f"lm/{preset}", overrides=settings), Degrees()).total
    assert found == pytest.approx(measured * 1e9, rel=0.15)


def test_schedules_hold_more_or_fewer_micro_batches():
    held = {}
    for schedule in ("gpipe", "1f1b", "interleaved"):
        c = config(f"parallel.schedule={schedule}")
        held[schedule] = estimate(c, Degrees(pipeline=4, shard=4)).memory["activations"]
    assert held["1f1b"] < held["interleaved"] < held["gpipe"]


def test_only_the_last_stage_of_a_pipeline_holds_logits():
    cut = Cut(config("train.compile=none", "model.context=128"))  # so short that the loss is the fullest moment
    first, last = (memory(cut, Degrees(pipeline=2), stage) for stage in (0, 1))
    assert not first.get("logits") and last["logits"] > 0


class Peak(TorchDispatchMode):
    """Bytes of all storages that live at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.live, self.most = weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            if storage not in self.seen:
                self.seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, n: int) -> None:
        self.live += n
        self.most = max(self.most, self.live)


@pytest.mark.parametrize(
    "preset, settings",
    [
        ("lm/150m", ["optimizer.kind=adamw", "batch=8"]),
        ("lm/150m", ["optimizer.kind=muon", "batch=16", "train.activation_checkpointing=full"]),
        ("lm/150m", ["optimizer.kind=muon", "micro_batch=1", "batch=1", "model.context=128"]),  # most in Muon's update
        ("baseline/124m", ["optimizer.kind=adamw", "batch=16"]),
        ("baseline/124m", ["optimizer.kind=adamw", "batch=16", "model.ffn_dim=24576"]),  # most in the FFN
    ],
)
def test_the_estimated_memory_of_training_op_by_op_is_that_of_its_tensors(preset, settings, monkeypatch):
    """Tensors without values stand for those of a GPU; what compilation saves, only a GPU can tell."""
    c = load(preset, overrides=["micro_batch=8", "model.layers=5", "train.compile=none", *settings])
    monkeypatch.setattr("tokenformer.models.language.init_weights", lambda *_: None)
    micro, count = c.micro_batch, c.batch // c.micro_batch
    with FakeTensorMode(), Peak() as peak:
        model = build(c.model)
        model.compute_dtype = torch.bfloat16
        for block in model.blocks:
            wrap(block, c.train, "none")
        rule, one, go = Optimizer(Layout(model), c.optimizer), torch.ones(()), torch.zeros(())
        for _ in range(2):
            for _ in range(count):
                ids = torch.zeros(micro, c.model.context, dtype=torch.long)
                model(ids, labels=ids).loss_sum.backward()
            rule.step(1e-4, one, go)
            model.zero_grad()
    assert estimate(c, Degrees()).total == pytest.approx(peak.most, rel=0.15)
