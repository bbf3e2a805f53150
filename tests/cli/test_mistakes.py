"""Natural mistakes of a first hour: each is answered in one sentence with exit code 2, and nothing is written."""

import os
import shlex
from pathlib import Path

import pytest

from tests.train.conftest import TEXT, config_file, prepared  # noqa: F401 (fixtures)
from tokenformer.cli.main import main

MISTAKES = """
trian small.yml                                 | there is no command 'trian': did you mean train?
                                                | required: COMMAND
train                                           | required: CONFIG (see tokenformer train --help)
train smal.yml                                  | nothing at smal.yml: did you mean small.yml?
train my/smal.yml                               | nothing at my/smal.yml: did you mean my/small.yml?
train lm/160m                                   | did you mean the preset 'lm/150m'?
prepare book.txt --split 9                       | there is no option --split: leave it out
train small.yml --steps 10                      | settings are written without dashes, as steps=10
train small.yml --batch-size=8                  | settings are written without dashes, as batch=8
train small.yml --learning-rate 1e-3            | settings are written without dashes, as optimizer.rate=1e-3
train small.yml steps = 10                      | write steps=10, without spaces
train small.yml steps= 10                       | write steps=10, without spaces
train small.yml steps 10                        | write steps=10
train data.path=alice --out new                 | is a setting: name a config first, such as lm/3m data.path=alice
train small.yml optimizer.rate:1e-3             | write optimizer.rate=1e-3
train small.yml optimizer.lr=1e-3               | unknown key 'optimizer.lr': did you mean 'optimizer.rate'?
train small.yml data.path=alcie                 | did you mean alice?
train small.yml growth=yes                      | must be a list of mappings or progressive or a mapping
train folder data.path=wide batch=4 --out new   | folder knows 384: prepare it with the tokenizer
generate begun --prompt x                       | the run begun has no checkpoint yet: wait for its first one
generate folder hi                              | a text goes behind --prompt or --text
convert folder --out other                      | required: --to (ours, hf, official)
train small.yml stepz=10                        | unknown key 'stepz': did you mean 'steps'?
train small.yml lr=1e-3                         | unknown key 'lr': did you mean 'optimizer.rate'?
train small.yml epochs=3                        | unknown key 'epochs': did you mean 'steps'?
train folder small.yml --out new                | give it first (small.yml folder), and it is the recipe
train folder --out new                          | folder has weights but no recipe, so batch is missing
train small.yml rate=1e-3                       | unknown key 'rate': did you mean 'optimizer.rate'?
train small.yml optimizer.rat=1e-3              | did you mean 'optimizer.rate'?
train small.yml steps=ten                       | steps is 'ten', but must be a whole number
train small.yml steps=-5                        | steps is -5: give 0 or more
train small.yml batch=0                         | batch is 0: give a number above 0
train small.yml batch=8388608 micro_batch=8388608 | are here: give micro_batch=
train small.yml batch=7 micro_batch=4           | give a multiple of 4
train small.yml optimizer.rate=-1               | optimizer.rate is -1.0: give a number above 0
train small.yml optimizer.kind=sgd              | must be one of muon, adamw
train small.yml train.precision=fp17            | did you mean 'fp16'?
train small.yml train.device=gpu                | must be one of auto, cpu, cuda
train small.yml model.heads=7                   | does not divide dim 16: give one of 1, 2, 4, 8, 16
train small.yml model.vocab=100                 | set model.vocab=384
train small.yml model.context=2000000           | no sample of 2000000 + 1 tokens
train small.yml data.path=nowhere               | no prepared set 'nowhere'
train small.yml data.path=book.txt              | make one with `tokenformer prepare`
train small.yml data.path=null                  | data.path is missing
train small.yml growth=progresive               | did you mean 'progressive'?
train small.yml "growth=[{at: {step: 2}, ffn_tokens: 8}]"      | layer 0 has 32 already: give the total afterwards
train small.yml "growth=[{at: {step: 99}, ffn_tokens: 64}]"    | comes after step 99, but the run has 40 steps
train small.yml --out run                       | run is there already
train small.yml --out book.txt                  | book.txt is a file
train small.yml start=nowhere                   | there is nothing at nowhere: check it
train nothing --resume                          | there is no run at nothing to resume
train folder --resume                           | holds weights but no run to resume
train folder                                    | give --out RUN
train tab.yml                                   | tab.yml, line 2, begins with a tab: use spaces
train brace.yml                                 | brace.yml, line 2, has a bracket that is not closed
train twice.yml                                 | twice.yml, line 2, key 'steps' stands twice
train empty.yml                                 | but is empty
train picture.png                               | not a text file
train book.txt                                  | book.txt, line 20, has a second colon
train run --resume model.dim=32                 | begun with another model (model.dim: 16 → 32
train run --resume batch=8                      | was begun with batch 4, not 8
compare small.yml --out both                    | give a second config, or --transformer
info small.yml --context 1x                     | give lengths such as
prepare missing.txt --tokenizer byte --out d    | no file, folder or match for 'missing.txt': check the path
prepare empty.yml --tokenizer byte --out d      | no text
prepare picture.png --tokenizer byte --out d    | is not UTF-8
prepare book.txt --tokenizer gpt2 --out d       | gpt-neox-20b
tokenizer train book.txt --vocab 100            | give 257 or more
data peek alice --document 99                     | has no document 99: give 0 to 0
data stat alice                                   | there is no action 'stat': did you mean stats?
data split alice --shares 90,x                    | write them as 969,30,1
grow my/rum --ffn-tokens 64 --out bigger        | nothing at my/rum
grow folder --out bigger                        | nothing to grow
grow folder --ffn-tokens 8 --out bigger         | layer 0 has 32 already: give the total afterwards
grow folder --ffn-tokens 64 --out run           | run is there already: give another name, or move it away
grow run --ffn-tokens 64 --out folder           | folder is there already: give another name, or replace it (--force
grow folder --ffn-token 64 --out bigger --txt x | there is no option --txt: did you mean --text?
shrink folder --ratio 1.5 --text book.txt --out smaller     | between 0 and 1
shrink folder --ratio 0.5 --out smaller         | give one with --text
generate folder                                 | nothing to write: give --prompt
generate folder --prompt x --temperature -1     | temperature is -1.0: give 0 or more
generate folder --prompt x --tokens five        | --tokens is 'five', but must be a whole number
generate folder --prompt x --top-p 0.5          | give a temperature
eval folder                                     | nothing to measure
eval folder --text missing.txt                  | no file, folder or match for 'missing.txt'
eval folder --tasks pica --data-dir .           | with --data-dir tasks are lambada_openai, hellaswag
predict folder picture.png                      | is a model of language
convert --to gguf folder --out other            | --to is 'gguf': give one of ours, hf, official
convert --to official grown --out other         | --merge-segments
plot nothing                                    | nothing has no metrics.jsonl: give the folder of a run
plot run --out curves.pdf                       | neither a .png nor a .html file
plan small.yml --gpus 0                         | --gpus is 0
"""
ROWS = [tuple(part.strip() for part in line.split("|")) for line in MISTAKES.strip().splitlines()]


@pytest.fixture(scope="module")
def place(config_file, prepared, tmp_path_factory) -> Path:  # noqa: F811
    """A folder as a newcomer has it after half an hour."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my").mkdir()
    for path in prepared.parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("small.yml", "my/small.yml"):
        (folder / name).write_text(config_file.read_text())
    (folder / "tab.yml").write_text("model:\n\tlayers: 2\n")
    (folder / "brace.yml").write_text("model: {layers: 2\nsteps: 3\n")
    (folder / "twice.yml").write_text("steps: 3\nsteps: 4\n")
    (folder / "empty.yml").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (folder / "book.txt").write_bytes(TEXT.read_bytes()[:20000])
    (folder / "begun").mkdir()
    for name in ("config.yml", ".lock"):
        (folder / "begun" / name).write_text(config_file.read_text())
    before = os.getcwd()
    os.chdir(folder)
    words = ["tokenizer", "train", "book.txt", "--vocab", "500", "--out", "wide-tokenizer.json"]
    assert main(words) == 0
    assert main(["prepare", "book.txt", "--tokenizer", "wide-tokenizer.json", "--out", ".", "--name", "wide"]) == 0
    assert main(["train", "small.yml", "steps=2", "--out", "run"]) == 0
    assert main(["convert", "--to", "ours", "run", "--out", "folder"]) == 0
    assert main(["grow", "folder", "--ffn-tokens", "48", "--out", "grown"]) == 0
    os.chdir(before)
    return folder


def held(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(folder.rglob("*"))}


def test_there_are_at_least_sixty():
    assert len({words for words, _ in ROWS}) == len(ROWS) >= 60


@pytest.mark.parametrize(("words", "sentence"), ROWS, ids=[words or "nothing" for words, _ in ROWS])
def test_a_mistake_is_one_sentence_and_nothing_is_written(words, sentence, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    before = held(place)
    try:
        code = main(shlex.split(words))
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert sentence in said and said.startswith("tokenformer: ") and said.count("\n") == 1, said
    assert held(place) == before
