"""Checkpoints damaged after they were written: the newest whole one is used, which is said, and nothing is lost."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

import tokenformer
from tests.parallel.conftest import forkserver
from tests.parallel.workers import command_line
from tests.train.conftest import result, same
from tests.train.test_crash import kill_at_a_random_moment
from tokenformer.cli.main import main
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, write_manifest
from tokenformer.hub.run_folder import all_steps, find_newest, sweep
from tokenformer.train.trainer import Trainer

THREE = ("steps=30", "checkpoint.every=10", "checkpoint.keep=0")


def flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def a_file(checkpoint: Path, part: str, rng: random.Random) -> Path:
    return rng.choice(sorted((checkpoint / part).glob("*.safetensors")))


HARM = {
    "a bit of the model": lambda c, rng: flip(a_file(c, "model", rng), rng),
    "a bit of the optimizer": lambda c, rng: flip(a_file(c, "optim", rng), rng),
    "a bit of the state": lambda c, rng: flip(c / "state.json", rng),
    "a file cut short": lambda c, rng: a_file(c, "model", rng).write_bytes(a_file(c, "model", rng).read_bytes()[:-9]),
    "an empty file": lambda c, rng: (c / "state.json").write_bytes(b""),
    "no model": lambda c, rng: shutil.rmtree(c / "model"),
    "no manifest": lambda c, rng: (c / MANIFEST).unlink(),
    "a manifest that is no JSON": lambda c, rng: (c / MANIFEST).write_bytes(b"\xff{"),
    "a manifest without sizes": lambda c, rng: (c / MANIFEST).write_text('{"files": {"state.json": {}}}'),
    "nothing in it": lambda c, rng: (shutil.rmtree(c), c.mkdir()),
}


@pytest.fixture(scope="module")
def undamaged(config_file, tmp_path_factory):
    """A run with checkpoints at 10, 20 and 30, made once; each test damages a copy."""
    run = tmp_path_factory.mktemp("undamaged") / "run"
    assert main(["train", str(config_file), *THREE, "--out", str(run)]) == 0
    return run


@pytest.fixture
def run(undamaged, tmp_path) -> Path:
    return shutil.copytree(undamaged, tmp_path / "run")


def embedding(run: Path, step: int) -> torch.Tensor:
    return tokenformer.load(run / "checkpoints" / f"step-{step:08d}").embedding.weight


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_newest_checkpoint_is_said_kept_aside_and_the_one_before_it_used(
    undamaged, run, config_file, capsys, harm
):
    newest = run / "checkpoints" / "step-00000030"
    HARM[harm](newest, random.Random(1))
    left = {p.relative_to(newest): p.read_bytes() for p in newest.rglob("*") if p.is_file()}
    assert main(["train", str(run), "--resume"]) == 0
    said = capsys.readouterr().out
    assert f"the checkpoint {newest} is damaged (" in said and f"is kept aside as {newest}.damaged" in said
    assert "going on from step 20 " in said
    aside = newest.with_name("step-00000030.damaged")
    assert {p.relative_to(aside): p.read_bytes() for p in aside.rglob("*") if p.is_file()} == left
    assert same(result(undamaged), result(run)) and list(all_steps(run)) == [10, 20, 30]


def test_last_names_the_checkpoint_in_use_before_the_next_one_is_written(run):
    (run / "checkpoints" / "step-00000030" / "state.json").write_bytes(b"")
    sweep(run, find_newest(run))
    assert (run / "checkpoints" / "last").read_text() == "step-00000020\n"


@pytest.mark.parametrize("harm", HARM)
def test_every_verb_uses_the_checkpoint_before_a_damaged_one_and_touches_nothing(run, tmp_path, capsys, harm):
    """`convert` stands for all: they find weights in one place."""
    newest = run / "checkpoints" / "step-00000030"
    HARM[harm](newest, random.Random(2))
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert main(["convert", str(run), "--to", "ours", "--out", str(tmp_path / "folder")]) == 0
    assert (
        f"the checkpoint {newest} is damaged (" in (said := capsys.readouterr().err) and "step-00000020 is used" in said
    )
    assert torch.equal(tokenformer.load(tmp_path / "folder").embedding.weight, embedding(run, 20))
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


@pytest.mark.parametrize("last", ["step-00000040\n", "", "../../elsewhere", "\udcff", "x" * 5000])
def test_a_last_that_names_nothing_is_said_and_the_newest_checkpoint_used(run, tmp_path, capsys, last):
    (run / "checkpoints" / "last").write_text(last, errors="surrogateescape")
    wanted = embedding(run, 30)
    for verb in (["info", str(run)], ["generate", str(run), "--prompt", "a", "--tokens", "1"]):
        assert main(verb) == 0
    assert torch.equal(tokenformer.load(run).embedding.weight, wanted)
    assert "which is not there" in capsys.readouterr().err
    assert main(["train", str(run), "--resume", "steps=31"]) == 0
    assert "which is not there" in (said := capsys.readouterr().out) and "going on from step 30 " in said
    assert (run / "checkpoints" / "last").read_text() == "step-00000031\n"


def test_the_newest_checkpoint_gone_while_last_names_it(undamaged, run, capsys):
    shutil.rmtree(run / "checkpoints" / "step-00000030")
    assert torch.equal(tokenformer.load(run).embedding.weight, embedding(run, 20))
    assert "names 'step-00000030', which is not there" in capsys.readouterr().err
    assert main(["train", str(run), "--resume"]) == 0
    assert "going on from step 20 " in capsys.readouterr().out and same(result(undamaged), result(run))


@pytest.mark.parametrize("name", ["step-99999999", "step-²", "step-00000030.damaged", "step-"])
def test_a_folder_that_is_no_checkpoint_changes_nothing(run, capsys, name):
    (run / "checkpoints" / name).mkdir()
    assert torch.equal(tokenformer.load(run).embedding.weight, embedding(run, 30))
    assert main(["train", str(run), "--resume", "steps=31"]) == 0
    said = capsys.readouterr().out
    assert "going on from step 30 " in said and ("is damaged (" in said) == (name == "step-99999999")


def test_damage_to_several_and_again_at_the_same_step(undamaged, run, capsys):
    for times in ("", "1"):
        for step in (20, 30):
            (run / "checkpoints" / f"step-{step:08d}" / MANIFEST).unlink()
        assert main(["train", str(run), "--resume"]) == 0
        said = capsys.readouterr().out
        assert "going on from step 10 " in said and said.count("is damaged (") == 2
        assert (run / "checkpoints" / f"step-00000030.damaged{times}").is_dir()
        assert same(result(undamaged), result(run))


def test_a_run_of_damaged_checkpoints_is_refused_and_not_begun_anew(tiny, run, capsys):
    for path in all_steps(run).values():
        (path / "state.json").write_text("")
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    for verb in (["train", str(run), "--resume"], ["generate", str(run), "--prompt", "a"]):
        assert main(verb) == 2
        assert f"no checkpoint of {run} is whole" in capsys.readouterr().err
    for path in all_steps(run).values():
        shutil.rmtree(path)
    with pytest.raises(UserError, match=r"last names 'step-00000030', which is not there"):
        Trainer(tiny(*THREE), run, resume=True).run()
    assert {p: t for p, t in before.items() if p.exists() and p.is_file()} == {
        p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"
    } | {run / ".lock": before[run / ".lock"]}


CRAFTED = {  # what stands where in a state whose manifest fits it
    "no step": ("step", ...),
    "a step of text": ("step", "30"),
    "half a step": ("step", 2.5),
    "a step before the first": ("step", -1),
    "no random state": ("rng", ...),
    "a short random state": ("rng", {"cpu": [1, 2, 3]}),
    "a random state of text": ("rng", {"cpu": ["a"]}),
    "a list for a part": ("guard", [1]),
    "a name that is none of a part": ("guard", {"config": 1}),
    "text for a number": ("guard", {"scale": "a"}),
    "a part without an entry": ("spikes", {"seen": 1}),
    "text for a mean": ("spikes", {"seen": 1, "mean": "a", "variance": 1}),
    "text for a total": ("totals", {"tokens": "a", "flops": 1, "hours": 1}),
    "no growth": ("growth", None),
    "growth at text": ("growth", {"steps": [], "losses": ["a"]}),
    "no loader": ("loader", ...),
}


@pytest.mark.parametrize("craft", CRAFTED)
def test_a_state_that_no_run_wrote_is_one_sentence_and_nothing_is_touched(run, capsys, craft):
    newest, (name, value) = run / "checkpoints" / "step-00000030", CRAFTED[craft]
    state = json.loads((newest / "state.json").read_text())
    state = {k: v for k, v in {**state, name: value}.items() if v is not ...}
    (newest / "state.json").write_text(json.dumps(state))
    (newest / MANIFEST).unlink()
    write_manifest(newest)
    before = (run / "config.yml").read_text()
    assert main(["train", str(run), "--resume", "steps=31"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{newest / 'state.json'} is not of the form that a run writes (" in said
    assert (run / "config.yml").read_text() == before


class Child:
    """A command as a process that is forked from one that has imported everything; what it says is in rank-0.log."""

    def __init__(self, command: list[str], out: Path) -> None:
        self.process = forkserver().Process(target=command_line, args=(0, 1, command, str(out)))
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int | None:
        self.process.join(600)
        return self.process.exitcode


def soak(config_file: Path, tiny, tmp_path: Path, kills: int, *settings: str) -> int:
    """Kill a run, damage what lies there, start it again, until it was killed often enough; → how many fallbacks."""
    rng, run, fallbacks = random.Random(kills), tmp_path / "run", 0
    damaged: list[Path] = []
    for number in range(kills + 1):
        used = max(all_steps(run).keys() - {int(path.name[5:]) for path in damaged}, default=0)
        steps = f"steps={100_000 if number < kills else max(used, 100) + 20}"  # it ends when it was killed often enough
        process = Child(["train", str(config_file), *settings, steps, "--out", str(run), "--resume"], tmp_path)
        if number < kills:
            kill_at_a_random_moment(process, run, rng)
        code, said = process.wait(), (tmp_path / "rank-0.log").read_text()
        assert code == (-signal.SIGKILL if number < kills else 0), said
        assert f"going on from step {used} " in said or number == 0, said
        assert all(f"the checkpoint {path} is damaged (" in said for path in damaged), said
        assert said.count("is damaged (") == len(damaged)
        fallbacks, damaged = fallbacks + len(damaged), []
        for path in reversed(list(all_steps(run).values())[1:] if number < kills else []):  # the oldest stays whole
            if rng.random() < 0.4:
                break
            HARM[rng.choice(list(HARM))](path, rng)
            damaged.append(path)
    Trainer(tiny(*settings, steps), tmp_path / "whole").run()
    assert same(result(tmp_path / "whole"), result(run))
    return fallbacks


@pytest.mark.multi
def test_kills_and_damage_in_turn_end_in_the_bits_of_the_undisturbed_run(config_file, tiny, tmp_path):
    settings = ("checkpoint.every=2", "checkpoint.keep=3", "log.every=5")
    assert soak(config_file, tiny, tmp_path, 4, *settings) >= 1


@pytest.mark.slow
def test_a_hundred_kills_with_damage_in_between(config_file, tiny, tmp_path):
    """The run grows while it is killed."""
    settings = ("checkpoint.every=2", "checkpoint.keep=3", "log.every=5", "train.precision=bf16")
    fallbacks = soak(
        config_file, tiny, tmp_path, 100, *settings, "growth=[{at: {step: 60}, ffn_tokens: 48, qkv_tokens: 24}]"
    )
    print(f"{fallbacks} fallbacks, each said")
    assert fallbacks >= 50


def test_a_run_whose_checkpoints_were_moved_is_not_begun_again(tiny, tmp_path):
    """One folder too deep, as an unpacking tool may leave them: training began at step 0 without a word."""
    run = tmp_path / "run"
    Trainer(tiny("steps=4", "checkpoint.every=2"), run).run()
    (run / "checkpoints").rename(run / "moved")
    (run / "checkpoints").mkdir()
    (run / "moved").rename(run / "checkpoints" / "checkpoints")
    rows = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole: put one back from a copy; .* holds .*checkpoi"):
        Trainer(tiny("steps=4", "checkpoint.every=2"), run, resume=True).run()
    assert (run / "metrics.jsonl").read_bytes() == rows
