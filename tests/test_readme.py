"""What the README shows is run as it stands there, one command after the other in one folder."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("pip ", "make ", "source ")  # setting up; .ci/run does that
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


def test_the_commands_run(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    found = commands()
    assert len(found) >= 10
    for command in found:
        words = shlex.split(command)
        assert words[0] == "tokenformer"
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_tree_and_the_links_name_what_is_there():
    tree = README.split("```\ntokenformer/")[1].split("```")[0]
    names = [f"tokenformer/{name}" for name in re.findall(r"^  (\w[\w./]*)", tree, flags=re.M)]
    names += re.findall(r"^(\w[\w./]*)", tree, flags=re.M) + re.findall(r"\]\(([\w./-]+)\)", README)
    assert len(names) > 15
    assert [name for name in names if not (ROOT / name).exists()] == []
