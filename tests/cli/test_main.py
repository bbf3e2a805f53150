"""The command itself: how soon it answers, how its threads wait, what it makes of words that are no command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenformer
from tokenformer import LanguageModel, ModelConfig, cli
from tokenformer.cli.main import build_parser, main, verbs
from tokenformer.terminal import table

SHAPE = {"layers": 1, "dim": 32, "heads": 2, "qkv_tokens": 8, "proj_tokens": 8, "ffn_tokens": 8, "context": 16}
QUIET = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


def answer(*words: str) -> tuple[int, list[str], str]:
    """Run the command in a process of its own; return code, heavy modules, and what it said."""
    code = (
        "import sys\nfrom tokenformer.cli.main import main\n"
        "try:\n    code = main(sys.argv[1:])\n"
        "finally:\n    print('heavy:', *[name for name in ('torch', 'rich', 'transformers') if name in sys.modules])\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=QUIET)
    *_, last = done.stdout.splitlines()
    return done.returncode, last.split()[1:], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("info lm/150m", 0, "151,881,216"),
        ("train --keys", 0, "peak learning rate, for AdamW and for Muon"),
        ("info lm/150m model.heads=7", 2, "does not divide dim 768"),
        ("train lm/150m stepz=3", 2, "did you mean 'steps'"),
        ("train lm/150m batch=null micro_batch=null", 2, "batch is missing"),
        ("train lm/150m", 2, "data.path is missing"),
        ("train lm/150m batch=4 data.path=nowhere/set", 2, "there is no prepared set"),
        ("train lm/151m", 2, "did you mean the preset 'lm/150m'"),
        ("train lm/150m batch=4 --out .", 2, "is there already"),
    ],
)
def test_info_and_mistakes_of_a_config_answer_before_torch_is_imported(words, code, sentence):
    left, heavy, said = answer(*words.split())
    assert (left, heavy) == (code, []) and sentence in said, said


@pytest.mark.parametrize(("asked", "spins"), [({}, "0"), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_wait_asleep_unless_the_user_says_otherwise(asked, spins):
    """OpenMP prints what it took from the environment when torch loads it."""
    code = "from tokenformer.cli.main import main; main(['info', 'lm/150m']); import torch"
    shown = QUIET | {"OMP_DISPLAY_ENV": "verbose"} | asked
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=shown)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_values_stand_right_beside_their_names(capsys):
    assert main(["tokenizer", "info", "byte"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines[0].index("byte")
    assert all(line[at - 1] == " " != line[at] for line in lines) and lines[1][at:] == "257", lines


def test_a_table_aligns_columns_of_numbers_to_the_right(capsys):
    table(["what", "size"], [["a", "9"], ["b", "-1,000"], ["c", "–"]])
    assert capsys.readouterr().out.splitlines() == ["what    size", "a          9", "b     -1,000", "c          –"]


def test_help_shows_every_command_in_the_order_of_work_and_an_example():
    files = {path.stem for path in Path(cli.__file__).parent.glob("*.py")} - {"__init__", "main", "eval_images"}
    assert set(verbs()) == files
    said = build_parser().format_help()
    assert "example: tokenformer train" in said
    order = [said.index(f"\n    {name}") for name in ("prepare", "train", "plot", "generate", "grow", "slurm")]
    assert order == sorted(order)


@pytest.mark.parametrize("words", [["info", "lm/150m"], ["train", "--keys"], ["--help"]])
def test_output_to_a_full_disk_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tokenformer", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "tokenformer: standard output cannot be used (No space left on device): check it\n"


def test_output_of_a_rank_to_a_full_disk_is_one_sentence():
    script = "from tokenformer.parallel.mesh import run_rank; run_rank(lambda: print('lost'))"
    ranks = os.environ | {"WORLD_SIZE": "2", "RANK": "1", "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, env=ranks)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("tokenformer: standard output of rank 1 on ")


def test_letters_that_the_terminal_has_not_are_escaped(tmp_path):
    (tmp_path / "é日.txt").write_text("text")
    tokenizer = ["tokenizer", "train", str(tmp_path / "é日.txt"), "--vocab", "257", "--out", str(tmp_path / "é日.json")]
    done = subprocess.run(
        [sys.executable, "-m", "tokenformer", *tokenizer],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/\\xe9\\u65e5.json\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment, but MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}, "but RANK is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment"),
    ],
)
def test_processes_that_cannot_find_each_other_are_told_of_torchrun(given, sentence, tmp_path, monkeypatch, capsys):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a.txt").write_text("text " * 100)
    assert main(["prepare", str(tmp_path / "a.txt"), "--tokenizer", "byte", "--out", str(tmp_path)]) == 0
    tokenformer.save(LanguageModel(ModelConfig(**SHAPE, vocab=384)), tmp_path / "model")
    capsys.readouterr()
    train = ["train", str(tmp_path / "model"), f"data.path={tmp_path}/a", "batch=2", "steps=1"]
    for words in (
        [*train, "--out", str(tmp_path / "run")],
        ["eval", str(tmp_path / "model"), "--text", str(tmp_path / "a"), "--tokenizer", "byte"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert sentence in said and "torchrun" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
