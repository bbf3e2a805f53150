"""What the README shows is run as it stands there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("pip ", "make ", "git ")  # setting up; .ci/run does that
ONLINE = ("Haiyang-W/",)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [c for c in lines if c and not c.startswith(ELSEWHERE) and not any(word in c for word in ONLINE)]


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_runs(block, tmp_path):
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands())
def test_a_command_runs(command, tmp_path):
    words = shlex.split(command)
    assert words[0] == "tokenformer"
    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tree_names_what_is_there():
    for name in re.findall(r"^  ?(\w[\w./]*)(?: |$)", README.split("```\ntokenformer/")[1].split("```")[0], flags=re.M):
        assert (ROOT / "tokenformer" / name).exists(), name
