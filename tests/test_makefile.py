"""What `make` does with files of the user's own, and what it says before it downloads or takes long."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def dry_run(target: str) -> str:
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_files_that_git_does_not_know_are_not_linted(tmp_path):
    """The commands of `make lint`, in a repository with a file of the user's own."""
    linting = [line for line in dry_run("lint").splitlines() if "ruff" in line]
    assert len(linting) == 2
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "ours.py").write_text("x = 1\n")
    subprocess.run(["git", "add", "ours.py"], cwd=tmp_path, check=True)
    (tmp_path / "mine.py").write_text("import   os\n")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    for line in linting:
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "ours.py").write_text("import   os\n")
    assert all(subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True).returncode for line in linting)


def test_downloads_and_long_runs_are_announced():
    assert "downloading PyTorch" in dry_run("setup") and "minutes" in dry_run("test")
