"""Files are whole or not there."""

import json
import os

import pytest

from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, atomic_file, atomic_folder, check_manifest, write_text


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
    with pytest.raises(UserError, match="could not be written"), atomic_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == ["file"]


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
