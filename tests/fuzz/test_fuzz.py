"""Damaged and crafted files end in a sentence or in the right result; and the fuzzer notices where they do not."""

import os
import time
from pathlib import Path

import pytest

from tests.fuzz import sandbox
from tests.fuzz.fuzz import FINE, judge, line, run
from tests.fuzz.harm import CANARY

CASES = 1000  # of each seed
needs_landlock = pytest.mark.skipif(
    not sandbox.landlock(), reason="this kernel has no Landlock: a case could write outside of its folder"
)


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mishaps", [False, True])
def test_no_file_of_any_format_brings_a_traceback_a_hang_a_crash_or_another_model(mishaps, seed):
    wrong = [line(seed, one) for one in run(seed, CASES, jobs=1, mishaps=mishaps) if one.verdict != FINE]
    assert not wrong, "\n".join([f"{len(wrong)} of {CASES}", *wrong])


@pytest.fixture
def ended(tmp_path):
    """How a call ends in the sandbox, and what the fuzzer says of it."""
    (tmp_path / "in").mkdir()

    def end(call, seconds: float = 20) -> tuple[str, str]:
        found = sandbox.run(call, tmp_path / "in", tmp_path / "said", seconds)
        return found.how, judge(found, tmp_path / "in")[0]

    return end


@needs_landlock
def test_a_case_cannot_write_outside_its_folder(ended, tmp_path):
    (tmp_path / "outside").write_text("as it was")
    here = str(Path(__file__).parent / "slipped")

    def attack() -> int:
        Path("inside").write_text("x")
        ways = [
            lambda: (tmp_path / "outside").write_text("other"),
            lambda: os.open(tmp_path / "outside", os.O_RDWR),
            lambda: os.truncate(tmp_path / "outside", 0),
            lambda: os.unlink(tmp_path / "outside"),
            lambda: os.rename("inside", tmp_path / "moved"),
            lambda: os.symlink("x", here),
            lambda: os.mkdir(here),
            lambda: os.mkfifo(here),
        ]
        done = 0
        for way in ways:
            try:
                way()
                done += 1
            except OSError:
                pass
        return done + os.system(f"touch {here} 2>/dev/null && exit 0 || exit 3") // 256  # its children cannot either

    assert ended(attack)[0] == "exit 3"
    assert (tmp_path / "outside").read_text() == "as it was" and not os.path.lexists(here)
    assert (tmp_path / "in" / "inside").read_text() == "x"


@needs_landlock
@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (lambda: 0, FINE),
        (lambda: {}["a key"], "traceback"),
        (lambda: os.kill(os.getpid(), 9), "crash"),
        (lambda: time.sleep(600), "hang"),
        (lambda: len(bytearray(4 * 10**9)) * 0, "memory"),
        (lambda: os.system(f"touch {CANARY}"), "executed"),
        (lambda: os.write(2, b"tokenformer: a sentence\n") * 0 + 2, FINE),
        (lambda: 2, "no sentence"),
        (lambda: os.write(2, b"tokenformer: " + b"x" * 9999 + b"\n") * 0 + 2, "no sentence"),
        (lambda: 7, "exit 7"),
    ],
)
def test_every_bad_end_is_noticed(ended, call, verdict):
    assert ended(call, 1.0 if verdict == "hang" else 20)[1] == verdict
