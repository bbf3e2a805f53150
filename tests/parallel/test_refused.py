"""What the first rank alone can see (a lock, a full disk, a damaged checkpoint) is known to all ranks of a job.

Ranks without a launcher, which would end the slower one before it has said anything.
"""

import fcntl
import shutil
from pathlib import Path

import pytest

from tests.parallel.conftest import forkserver, free_port
from tests.parallel.workers import command_line, without_memory
from tests.train.conftest import result, same
from tokenformer.hub.run_folder import all_steps

pytestmark = pytest.mark.multi
SETTINGS = ["model.heads=4", "model.rotary_fraction=0.5", "batch=8", "micro_batch=2", "parallel.shard=2", "steps=15"]
SETTINGS += ["checkpoint.every=5", "checkpoint.keep=0", "schedule.steps=15"]


def job(out: Path, *command: str, target=command_line) -> list[tuple[int | None, str]]:
    """What two ranks leave with, and what they say."""
    out.mkdir(exist_ok=True)
    context, port = forkserver(), free_port()
    ranks = [context.Process(target=target, args=(r, 2, list(command), str(out), port)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    return [(process.exitcode, (out / f"rank-{r}.log").read_text()) for r, process in enumerate(ranks)]


@pytest.fixture(scope="module")
def trained(ran, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = job(folder, "train", str(ran.file), *SETTINGS, "--out", str(folder / "run"))
    assert [code for code, _ in done] == [0, 0], done
    return folder / "run"


def refusal_of_all(done: list[tuple[int | None, str]]) -> str:
    """The one sentence that both ranks leave with."""
    assert [code for code, _ in done] == [2, 2], done
    said = [line for _, text in done for line in text.splitlines()]
    assert len(said) == 2 and said[0] == said[1] and said[0].startswith("tokenformer: "), said
    return said[0]


@pytest.mark.parametrize("what", ["held", "no lock", "no report", "all damaged"])
def test_what_the_first_rank_refuses_every_rank_says_once(trained, tmp_path, what):
    run = shutil.copytree(trained, tmp_path / "run")
    if what == "held":
        held = open(run / ".lock", "w")  # noqa: SIM115 (until the test ends)
        fcntl.flock(held, fcntl.LOCK_EX)
        sentence = "is being trained by another process"
    elif what == "no lock":
        (run / ".lock").unlink()
        (run / ".lock").mkdir()
        sentence = f"the run {run} cannot be written (Is a directory)"
    elif what == "no report":
        (run / "environment.json").unlink()
        (run / "environment.json").mkdir()
        sentence = f"the run {run} cannot be written (Is a directory)"
    else:
        for path in all_steps(run).values():
            (path / "state.json").write_text("")
        sentence = f"no checkpoint of {run} is whole"
    assert sentence in refusal_of_all(job(tmp_path, "train", str(run), "--resume"))


def test_all_ranks_use_the_checkpoint_that_the_first_one_found_whole(trained, tmp_path):
    """A flipped bit is seen by its checksum alone, which the first rank alone computes."""
    run = shutil.copytree(trained, tmp_path / "run")
    victim = next((run / "checkpoints" / "step-00000015" / "optim").glob("*.safetensors"))
    raw = bytearray(victim.read_bytes())
    raw[-3] ^= 1
    victim.write_bytes(raw)
    done = job(tmp_path, "train", str(run), "--resume")
    assert [code for code, _ in done] == [0, 0], done
    assert "step-00000015 is damaged (" in done[0][1] and "going on from step 10 " in done[0][1] and done[1][1] == ""
    assert same(result(trained), result(run)) and (run / "checkpoints" / "step-00000015.damaged").is_dir()


def test_a_checkpoint_that_the_first_rank_cannot_complete_ends_all_with_one_sentence(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "checkpoints" / "last").unlink()
    (run / "checkpoints" / "last").mkdir()  # the name of the newest one cannot be written
    done = job(tmp_path, "train", str(run), "--resume", "steps=16")
    assert [code for code, _ in done] == [2, 2], done
    last = [text.splitlines()[-1] for _, text in done]
    assert last[0] == last[1] and "the checkpoint of step 16 could not be written (Is a directory)" in last[0], done


def test_where_one_rank_runs_out_of_memory_the_other_says_so_too(ran, tmp_path):
    done = job(tmp_path, "train", str(ran.file), *SETTINGS, "--out", str(tmp_path / "run"), target=without_memory)
    assert [code for code, _ in done] == [2, 2], done
    other, failed = [text.splitlines()[-1] for _, text in done]
    sentence = failed.removeprefix("tokenformer: ")
    assert sentence.startswith("out of memory (2.50 GiB more were wanted) in step 2: give micro_batch=1"), done
    assert other.startswith("tokenformer: rank 1 on ") and other.endswith(f" failed: {sentence}"), done
