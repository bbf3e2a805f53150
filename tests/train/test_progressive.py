"""Runs of `growth: progressive`: killed, resumed, over two ranks; what their folder says; models of several trunks."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.parallel.conftest import free_port
from tests.parallel.workers import default_dtype
from tests.train.another import Match, Pair
from tests.train.conftest import child_environment, result, same
from tests.train.test_another_model import CONFIG as PAIR
from tests.train.test_growing import train
from tokenformer.cli.main import main
from tokenformer.config import load, to_yaml
from tokenformer.train.language import LanguageTask
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

TWO_HOPS = [
    "growth={progressive: {from: 0.25, at: [0.2, 0.6]}}",
    "steps=24",
    "schedule={kind: wsd, warmup: 0.1, decay: 0.3, floor: 0.0, steps: null}",
    "checkpoint.every=3",
    "validation.every=10",
]


class Dying(LanguageTask):
    """Kills its process in a micro-batch of the step that DIE names."""

    calls = 0

    def loss(self, model, batch):
        self.calls += torch.is_grad_enabled()
        if self.calls == 2 * int(os.environ["DIE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class Plain(Pair):
    """Without the segment that a switch turns on: progressive makes all segments itself."""

    def features(self, pixels, words):
        return self.image(pixels.to(self.scale.dtype)), self.text(words)


def start(config_file, run, *settings, how="", **environment: str) -> subprocess.Popen:
    code = (
        f"import sys, torch; from tests.train.test_progressive import *; {how}"
        "task = Dying if 'DIE' in os.environ else None; "
        "Trainer(load(sys.argv[1], overrides=sys.argv[3:]), sys.argv[2], resume=True, task=task).run()"
    )
    command = [sys.executable, "-c", code, str(config_file), str(run), *settings]
    return subprocess.Popen(command, env={**child_environment(), **environment})


@pytest.mark.multi
def test_killed_in_the_middle_of_each_stage_it_ends_in_the_same_bits(tiny, config_file, tmp_path):
    whole = train(tiny(*TWO_HOPS), tmp_path / "whole")
    first, second = whole.grown.steps
    run, end = tmp_path / "run", whole.config.steps
    assert 6 < first < second - 6 < end - 12
    assert start(config_file, run, *TWO_HOPS, DIE=str(first - 1)).wait() == -signal.SIGKILL
    text = (run / "config.yml").read_text()
    assert "progressive" not in text and "count: compute" in text
    for step in (first + 4, second + 4):  # counted from the checkpoint that the child before it left
        left = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*[0-9]"))
        assert start(run / "config.yml", run, DIE=str(step - left)).wait() == -signal.SIGKILL
    again = train(load(run / "config.yml"), run, resume=True)
    assert again.step == end and again.found.path is not None and again.grown.steps == [first, second]
    assert same(result(tmp_path / "whole"), result(run))


def test_the_run_spends_the_budget_ends_at_the_final_sizes_and_its_rate_at_zero(tiny, tmp_path, capsys):
    scratch = train(tiny("steps=24", "schedule.steps=null"), tmp_path / "scratch")
    run = train(tiny(*TWO_HOPS, "log.every=1"), tmp_path / "run")
    assert run.totals.flops <= scratch.totals.flops < run.totals.flops + scratch.totals.flops / 24
    assert run.model.config.ffn_tokens == [8, 8, 16] and sum(run.model.config.qkv_tokens) == 16
    rows = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    rates = [row["rate"] / run.config.optimizer.rate for row in rows]
    assert rates[0] == 0 and 0 < rates[-1] < 0.2
    for row, rate in zip(rows, rates, strict=True):  # the share of the compute before the step says the rate
        share = (row["flops"] - run.task.units_per_step * run.task.flops(cost_of(run, row["step"]))) / run.totals.flops
        assert rate == pytest.approx(min(1, share / 0.1, (1 - share) / 0.3), abs=1e-6)
    said = capsys.readouterr().out
    assert "grows on the way: " in said and "32 tokens" in said and "18 % less compute" in said
    assert f"{run.totals.flops / scratch.totals.flops * 24:.1f} steps of the final model from scratch" in said


def cost_of(run: Trainer, step: int):
    from tokenformer.models import cost

    return cost(run.chain[sum(at < step for at in run.grown.steps)])


@pytest.mark.multi
def test_over_two_ranks_it_is_the_same_run(tiny, config_file, tmp_path):
    settings = [*TWO_HOPS, "checkpoint.every=0"]
    with default_dtype("float64"):
        train(tiny(*settings), tmp_path / "one")
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    how, run, settings = "torch.set_default_dtype(torch.float64); ", tmp_path / "two", [*settings, "parallel.shard=2"]
    places = [{"RANK": rank, "LOCAL_RANK": rank, **ranks} for rank in "01"]
    both = [start(config_file, run, *settings, how=how, **place) for place in places]
    assert [process.wait() for process in both] == [0, 0]
    one, two = result(tmp_path / "one"), result(run)
    assert one["state"]["growth"]["steps"] == two["state"]["growth"]["steps"] != []
    assert one["state"]["totals"] == two["state"]["totals"]
    for name, tensor in one["model"].items():
        torch.testing.assert_close(tensor, two["model"][name], rtol=1e-6, atol=1e-9, msg=name)


def test_a_model_of_several_trunks_grows_them_at_one_step(tmp_path):
    plain = PAIR.replace("ffn_tokens: [20, 8]", "ffn_tokens: 28").replace('switch: {ffn: ["", odd]}', "")
    (tmp_path / "pair.yml").write_text(plain)
    config = load(tmp_path / "pair.yml", overrides=["growth={progressive: {from: 0.3, at: [0.3]}}"])
    run = Trainer(config, tmp_path / "run", task=Match, build=Plain)
    assert run.run() is None
    assert len(run.grown.steps) == 2 and len(set(run.grown.steps)) == 1 and run.step > 12
    trunks = run.model.config.trunks
    assert {name: sum(trunk.ffn_tokens) for name, trunk in trunks.items()} == {"image": 24, "text": 28}
    again = Trainer(load(tmp_path / "run" / "config.yml"), tmp_path / "run", task=Match, build=Plain, resume=True)
    assert again.run() is None and again.step == run.step


def test_the_command_refuses_weights_and_goes_on_with_a_run_by_either_name(tiny, tmp_path, capsys):
    file = tmp_path / "tiny.yml"
    file.write_text(to_yaml(tiny("steps=12", "schedule.steps=null")))
    run, words = tmp_path / "run", ["growth=progressive", "--out", str(tmp_path / "run")]
    assert main(["train", str(file), *words]) == 0
    text = (run / "config.yml").read_text()
    assert main(["train", str(file), *words, "--resume"]) == 0  # a job script gives the same words again
    assert main(["train", str(run), "--resume"]) == 0 and (run / "config.yml").read_text() == text
    capsys.readouterr()
    for source, more in ((run, []), (file, [f"start={run}"])):
        assert main(["train", str(source), "growth=progressive", *more, "--out", str(tmp_path / "other")]) == 2
        assert "begins with a small model of its own, but start is" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(["train", str(file), *words, "--resume", "steps=40"]) == 2  # it would have grown later
    assert "but this config puts it at step" in capsys.readouterr().err and (run / "config.yml").read_text() == text
    assert main(["train", str(run), "--resume", "steps=40", "schedule={count: steps, kind: constant}"]) == 0
    for verb, more in (("info", []), ("plan", ["--gpus", "2"])):
        assert main([verb, str(file), "growth=progressive", *more]) == 0
        assert "grows on the way: " in capsys.readouterr().out


def test_the_growth_of_a_config_before_weights_is_left_out_and_said(tiny, tmp_path, capsys):
    file, run = tmp_path / "tiny.yml", tmp_path / "run"
    file.write_text(to_yaml(tiny("steps=2")))
    assert main(["train", str(file), "--out", str(run)]) == 0
    for growth in ("growth=progressive", "growth=[{at: {step: 1}, ffn_tokens: 64}]"):
        file.write_text(to_yaml(tiny("steps=2", "schedule.steps=null", growth)))
        capsys.readouterr()
        assert main(["train", str(file), str(run), "--out", str(tmp_path / growth[7:10])]) == 0
        said = f"tokenformer: the growth of the config is left out, since the weights of {run} stand behind it\n"
        assert capsys.readouterr().err.count(said) == 1 and load(tmp_path / growth[7:10] / "config.yml").growth == []
    assert main(["train", str(file), str(run), growth, "--out", str(tmp_path / "grown")]) == 0
    assert "left out" not in capsys.readouterr().err and load(tmp_path / "grown" / "config.yml").growth != []


def test_info_of_official_files_plans_with_their_steps(golden_folder, capsys):
    words = [str(golden_folder / "l2_norm_gelu" / "config.yml"), "growth=progressive"]
    for verb, more in (("info", []), ("plan", ["--gpus", "1", "--hardware", "h100"])):
        assert main([verb, *words, *more]) == 0
        assert "together 152,845 steps" in capsys.readouterr().out
