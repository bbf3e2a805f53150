"""Files are whole or not there."""

import errno
import json
import os

import pytest

from tokenformer.cli.main import main
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, atomic_file, atomic_folder, check_manifest, check_writable, write_text


def test_a_file_keeps_its_old_content_when_writing_fails(tmp_path):
    path = tmp_path / "a" / "file.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_file(path) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["file.txt"]
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o444 == 0o444


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out") as beside:
        (beside / "half").write_text("x")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with atomic_folder(tmp_path / "out") as beside:
        (beside / "sub").mkdir()
        (beside / "sub" / "file").write_text("x")
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["files"]["sub/file"]["bytes"] == 1
    check_manifest(tmp_path / "out")
    with pytest.raises(UserError, match="is there already"), atomic_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "sub" / "file").read_text() == "x"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be made"), atomic_folder(tmp_path / "file" / "out"):
        pass
    for number, do in (
        (errno.ENOSPC, "make room, or choose"),
        (errno.EDQUOT, "make room, or choose"),
        (errno.EIO, "choose"),
    ):
        sentence = rf"could not be written \(\[Errno {number}\] {os.strerror(number)}\): {do} another place"
        with pytest.raises(UserError, match=sentence), atomic_folder(tmp_path / "out"):
            raise OSError(number, os.strerror(number))
    assert os.listdir(tmp_path) == ["file"]


@pytest.fixture
def disk(monkeypatch):
    """What was made durable and what was renamed, in order, by inode: names change."""
    done, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(("sync", os.fstat(file).st_ino)), sync(file))[-1])
    for name in ("replace", "rename"):
        move = getattr(os, name)

        def moved(source, target, *args, move=move, **more):
            done.append(("move", os.stat(source).st_ino))
            return move(source, target, *args, **more)

        monkeypatch.setattr(os, name, moved)
    return done


def test_the_bytes_of_a_file_are_on_the_disk_before_its_name(tmp_path, disk):
    """After a power cut the name would lead to an empty file."""
    write_text(tmp_path / "file", "content")
    inode = (tmp_path / "file").stat().st_ino
    assert disk.index(("sync", inode)) < disk.index(("move", inode))
    assert ("sync", tmp_path.stat().st_ino) in disk[disk.index(("move", inode)) :]  # then the name itself


def test_the_bytes_of_all_files_of_a_folder_are_on_the_disk_before_its_name(tmp_path, disk):
    with atomic_folder(tmp_path / "out") as beside:
        (beside / "sub").mkdir()
        (beside / "one").write_text("1")
        (beside / "sub" / "two").write_text("2")
    end = disk.index(("move", (tmp_path / "out").stat().st_ino))
    for name in ("one", "sub", "sub/two", MANIFEST):
        assert ("sync", (tmp_path / "out" / name).stat().st_ino) in disk[:end], name


@pytest.mark.parametrize("harm", ["change", "cut", "remove", "no manifest", "broken manifest", "empty manifest"])
def test_a_harmed_folder_is_refused(tmp_path, harm):
    with atomic_folder(tmp_path / "out") as beside:
        (beside / "file").write_text("content")
    file, manifest = tmp_path / "out" / "file", tmp_path / "out" / MANIFEST
    {
        "change": lambda: file.write_text("cOntent"),
        "cut": lambda: file.write_text("cont"),
        "remove": file.unlink,
        "no manifest": manifest.unlink,
        "broken manifest": lambda: manifest.write_text("{"),
        "empty manifest": lambda: manifest.write_text("[]"),
    }[harm]()
    with pytest.raises(UserError):
        check_manifest(tmp_path / "out")


def test_a_place_where_a_file_cannot_go_is_known_before_and_nothing_stays_behind(tmp_path):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for good in ("file", "new", "a/b/new"):
        check_writable(tmp_path / good)
    for bad, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is no plain file"),
        (tmp_path / "file" / "new", "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written"),
        ("/proc/nope/x", "cannot be written"),
    ):
        with pytest.raises(UserError, match=why):
            check_writable(bad)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "no/model/here", "--text", "text", "--out"],
        ["generate", "no/model/here", "--prompt", "a", "--output-file"],
        ["plot", "no/run/here", "--out"],
        ["tokenizer", "train", "no text here", "--vocab", "300", "--out"],
        ["slurm", "lm/150m", "data.path=set", "batch=8", "--nodes", "1", "--gpus-per-node", "1", "--out"],
    ],
)
@pytest.mark.parametrize("out", ["folder.html", "/proc/nope/x.html"])
def test_commands_look_where_they_will_write_before_anything_else(tmp_path, monkeypatch, capsys, command, out):
    monkeypatch.chdir(tmp_path)
    for name in ("folder.html", "folder.html.sbatch"):  # a job's script stands beside its run
        (tmp_path / name / "full").mkdir(parents=True)
    (tmp_path / "text").write_text("a text")
    assert main([*command, out]) == 2
    error = capsys.readouterr().err
    assert out in error and error.count("\n") == 1
