"""Growth inside a run: the loss does not jump, and a run that is stopped or killed around a growth loses no bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tokenformer
from tests.train.conftest import child_environment, result, same
from tokenformer import load as load_model
from tokenformer.cli.main import main
from tokenformer.config import load, to_yaml
from tokenformer.errors import UserError
from tokenformer.hub.dcp import read_tensors
from tokenformer.hub.run_folder import all_steps
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

TWICE = (
    "growth=[{at: {step: 14}, ffn_tokens: 48, qkv_tokens: 24}, "
    "{at: {step: 26}, ffn_tokens: 80, layers: 3, rate: 0.5, warmup: 3}]"
)


def train(config, folder: Path, **more) -> Trainer:
    trainer = Trainer(config, folder, **more)
    assert trainer.run() is None
    return trainer


def train_until(step: int, config, folder: Path) -> Trainer:
    """A run that is asked to stop after a step, as by a signal."""

    class Stopped(Trainer):
        def stopping(self) -> bool:
            self.asked = signal.SIGTERM if self.step >= step else 0
            return super().stopping()

    trainer = Stopped(config, folder)
    assert trainer.run() == signal.SIGTERM and trainer.step == step
    return trainer


@pytest.mark.parametrize(
    ("recipe", "rule", "stops"),
    [
        ("optimizer.kind=adamw", "segment", (14, 27)),
        ("optimizer.kind=muon", "segment", (13, 14, 15, 26, 27)),
        ("optimizer.segments=joint", "segment", (15, 26)),
        ("optimizer.kind=adamw", "zero_key", (13, 27)),
    ],
)
def test_a_run_that_grows_twice_is_the_same_in_pieces_around_each_growth(tiny, tmp_path, recipe, rule, stops):
    plan = TWICE.replace("qkv_tokens: 24", f"qkv_tokens: 24, new_tokens: {rule}")
    settings = [recipe, plan, "checkpoint.keep=0"]
    whole = train(tiny(*settings), tmp_path / "whole")
    assert whole.model.config.layers == 3 and [e["number"] for e in whole.model.history] == [0, 1]
    for stop in stops:  # before, at and after each growth
        folder = tmp_path / str(stop)
        train_until(stop, tiny(*settings), folder)
        again = train(tiny(*settings), folder, resume=True)
        assert same(result(tmp_path / "whole"), result(folder)), stop
        assert again.model.history == whole.model.history


def test_a_stage_rerun_from_its_checkpoint_is_the_same(tiny, tmp_path):
    """What was saved before a growth leads to the same run after it."""
    import shutil

    train(tiny(TWICE, "checkpoint.keep=0"), tmp_path / "whole")
    assert {14, 26} <= set(all_steps(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "rerun")
    for step, path in all_steps(tmp_path / "rerun").items():
        if step > 26:
            shutil.rmtree(path)
    train(tiny(TWICE, "checkpoint.keep=0"), tmp_path / "rerun", resume=True)
    assert same(result(tmp_path / "whole"), result(tmp_path / "rerun"))


def test_the_loss_does_not_jump_and_the_event_is_written(tiny, tmp_path):
    plan = "growth=[{at: {step: 60}, ffn_tokens: 96, qkv_tokens: 48, proj_tokens: 36}]"
    settings = ["steps=70", "schedule.steps=70", "batch=16", "micro_batch=16", "log.every=1", "validation.every=60"]
    trainer = train(tiny(*settings, plan), tmp_path / "run")
    rows = read_rows(tmp_path / "run")
    event = next(row for row in rows if row["kind"] == "event" and row["what"] == "growth")
    assert event["step"] == 60 and event["to"] == f"{trainer.cost.parameters:,}"
    plain = train(tiny(*settings), tmp_path / "plain")
    losses, without = (
        {row["step"]: row["loss"] for row in read_rows(tmp_path / name) if row["kind"] == "train"}
        for name in ("run", "plain")
    )
    assert losses[61] == pytest.approx(without[61], abs=1e-5) and losses[62] != without[62]
    assert plain.cost.parameters < trainer.cost.parameters


def test_growth_by_tokens_seen_and_at_a_plateau(tiny, tmp_path):
    run = train(tiny("growth=[{at: {tokens: 640}, ffn_tokens: 48}]", "steps=20"), tmp_path / "tokens")
    assert run.grown.steps == [10]  # 4 × 16 tokens a step
    plan = "growth=[{at: {plateau: 0.99, patience: 1}, ffn_tokens: 48}]"
    settings = [plan, "steps=20", "validation.every=4"]
    run = train(tiny(*settings), tmp_path / "plateau")
    assert run.grown.steps == [8]  # the second validation is no hundredth of the first
    train(tiny(*settings, "steps=6"), tmp_path / "parts")
    train(tiny(*settings), tmp_path / "parts", resume=True)
    assert same(result(tmp_path / "plateau"), result(tmp_path / "parts"))


def test_two_stages_due_at_one_step_grow_at_that_step(tiny, tmp_path):
    plan = "growth=[{at: {step: 5}, ffn_tokens: 48}, {at: {step: 5}, qkv_tokens: 24}]"
    run = train(tiny(plan, "steps=7", "schedule.steps=7"), tmp_path / "run")
    grown = [row["step"] for row in read_rows(tmp_path / "run") if row.get("what") == "growth"]
    assert grown == [5, 5] and run.model.config.qkv_tokens == [16, 8]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_old_tokens_may_be_frozen_or_slow_also_after_resume(tiny, tmp_path, kind):
    name = "blocks.0.ffn.segments.0.key_tokens"
    moved = {}
    for share in (0, 0.25, 1):
        settings = [f"optimizer.kind={kind}", f"growth=[{{at: {{step: 10}}, ffn_tokens: 48, old_tokens: {share}}}]"]
        settings += ["checkpoint.keep=0", "optimizer.weight_decay=1", "schedule.kind=constant", "steps=11"]
        folder = tmp_path / f"{share}"
        train(tiny(*settings), folder)
        steps = all_steps(folder)
        before, after = (read_tensors(steps[s] / "model")[name] for s in (10, 11))
        moved[share] = (after - before).norm().item()
        train(tiny(*settings, "steps=20"), tmp_path / f"{share} whole")
        train(tiny(*settings, "steps=20"), folder, resume=True)
        assert same(result(tmp_path / f"{share} whole"), result(folder))
        frozen = torch.equal(read_tensors(all_steps(folder)[20] / "model")[name], before)
        assert frozen == (share == 0)
    assert moved[0] == 0 and moved[0.25] == pytest.approx(moved[1] / 4, rel=1e-3)  # decay at the same share


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_with_old_tokens_0_all_that_was_there_is_frozen_and_all_that_is_new_learns(tiny, tmp_path, kind):
    plan = "growth=[{at: {step: 10}, ffn_tokens: 48, layers: 3, old_tokens: 0}, {at: {step: 15}, qkv_tokens: 24}]"
    settings = [f"optimizer.kind={kind}", plan, "checkpoint.keep=0", "steps=18", "optimizer.weight_decay=2"]
    train_until(12, tiny(*settings), tmp_path / "run")
    train(tiny(*settings), tmp_path / "run", resume=True)  # frozen also after a resume
    old, middle, last = (read_tensors(all_steps(tmp_path / "run")[step] / "model") for step in (10, 15, 18))
    changed = {name for name, tensor in middle.items() if not torch.equal(tensor, old.get(name, torch.zeros(1)))}
    assert changed == middle.keys() - old.keys() and "blocks.2.ffn.segments.0.key_tokens" in changed
    assert not [name for name, tensor in middle.items() if torch.equal(tensor, last[name])]


def test_growth_before_the_first_step_leaves_the_weights_that_the_run_starts_with(tiny, tmp_path):
    train(tiny("steps=3"), tmp_path / "small")
    plan = ["growth=[{at: {step: 0}, ffn_tokens: 48, old_tokens: 0}]", f"start={tmp_path / 'small'}", "steps=6"]
    train(tiny(*plan), tmp_path / "whole")
    train_until(3, tiny(*plan), tmp_path / "parts")
    train(tiny(*plan), tmp_path / "parts", resume=True)
    assert same(result(tmp_path / "whole"), result(tmp_path / "parts"))
    old, new = (result(tmp_path / name)["model"] for name in ("small", "whole"))
    assert all(torch.equal(tensor, new[name]) for name, tensor in old.items()) and len(new) == len(old) + 4
    assert any(new["blocks.0.ffn.segments.1.value_tokens"].flatten())


def test_state_may_be_dropped_and_old_tokens_disturbed(tiny, tmp_path):
    plan = "growth=[{at: {step: 10}, ffn_tokens: 48, state: drop, noise: 0.1}]"
    run = train(tiny(plan, "steps=11", "checkpoint.keep=0", "optimizer.kind=adamw"), tmp_path / "run")
    assert all(entry["step"].item() == 1 for entry in run.optimizer.state_by_name().values())
    before = read_tensors(all_steps(tmp_path / "run")[10] / "model")["blocks.0.ffn.segments.0.value_tokens"]
    after = run.model.blocks[0].ffn.segments[0].value_tokens.detach()
    assert 0.05 < ((after - before).square().mean().sqrt() / before.square().mean().sqrt()).item() < 0.5


def test_growth_works_with_compile_and_activation_checkpointing(tiny, tmp_path):
    plain = train(tiny(TWICE), tmp_path / "plain")
    for setting in ("train.compile=aot_eager", "train.activation_checkpointing=full"):
        run = train(tiny(TWICE, setting), tmp_path / setting)
        for (name, p), q in zip(plain.model.named_parameters(), run.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


def test_a_plan_that_cannot_be_or_does_not_lead_to_the_checkpoint_is_refused_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(UserError, match="already"):
        Trainer(tiny("growth=[{at: {step: 5}, ffn_tokens: 8}]"), tmp_path / "none").run()
    assert not (tmp_path / "none").exists()
    train_until(20, tiny(TWICE), tmp_path / "run")
    for other in ("growth=[]", TWICE.replace("48", "64")):
        with pytest.raises(UserError, match="is not the one that the config describes after its first"):
            Trainer(tiny(other), tmp_path / "run", resume=True).run()


@pytest.mark.parametrize(
    ("at", "steps", "fits"),
    [
        ("step: 10", 10, False),
        ("step: 10", 11, True),
        ("tokens: 640", 10, False),  # 4 × 16 tokens per step
        ("tokens: 640", 11, True),
        ("tokens: 641", 11, False),
        ("plateau: 0.01", 5, True),  # it may come or not
    ],
)
def test_a_growth_that_the_run_never_comes_to_is_refused_at_the_start(tiny, tmp_path, at, steps, fits):
    config = tiny(
        f"growth=[{{at: {{step: 2}}, ffn_tokens: 40}}, {{at: {{{at}}}, ffn_tokens: 48}}]",
        f"steps={steps}",
        "validation.every=3",
    )
    if fits:
        run = train(config, tmp_path / "run")
        assert len(run.grown.steps) == (1 if "plateau" in at else 2)
    else:
        with pytest.raises(UserError, match=rf"growth stage 2 comes after step 1[01], but the run has {steps} steps"):
            Trainer(config, tmp_path / "run").run()
        assert not (tmp_path / "run").exists()


def test_a_run_is_grown_and_shrunk_like_a_folder(tiny, tmp_path):
    run = train_until(20, tiny(TWICE), tmp_path / "run")
    text = str(Path(__file__).parents[1] / "data" / "alice.txt")
    for verb, out, *sizes in (
        ["grow", "big", "--ffn-tokens", "64"],
        ["shrink", "small", "--ratio", "0.5", "--tokens", "512"],
    ):
        assert main([verb, str(tmp_path / "run"), *sizes, "--text", text, "--out", str(tmp_path / out)]) == 0
    big, small = load_model(tmp_path / "big"), load_model(tmp_path / "small")
    assert [event["what"] for event in big.history] == ["grow", "grow"] and big.config.ffn_tokens == [32, 16, 16]
    assert small.history[-1]["what"] == "shrink" and small.cost().parameters < run.cost.parameters
    ids = torch.arange(32).view(2, 16)
    assert torch.allclose(run.model(ids).logits, big(ids).logits, atol=1e-5)


@pytest.mark.multi
def test_killed_at_random_moments_around_growth_a_run_ends_in_the_same_bits(tiny, tmp_path):
    config = tiny(TWICE, "checkpoint.every=3", "checkpoint.keep=2", "steps=40")
    train(config, tmp_path / "whole")
    file = tmp_path / "config.yml"
    file.write_text(to_yaml(config))
    assert load(file) == config  # a run's own file says the same
    code = (
        "import sys; from pathlib import Path; from tokenformer.config import load; "
        "from tokenformer.train.trainer import Trainer; Trainer(load(sys.argv[1]), sys.argv[2], resume=True).run()"
    )
    run, chance, kills = tmp_path / "run", random.Random(5), 0
    for _ in range(40):
        child = subprocess.Popen([sys.executable, "-c", code, str(file), str(run)], env=child_environment())
        seen = max(all_steps(run), default=0)
        while child.poll() is None and max(all_steps(run), default=0) <= seen and kills < 5:
            time.sleep(0.01)  # until it wrote something new, or ended
        time.sleep(chance.random() * 0.1)
        if child.poll() is None and kills < 5:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        if child.wait() == 0:
            break
    assert kills >= 3 and same(result(tmp_path / "whole"), result(run))


def test_what_has_a_switch_does_not_learn_from_text_and_that_is_said(config_file, tmp_path, capsys):
    grown = "growth=[{at: {step: 2}, ffn_tokens: 48, switch: draw}]"
    assert main(["train", str(config_file), "steps=4", grown, "--out", str(tmp_path / "run")]) == 2
    said = "growth.switch is 'draw', but text is learned without switches, so what it adds would never learn: leave it"
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main(["train", str(config_file), "steps=0", "--out", str(tmp_path / "base")]) == 0
    wide = tokenformer.grow(tokenformer.load(tmp_path / "base"), ffn_tokens=48, vocab=400, switch="draw")
    tokenformer.save(wide, tmp_path / "wide")
    for kind in ("adamw", "muon"):
        words = ["train", str(config_file), str(tmp_path / "wide"), "steps=4", f"optimizer.kind={kind}"]
        assert main([*words, "optimizer.weight_decay=0.5", "--out", str(tmp_path / kind)]) == 0
        assert "text is learned without the switch 'draw': its segments and ids" in capsys.readouterr().out
        learned = dict(tokenformer.load(tmp_path / kind).named_parameters())
        stays = [name for name, p in wide.named_parameters() if torch.equal(p, learned[name])]
        assert {name for name in stays if "segments.1" in name or "added" in name} == {
            *(f"blocks.{i}.ffn.segments.1.{half}_tokens" for i in range(2) for half in ("key", "value")),
            "added_embedding.weight",
        }
