"""Runs in fp8, emulated on a CPU: they learn, go on after a kill, grow, keep the shapes that they chose; refusals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.train.conftest import child_environment, result, same
from tokenformer.cli.main import main
from tokenformer.config import load
from tokenformer.errors import UserError
from tokenformer.hub.run_folder import all_steps
from tokenformer.models.cost import cost
from tokenformer.parallel.estimate import estimate
from tokenformer.parallel.mesh import Degrees
from tokenformer.train import fp8
from tokenformer.train.trainer import Trainer

BATCH, FORMS = ["batch=8", "micro_batch=8"], ("bf16", "fp8")
FP8 = ("train.precision=fp8", "steps=30", "growth=[{at: {step: 15}, ffn_tokens: 64}]")


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_a_run_learns_grows_and_goes_on_after_a_kill_with_the_same_bits(config_file, tiny, tmp_path):
    settings = [*FP8, "checkpoint.every=6"]
    Trainer(tiny(*settings), tmp_path / "whole").run()
    log = (tmp_path / "whole" / "log").read_text()
    assert "products in fp8, emulated, which is slower than fp32 and is for checks: ffn 16x32, ffn 16x32+32" in log
    seen = losses(tmp_path / "whole")
    assert seen[-1] < seen[0] - 1, seen
    run = tmp_path / "killed"
    command = [sys.executable, "-m", "tokenformer", "train", str(config_file), *settings, "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=child_environment())
    while 12 not in all_steps(run) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    Trainer(tiny(*settings), run, resume=True).run()
    assert "going on from step" in (run / "log").read_text()
    assert same(result(tmp_path / "whole"), result(run))


def test_a_run_goes_on_with_the_shapes_that_it_began_with(tiny, tmp_path):
    settings = ["train.precision=fp8", "steps=4", "train.fp8=[ffn 16x32]"]
    Trainer(tiny(*settings), tmp_path / "run").run()
    Trainer(tiny("train.precision=fp8", "steps=6"), tmp_path / "run", resume=True).run()
    Trainer(tiny(*settings[::2], "steps=6"), tmp_path / "whole").run()
    assert same(result(tmp_path / "run"), result(tmp_path / "whole"))
    assert load(tmp_path / "run" / "config.yml").train.fp8 == ["ffn 16x32"]
    assert "not in fp8: proj 16x12, qkv 16x16 (train.fp8 chooses)" in (tmp_path / "run" / "log").read_text()
    Trainer(tiny("train.precision=fp8", "steps=6"), tmp_path / "all").run()
    assert not same(result(tmp_path / "all"), result(tmp_path / "whole"))


def test_a_run_that_grew_is_trained_on_planned_and_goes_on_in_bf16(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    growth = "growth=[{at: {step: 2}, ffn_tokens: 64}]"
    Trainer(tiny("train.precision=fp8", "steps=4", growth), run).run()
    assert "ffn 16x32" in load(run / "config.yml").train.fp8
    for word in (str(run), str(run / "config.yml")):
        assert main(["plan", word, "--gpus", "1", "--hardware", "h100"]) == 0
    assert main(["info", str(run / "config.yml")]) == 0
    assert main(["train", str(run), "steps=2", "--out", str(tmp_path / "on")]) == 0
    assert load(tmp_path / "on" / "config.yml").train.fp8 == ["ffn 16x32+32", "proj 16x12", "qkv 16x16"]
    assert main(["train", str(run), "--resume", "steps=6", "train.precision=bf16"]) == 0
    assert load(run / "config.yml").train.precision == "bf16", capsys.readouterr()


def test_a_transformer_is_trained_too(tiny, tmp_path):
    Trainer(tiny("train.precision=fp8", "model.kind=transformer", "steps=20"), tmp_path / "run").run()
    assert "down 64x16, proj 16x16, qkv 16x48, up 16x64" in (tmp_path / "run" / "log").read_text()
    seen = losses(tmp_path / "run")
    assert seen[-1] < seen[0] - 0.3, seen


@pytest.mark.parametrize(
    "setting, said",
    [
        ("model.theta=softmax", "theta softmax gives numbers up to the number of parameter tokens"),
        ("model.theta=l1_norm_gelu", "theta l1_norm_gelu gives numbers up to"),
        ("model.tau={qkv: [4], proj: [4], ffn: [500]}", "a segment's tau is 500"),
        ("growth=[{at: {step: 2}, ffn_tokens: 300000}]", "a segment's tau is 547.693"),
        ("model={dim: 24, rotary_fraction: 0.5}", "model.dim is 24, but fp8 needs multiples of 16"),
        ("model.switch={ffn: [image]}", "fp8 knows no segments with a switch, and no adapters"),
        ("train.fp8=[ffn 16x33]", "names 'ffn 16x33', which no model of this run has: give some of ffn 16x32, proj"),
        ("train.fp8=most", "train.fp8"),
        ("train={precision: bf16, fp8: all}", "train.fp8 says what is computed in fp8, but train.precision is bf16"),
    ],
)
def test_what_fp8_cannot_do_is_refused_before_anything_is_written(tiny, tmp_path, setting, said):
    with pytest.raises(UserError, match=said):
        Trainer(tiny("train.precision=fp8", setting), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


def test_a_gpu_without_fp8_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    config = tiny("train.precision=fp8")
    with pytest.raises(UserError, match="A100 has no fp8 products: set"):
        fp8.check(config, [config.model], torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    fp8.check(config, [config.model], torch.device("cuda"))


def test_shapes_that_are_faster_in_fp8_are_chosen(tiny, monkeypatch):
    seconds = {"up 64x16": (2.0, 1.9), "down 16x64": (2.0, 2.1), "proj 16x16": (2.0, 2.0)}
    monkeypatch.setattr(fp8, "measure", lambda *_: seconds)
    config, said = tiny("train.precision=fp8", "model.kind=transformer"), []
    place = SimpleNamespace(run_on_first=lambda work: work())
    chosen = fp8.choose(config, [config.model], torch.device("cuda"), "none", place, said.append)
    assert chosen.train.fp8 == ["up 64x16"]
    assert "by measurement (up 64x16 1.05 ×, down 16x64 0.95 ×, proj 16x16 1.00 ×): up 64x16; weight" in said[0]


def test_a_pair_whose_features_are_computed_twice_is_refused():
    config = load("pair/icons", overrides=["train.precision=fp8"])
    with pytest.raises(UserError, match="computed twice, which fp8 would round apart: set"):
        fp8.check(config, [config.model], torch.device("cpu"))


def test_plan_and_info_say_what_is_in_fp8(capsys):
    def said(verb: str, *more: str) -> str:
        assert main([verb, "lm/1.5b", "train.precision=fp8", *more]) == 0
        return capsys.readouterr().out

    assert "fp8 of at most: ffn 1536x6144, proj 1536x1536, qkv 1536x1536; 59% of a step's FLOPs" in said("info")
    assert "count 1.6 × as fast as in bf16" in said("plan", "batch=64", "--gpus", "8")
    assert main(["plan", "lm/1.5b", "train.precision=fp8", "batch=64", "--gpus", "8", "--hardware", "a100"]) == 2
    assert "this hardware has no products in fp8" in capsys.readouterr().err


def test_the_estimate_of_a_step_saves_two_of_three_products():
    """At 1.6 times the rate each saves 0.375 of its time; attention and the head stay as they are."""
    times = [estimate(load("lm/1.5b", overrides=[*BATCH, f"train.precision={p}"]), Degrees()).time for p in FORMS]
    share = cost(load("lm/1.5b").model).product_share(2048)
    assert times[1]["compute"] / times[0]["compute"] == pytest.approx(1 - 2 / 3 * share * 0.375)


@pytest.mark.gpu
def test_on_a_gpu_shapes_are_measured_once_and_the_run_goes_on_with_them(tiny, tmp_path):
    gpu = ["train.precision=fp8", "train.device=cuda", "steps=6"]
    Trainer(tiny(*gpu), tmp_path / "auto").run()
    assert "by measurement (ffn 16x32 " in (tmp_path / "auto" / "log").read_text()
    Trainer(tiny(*gpu, "train.fp8=all"), tmp_path / "whole").run()
    Trainer(tiny(*gpu[:2], "steps=3", "schedule.steps=40", "train.fp8=all"), tmp_path / "run").run()
    Trainer(tiny(*gpu), tmp_path / "run", resume=True).run()
    assert same(result(tmp_path / "whole"), result(tmp_path / "run"))
