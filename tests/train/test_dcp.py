"""DCP's safetensors folders: exact, split into files, complete or refused."""

import pytest
import torch
from safetensors import safe_open

from tokenformer.errors import UserError
from tokenformer.hub import dcp
from tokenformer.hub.dcp import read_tensors, write_tensors


def some() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7),
        "step/a": torch.tensor(3.0),
        "half": torch.randn(4, 2).bfloat16(),
        "count": torch.tensor([1, 2, 3]),
        "b": torch.randn(3, 3).T,
    }


def test_written_tensors_come_back_bit_for_bit_whole_or_in_place(tmp_path):
    write_tensors(tmp_path / "x", some())
    back, place = read_tensors(tmp_path / "x"), {n: torch.zeros_like(t) for n, t in some().items()}
    read_tensors(tmp_path / "x", place)
    for name, tensor in some().items():
        assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype
        assert torch.equal(place[name], tensor)


def test_large_sets_are_cut_into_files_that_are_all_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp, "FILE_BYTES", 100)
    write_tensors(tmp_path, some())
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 and all(f.suffix == ".safetensors" for f in files)
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert len(list(file.keys())) > 0
    assert torch.equal(read_tensors(tmp_path)["b"], some()["b"])


def test_nothing_but_tensors_is_written(tmp_path):
    with pytest.raises(TypeError, match="belongs into state"):
        write_tensors(tmp_path / "x", {"a": torch.ones(1), "n": 3})
    assert not (tmp_path / "x").exists()


def test_another_models_tensors_are_refused_by_name(tmp_path):
    write_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(UserError, match="tensor b is too many"):
        read_tensors(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(UserError, match="tensor c is missing"):
        read_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)})
    with pytest.raises(UserError, match=r"tensor b .* is \[3\], not \[4\]"):
        read_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(4)})
