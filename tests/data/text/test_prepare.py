"""prepare: the same bytes whatever the workers, whatever kills it, and nothing half-written."""

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tokenformer import UserError
from tokenformer.data.text import prepare as module
from tokenformer.data.text.indexed import Indexed
from tokenformer.data.text.journal import Work
from tokenformer.data.text.prepare import prepare
from tokenformer.data.text.reading import Reading
from tokenformer.data.text.tokenizer import load_tokenizer

ALICE = (Path(__file__).parents[1] / "alice.txt").read_text()
NEOX = load_tokenizer("gpt-neox-20b")


def write_jsonl(path: Path, megabytes: float, seed: int = 0) -> list[str]:
    """Documents of very different lengths, from pieces of Alice."""
    rng, documents, size = random.Random(seed), [], 0
    while size < megabytes * 1e6:
        start, length = rng.randrange(len(ALICE)), int(rng.paretovariate(1) * 300)
        documents.append(ALICE[start : start + length] or "end")
        size += len(documents[-1])
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return documents


def contents(folder: Path, name: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob(f"{name}*") if p.is_file()}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tokenformer", "prepare", *map(str, arguments)]


def start(inputs: object, out: Path, *more: object, **pipes) -> subprocess.Popen:
    """As from a terminal: where the tests run in the background, Ctrl-C is ignored and would be so in the process."""
    arguments = command(inputs, "--out", out, "--name", "x", "--workers", 2, *more)
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=listen, **pipes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """Three files of JSON lines, and what preparing them in one go gives."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "in").mkdir()
    for i in range(3):
        write_jsonl(folder / "in" / f"{i}.jsonl", 1.0, i)
    prepare([folder / "in"], folder, "x", workers=2)
    return folder / "in", contents(folder, "x")


def test_tokens_are_those_of_the_library_with_the_end_behind_each(tmp_path):
    documents = write_jsonl(tmp_path / "a.jsonl", 0.3)
    found = Indexed(prepare([tmp_path / "a.jsonl"], tmp_path, "x", workers=1), verify="full")
    assert [found.document(i).tolist() for i in range(found.documents)] == [[*NEOX.encode(d), 0] for d in documents]
    assert found.dtype == np.uint16 and found.description is not None
    assert found.description["tokens"] == len(found.tokens) and found.description["documents"] == len(documents)


@pytest.mark.multi
@pytest.mark.parametrize("workers", [1, 3])
def test_output_is_byte_identical_for_any_number_of_workers(corpus, tmp_path, workers):
    inputs, expected = corpus
    prepare([inputs], tmp_path, "x", workers=workers)
    assert contents(tmp_path, "x") == expected and len(expected) == 3


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def journal_lines(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / ".x_text_document.work" / "journal").read_bytes().count(b"\n")
    return 0


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.multi
def test_killed_again_and_again_it_continues_and_gives_the_same_bytes(corpus, tmp_path):
    inputs, expected = corpus
    for attempt in range(3):
        before = journal_lines(tmp_path)
        process = start(inputs, tmp_path)
        wait_for(lambda n=before: journal_lines(tmp_path) > n)
        workers = children(process.pid)
        process.kill()
        said = process.communicate()[1].decode()
        assert ("continuing after" in said) == (attempt > 0) and "Traceback" not in said
        wait_for(lambda w=workers: not any(Path(f"/proc/{p}/cmdline").exists() for p in w))  # no worker is left behind
        assert contents(tmp_path, "x") == {}
    done = [json.loads(line) for line in (tmp_path / ".x_text_document.work" / "journal").read_text().splitlines()]
    last = subprocess.run(command(inputs, "--out", tmp_path, "--name", "x"), capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert f"continuing after {done[-1]['progress']['tokens']:,} tokens" in last.stderr
    assert contents(tmp_path, "x") == expected
    assert not (tmp_path / ".x_text_document.work").exists()


@pytest.mark.multi
def test_ctrl_c_leaves_no_output_and_is_continued(corpus, tmp_path):
    inputs, expected = corpus
    process = start(inputs, tmp_path)
    wait_for(lambda: journal_lines(tmp_path) >= 1)
    os.killpg(process.pid, signal.SIGINT)
    assert "interrupted" in process.communicate()[1].decode() and process.returncode == 130
    assert contents(tmp_path, "x") == {}
    said: list[str] = []
    prepare([inputs], tmp_path, "x", workers=2, say=said.append)
    assert "continuing after" in said[0] and contents(tmp_path, "x") == expected


@pytest.mark.multi
def test_a_killed_worker_is_said_and_the_work_goes_on_next_time(corpus, tmp_path):
    inputs, expected = corpus
    process = start(inputs, tmp_path)
    wait_for(lambda: len(children(process.pid)) == 2)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    said = process.communicate()[1].decode()
    assert process.returncode == 2 and "a worker ended before its work (exit code -9)" in said
    prepare([inputs], tmp_path, "x", workers=1)
    assert contents(tmp_path, "x") == expected


class Stop(Exception):
    pass


def interrupted(inputs: list[Path], out: Path, pieces: int, **settings) -> Path:
    """Prepare until some pieces are in the journal; the work folder."""
    seen = 0
    whole = module._append

    def append(*arguments):
        nonlocal seen
        if seen == pieces:
            raise Stop
        seen += 1
        whole(*arguments)

    module._append = append
    try:
        with pytest.raises(Stop):
            prepare(inputs, out, "x", workers=1, tokenizer="byte", **settings)
    finally:
        module._append = whole
    return out / ".x_text_document.work"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[list[Path], dict[str, bytes]]:
    """Two files for the byte tokenizer, a dozen pieces, and their set."""
    folder = tmp_path_factory.mktemp("small")
    write_jsonl(folder / "a.jsonl", 1.5)
    (folder / "b.txt").write_text(ALICE * 30)
    paths = [folder / "a.jsonl", folder / "b.txt"]
    prepare(paths, folder, "x", workers=1, tokenizer="byte")
    return paths, contents(folder, "x")


def test_damage_to_unfinished_work_costs_only_what_was_damaged(small, tmp_path):
    paths, expected = small
    work = interrupted(paths, tmp_path, 7)  # in the middle of the long document
    rng = random.Random(5)
    for trial in range(6):
        copy = tmp_path / f"{trial}"
        shutil.copytree(work, copy / work.name)
        victim = copy / work.name / ["tokens", "sizes", "journal"][trial % 3]
        data = bytearray(victim.read_bytes())
        at = rng.randrange(len(data))
        if trial < 3:
            data[at] ^= 255
        else:
            del data[at:]  # what a crash of the machine leaves
        victim.write_bytes(data)
        said: list[str] = []
        prepare(paths, copy, "x", workers=1, tokenizer="byte", say=said.append)
        assert contents(copy, "x") == expected


def test_an_input_that_changed_is_not_continued(small, tmp_path):
    paths, _ = small
    inputs = [Path(shutil.copy(p, tmp_path)) for p in paths]
    for pieces, changed in ((2, 0), (6, 0), (7, 1)):
        out = tmp_path / f"{pieces}-{changed}"
        interrupted(inputs, out, pieces)
        inputs[changed].write_bytes(inputs[changed].read_bytes().replace(b"Alice", b"Bruno", 1))
        said: list[str] = []
        prepare(inputs, out, "x", workers=1, tokenizer="byte", say=said.append)
        assert "starting over" in " ".join(said)
        prepare(inputs, tmp_path / "fresh", "x", workers=1, tokenizer="byte", force=True)
        assert contents(out, "x") == contents(tmp_path / "fresh", "x")


def test_other_settings_are_not_continued_but_another_later_file_is(small, tmp_path):
    paths, _ = small
    inputs = [Path(shutil.copy(p, tmp_path)) for p in paths]
    interrupted(inputs, tmp_path, 2)
    shutil.copytree(tmp_path / ".x_text_document.work", tmp_path / "o" / ".x_text_document.work")
    said: list[str] = []
    prepare(inputs, tmp_path / "o", "x", workers=1, tokenizer="byte", say=said.append, reading=Reading(before="q"))
    assert "the settings changed" in said[0]
    inputs[1].write_text("mended")  # nothing of it was taken: the first file is kept
    said.clear()
    found = Indexed(prepare(inputs, tmp_path, "x", workers=1, tokenizer="byte", say=said.append))
    assert "starting over" in " ".join(said) or "continuing" in said[0]
    assert bytes(found.document(found.documents - 1)[:-1].astype(np.uint8) - 1) == b"mended"


@pytest.mark.multi
def test_standard_input_is_continued_when_it_is_the_same(small, tmp_path):
    paths, _ = small
    text = paths[1].read_bytes()
    process = start("-", tmp_path, "--tokenizer", "byte", stdin=subprocess.PIPE)
    for place in range(0, 4_000_000, 500_000):
        process.stdin.write(text[place : place + 500_000])
        process.stdin.flush()
        time.sleep(0.1)
    wait_for(lambda: journal_lines(tmp_path) >= 1)
    process.kill()
    process.communicate()
    arguments = command("-", "--out", tmp_path, "--name", "x", "--tokenizer", "byte")
    other = subprocess.run(arguments, input=b"z" + text[1:], capture_output=True)
    assert other.returncode == 2 and b"standard input is not what the unfinished work" in other.stderr
    again = subprocess.run(arguments, input=text, capture_output=True)
    assert again.returncode == 0 and b"continuing after" in again.stderr
    assert bytes((Indexed(tmp_path / "x").tokens[:-1] - 1).astype(np.uint8)) == text


def test_only_one_process_works_on_an_output(small, tmp_path):
    paths, _ = small
    work = Work(tmp_path / ".x_text_document.work", "s", [], 2)
    with pytest.raises(UserError, match="another process is at work"):
        prepare(paths, tmp_path, "x", tokenizer="byte")
    work.close()


def test_interrupted_while_taking_its_names_it_takes_them_next_time(small, tmp_path):
    paths, expected = small
    whole = Path.replace
    moved = []

    def replace(self, target):
        if moved:
            raise Stop
        moved.append(target)
        return whole(self, target)

    Path.replace = replace  # type: ignore[method-assign]
    try:
        with pytest.raises(Stop):
            prepare(paths, tmp_path, "x", workers=1, tokenizer="byte")
    finally:
        Path.replace = whole  # type: ignore[method-assign]
    assert len(contents(tmp_path, "x")) == 1
    prepare(paths, tmp_path, "x", workers=1, tokenizer="byte")
    assert contents(tmp_path, "x") == expected


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))


@pytest.mark.multi
def test_a_full_disk_is_said_leaves_earlier_output_and_is_continued(small, tmp_path):
    """A limit on the size of files stands for the disk: writes fail in the middle of a piece."""
    paths, expected = small
    (tmp_path / "old.txt").write_text("earlier")
    prepare([tmp_path / "old.txt"], tmp_path, "x", workers=1, tokenizer="byte")
    earlier = contents(tmp_path, "x")
    arguments = command(*paths, "--out", tmp_path, "--name", "x", "--tokenizer", "byte", "--force")
    full = subprocess.run(arguments, capture_output=True, text=True, preexec_fn=limit_file_size)
    assert full.returncode == 2 and full.stderr.count("\n") == 1
    assert "make room, or choose another --out, and start again to continue" in full.stderr
    assert contents(tmp_path, "x") == earlier
    again = subprocess.run(arguments, capture_output=True, text=True)
    assert again.returncode == 0 and "continuing after" in again.stderr
    assert contents(tmp_path, "x") == expected


@pytest.mark.multi
def test_a_really_full_file_system(small, tmp_path):
    paths, expected = small
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system of 4 MB")
    try:
        with pytest.raises(UserError, match="make room, or choose another --out, and start again"):
            prepare(paths, disk, "x", workers=1, tokenizer="byte")
        assert contents(disk, "x") == {}
        assert subprocess.run(["mount", "-o", "remount,size=40m", str(disk)]).returncode == 0
        prepare(paths, disk, "x", workers=1, tokenizer="byte")
        assert contents(disk, "x") == expected
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_long_document_has_the_tokens_of_the_whole(tmp_path):
    text = (ALICE + "\n\n漢字、" + "<|endoftext|>  " + "don't   stop 123,456 " * 50) * 8
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    said: list[str] = []
    found = Indexed(prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path, "x", workers=2, say=said.append))
    expected = [*NEOX.encode(text), 0]
    assert found.documents == 2
    assert found.document(0).tolist() == expected and found.document(1).tolist() == expected
    assert "16 special tokens stood in the text and were taken as such" in said


def test_special_tokens_empty_and_bad_documents_are_counted(tmp_path):
    lines = ['{"text": "a<|endoftext|>b<|padding|>"}', '{"text": ""}', "nonsense", '{"text": "c"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    said: list[str] = []
    prefix = prepare(
        [tmp_path / "a.jsonl"], tmp_path, "x", workers=1, reading=Reading(on_error="skip"), say=said.append
    )
    found = Indexed(prefix)
    assert found.document(0).tolist() == [66, 0, 67, 1, 0]
    assert found.description is not None
    counts = [found.description[k] for k in ("special_tokens_in_text", "empty_documents", "skipped_documents")]
    assert counts == [2, 1, 1]
    assert "a.jsonl, line 3, is not JSON" in said[-1]


def test_a_custom_tokenizer_travels_with_the_set(tmp_path):
    from tokenformer.data.text.sets import set_tokenizer
    from tokenformer.data.text.tokenizer import train_tokenizer

    (tmp_path / "tokenizer.json").write_text(train_tokenizer([ALICE], 500).to_json())
    (tmp_path / "a.txt").write_text("Alice was beginning")
    found = Indexed(prepare([tmp_path / "a.txt"], tmp_path, "x", tokenizer=tmp_path, workers=1))
    assert set_tokenizer(found).decode(found.document(0).tolist()) == "Alice was beginning<|endoftext|>"
    (tmp_path / "x.tokenizer.json").write_text(train_tokenizer([ALICE], 400).to_json())
    with pytest.raises(UserError, match="is not the one that x_text_document was prepared with"):
        set_tokenizer(found)


def test_large_vocabularies_take_four_bytes(tmp_path):
    tree = json.loads(NEOX.to_json())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 65_500, "content": "<|far|>"})
    for i in range(50_277, 65_500):
        tree["model"]["vocab"][f"unused{i}"] = i
    (tmp_path / "t.json").write_text(json.dumps(tree))
    (tmp_path / "a.txt").write_text("Hello world<|far|>")
    found = Indexed(prepare([tmp_path / "a.txt"], tmp_path, "x", tokenizer=tmp_path / "t.json", workers=1))
    assert found.dtype == np.int32 and found.document(0).tolist() == [12092, 1533, 65_500, 0]


@pytest.mark.parametrize(
    "write, settings, sentence",
    [
        ("", {}, "there is no text in"),
        (None, {}, "there is no file, folder or match"),
        ("x", {"tokenizer": "nonsense"}, "there is no tokenizer 'nonsense'"),
        ("x", {"workers": -1}, "--workers is -1"),
        ("x", {"shard": (3, 2)}, "there is no shard 3 of 2"),
        ("x", {"shard": (1, 2)}, "1 files cannot be shared out over 2 shards"),
        ("\ud800", {}, "is not UTF-8"),
    ],
)
def test_what_cannot_work_is_said_and_leaves_nothing(tmp_path, write, settings, sentence):
    if write is not None:
        (tmp_path / "a.txt").write_bytes(write.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=sentence):
        prepare([tmp_path / "a.txt"], tmp_path / "out", "x", **settings)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(UserError, match=r"a\.txt cannot be written \(Not a directory\): choose another --out"):
        prepare([tmp_path / "a.txt"], tmp_path / "a.txt", "x", tokenizer="byte")
    with pytest.raises(UserError, match="--name sub/x is not a plain name"):
        prepare([tmp_path / "a.txt"], tmp_path, "sub/x", tokenizer="byte")


def test_nothing_is_overwritten_without_force(tmp_path):
    for text in ("one", "two"):
        (tmp_path / f"{text}.txt").write_text(text)
    prepare([tmp_path / "one.txt"], tmp_path, "x", tokenizer="byte", workers=1)
    before = contents(tmp_path, "x")
    with pytest.raises(UserError, match=r"x_text_document\.bin is there already: give another --name, or --force"):
        prepare([tmp_path / "two.txt"], tmp_path, "x", tokenizer="byte", workers=1)
    assert contents(tmp_path, "x") == before and not (tmp_path / ".x_text_document.work").exists()
    prepare([tmp_path / "two.txt"], tmp_path, "x", tokenizer="byte", workers=1, force=True)
    assert Indexed(tmp_path / "x", verify="full").document(0).tolist() == [117, 120, 112, 0]


def test_enwik8_documents_joined_are_the_file(shared, tmp_path):
    from tokenformer.data.text.named import SETS, text_md5

    archive = shared / "data" / "enwik8" / "enwik8.xz"
    prefix = prepare([archive], tmp_path, "e", tokenizer="byte", reading=SETS["enwik8"].reading, workers=1)
    found = Indexed(prefix)
    assert found.documents == 12_348  # what stands before the first page, and 12,347 pages
    text = (found.tokens[found.tokens != 0] - 1).astype(np.uint8).tobytes()
    assert bytes((found.document(1)[:9] - 1).astype(np.uint8)) == b"  <page>\n"
    (tmp_path / "enwik8").write_bytes(text)
    assert text_md5(tmp_path / "enwik8") == SETS["enwik8"].md5
