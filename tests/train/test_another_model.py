"""A model, a source and a task of somebody else are trained, killed, resumed, grown and sharded like our own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.conftest import free_port
from tests.parallel.workers import default_dtype
from tests.train.another import Match, Pair
from tests.train.conftest import child_environment, result, same
from tokenformer.config import load
from tokenformer.errors import UserError
from tokenformer.models.cost import cost
from tokenformer.models.init import initial
from tokenformer.models.names import INWARD, Role
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

HERE = Path(__file__)
CONFIG = """
model:
  of: match
  trunks:
    image: {layers: 2, dim: 16, heads: 2, qkv_tokens: 12, proj_tokens: 9, ffn_tokens: 24, context: 4, vocab: 1}
    text: {layers: 1, dim: 16, heads: 2, qkv_tokens: 10, proj_tokens: 10, ffn_tokens: [20, 8], context: 3, vocab: 16,
           switch: {ffn: ["", odd]}}
steps: 12
batch: 8
micro_batch: 2
optimizer: {rate: 2e-2}
train: {precision: fp32, device: cpu}
checkpoint: {every: 4, keep: 0}
validation: {every: 6, samples: 16}
log: {every: 1}
"""
GROWS = "growth=[{at: {pairs: 48}, on: image., ffn_tokens: 40, layers: 3}]"  # after six steps


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "pair.yml").write_text(CONFIG)
    return tmp_path / "pair.yml"


def train(file, run, *settings, task=Match, resume=False) -> Trainer:
    trainer = Trainer(load(file, overrides=settings), run, task=task, build=Pair, resume=resume)
    assert trainer.run() is None
    return trainer


class Dying(Match):
    """Kills its process in the last micro-batch of step 10."""

    calls = 0

    def loss(self, model, batch):
        self.calls += torch.is_grad_enabled()
        if self.calls == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class ByFeatures(Match):
    """The same loss, through another method of the model than `forward`."""

    def loss(self, model, batch):
        def score(pixels, words):
            return model.scale * torch.mul(*model.features(pixels, words)).sum(-1)

        return super().loss(score, batch)


def child(how: str, *arguments: object, **environment: str) -> subprocess.Popen:
    code = f"import sys; from tests.train.test_another_model import *; {how}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=HERE.parents[2], env={**child_environment(), **environment})


def test_what_is_defined_for_it_is_short():
    assert len((HERE.parent / "another.py").read_text().splitlines()) <= 100


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_it_learns_and_its_run_is_told_in_its_own_units(file, tmp_path, kind, capsys):
    run = train(file, tmp_path / "run", f"optimizer.kind={kind}", "steps=60", "batch=32", "micro_batch=16")
    rows = read_rows(tmp_path / "run")
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < 0.6 * losses[0]
    last = [row for row in rows if row["kind"] == "train"][-1]
    assert last["pairs"] == 60 * 32 and last["pairs_per_second"] > 0 and "tokens" not in last
    assert run.model.scale.item() != 0.5
    x, changed = torch.randn(2, 3, 16).unbind()
    changed = torch.cat([x[:2], changed[2:]])[None]
    for trunk, sees in ((run.model.image, True), (run.model.text, False)):  # the last position from the first one
        first = [trunk.run(y, trunk.view(y, causal=trunk.causal))[0, 0] for y in (x[None], changed)]
        assert torch.equal(*first) != sees
    said = capsys.readouterr().out
    assert "32 pairs per step" in said and "pairs/s" in said
    sample = next(row for row in rows if row["kind"] == "sample")
    assert float(sample["scale"]) > 0 and (tmp_path / "run" / "samples" / "6" / "scale.bin").stat().st_size == 4
    groups = run.optimizer.state_by_name()
    matrices = {name for name, entry in groups.items() if "momentum" in entry}
    assert ("image.blocks.1.ffn.segments.0.key_tokens" in matrices) == (kind == "muon") and "scale" not in matrices


def test_the_segment_of_a_switch_counts_and_learns_in_half_of_the_samples(file, tmp_path):
    trainer = train(file, tmp_path / "run")
    text, keys = trainer.model.text, trainer.model.text.blocks[0].ffn.segments[1].key_tokens
    name, seed = "text.blocks.0.ffn.segments.1.key_tokens", trainer.config.seed
    began = initial(name, tuple(keys.shape), trainer.model.config, seed, trainer.model.ends)
    assert not torch.isclose(keys, began).any()
    words = torch.arange(16)[:, None].expand(16, 3)
    odd = words[:, 0] % 2 == 1
    on, off = text(words, odd=odd), text(words)
    assert torch.equal(on[~odd], off[~odd]) and not torch.isclose(on[odd], off[odd]).all(1).any()
    (gradient,) = torch.autograd.grad(on[~odd].sum(), keys)
    assert not gradient.any()


@pytest.mark.multi
@pytest.mark.parametrize("settings", [["optimizer.kind=adamw"], ["optimizer.kind=muon", GROWS]])
def test_killed_and_resumed_it_ends_in_the_same_bits(file, tmp_path, settings):
    whole = train(file, tmp_path / "whole", *settings)
    call = "train(*sys.argv[1:], task=Dying)"
    assert child(call, file, tmp_path / "run", *settings).wait() == -signal.SIGKILL
    again = train(file, tmp_path / "run", *settings, resume=True)
    assert again.found.path.name == "step-00000008" and same(result(tmp_path / "whole"), result(tmp_path / "run"))
    assert again.model.history == whole.model.history and len(whole.model.history) == ("growth" in settings[-1])


def test_one_trunk_grows_and_the_loss_does_not_jump(file, tmp_path):
    grown = train(file, tmp_path / "grown", GROWS)
    plain = train(file, tmp_path / "plain")
    image, text = grown.model.config.trunk("image."), grown.model.config.trunk("text.")
    assert image.ffn_tokens == [24, 16] and image.layers == 3 and text == plain.model.config.trunk("text.")
    assert grown.grown.steps == [6] and grown.model.history[0]["on"] == "image."
    losses, without = (
        [row["loss"] for row in read_rows(tmp_path / name) if row["kind"] == "train"] for name in ("grown", "plain")
    )
    assert losses[6] == pytest.approx(without[6], rel=1e-5) and losses[11] != without[11]


class Named(Pair):
    """Its class cannot be called with a config alone."""

    def __init__(self, config, *, name):
        super().__init__(config)
        self.name = name


def test_a_model_that_only_its_build_can_make_grows_in_one_process(file, tmp_path):
    config = load(file, overrides=[GROWS, "steps=8"])
    trainer = Trainer(config, tmp_path / "run", task=Match, build=lambda config: Named(config, name="b"))
    assert trainer.run() is None and trainer.grown.steps == [6]
    assert trainer.model.name == "b" and trainer.model.config.trunk("image.").layers == 3


def test_its_cost_counts_what_lies_outside_the_blocks(file):
    model = Pair(load(file).model)
    found, blocks = model.cost(), cost(model.config)
    assert found.parameters == sum(p.numel() for p in model.parameters()) == blocks.parameters + 16 * 6 + 16 * 16 + 1
    assert found.parameter_flops == blocks.parameter_flops + 2 * 16 * 6  # the patches; a table is looked up


def test_an_outward_matrix_of_several_trunks_begins_like_an_inward_one(file):
    config = load(file).model
    first, other = (
        initial("head.weight", (500, 8), config, 0, {"head.weight": role}) for role in (Role("outward"), INWARD)
    )
    assert torch.equal(first, other) and first.std() == pytest.approx(0.02, rel=0.05)


def test_a_run_of_it_starts_another_one_and_one_of_another_kind_is_refused(file, tmp_path, config_file):
    train(file, tmp_path / "one", "steps=4")
    trainer = Trainer(load(file, overrides=[f"start={tmp_path / 'one'}"]), tmp_path / "two", task=Match, build=Pair)
    trainer.build()
    saved = result(tmp_path / "one")["model"]
    assert all(torch.equal(parameter, saved[name]) for name, parameter in trainer.model.named_parameters())
    with pytest.raises(UserError, match=r"^start: .* is a model of match, but one of language is needed here"):
        Trainer(load(config_file, overrides=[f"start={tmp_path / 'one'}"]), tmp_path / "three").run()


@pytest.mark.multi
@pytest.mark.parametrize(("kind", "task"), [("adamw", "Match"), ("muon", "ByFeatures")])
def test_over_two_ranks_it_is_the_same_run(file, tmp_path, kind, task):
    settings = [f"optimizer.kind={kind}", GROWS, "train.clip=0.05"]  # always clipped: every rank must know the norm
    with default_dtype("float64"):
        train(file, tmp_path / "one", *settings)
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    how = f"torch.set_default_dtype(torch.float64); train(*sys.argv[1:], task={task})"
    arguments = (file, tmp_path / "two", *settings, "parallel.shard=2")
    both = [child(how, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **ranks) for rank in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    one, two = result(tmp_path / "one"), result(tmp_path / "two")
    assert one["state"]["totals"] == two["state"]["totals"]
    for part in ("model", "optim"):
        assert one[part].keys() == two[part].keys()
        for name, tensor in one[part].items():
            torch.testing.assert_close(tensor, two[part][name], rtol=1e-6, atol=1e-9, msg=f"{part} {name}")


def test_what_is_for_language_models_alone_is_refused_in_a_sentence(file, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for degree in ("token", "pipeline"):
        with pytest.raises(UserError, match=r"for language models alone: leave them out, and use parallel.shard"):
            train(file, tmp_path / "run", f"parallel.{degree}=2")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError, match=r"growth.at names tokens, but this task counts pairs"):
        train(file, tmp_path / "run", GROWS.replace("pairs", "tokens"))
    with pytest.raises(
        UserError, match="task is 'match', but must be language, classify, pair, caption, draw; or give `Trainer`"
    ):
        Trainer(load(file), tmp_path / "run")
    assert not (tmp_path / "run").exists()
