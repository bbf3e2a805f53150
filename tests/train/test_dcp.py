"""DCP's safetensors folders: exact, split into files, complete or refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tokenformer.errors import UserError
from tokenformer.files import sha256
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


def rewritten(shard: Path, change) -> None:
    """The shard with another header."""
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    "harm",
    {
        "cut short": lambda shard: shard.write_bytes(shard.read_bytes()[:-4]),
        "no safetensors file": lambda shard: shard.write_bytes(b"\xff" * 100),
        "empty": lambda shard: shard.write_bytes(b""),
        "places that are no JSON": lambda shard: rewritten(
            shard, lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="{")
        ),
        "places without this tensor": lambda shard: rewritten(
            shard, lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="{}")
        ),
        "another name": lambda shard: rewritten(shard, lambda header: header.update(other=header.pop("count"))),
        "another shape": lambda shard: rewritten(shard, lambda header: header["a.weight"].update(shape=[7, 5])),
        "one dimension more": lambda shard: rewritten(shard, lambda header: header["a.weight"]["shape"].append(1)),
    }.items(),
    ids=lambda harm: harm[0],
)
def test_a_shard_that_is_not_as_we_wrote_it_is_one_sentence(tmp_path, harm):
    write_tensors(tmp_path, some())
    (shard,) = tmp_path.glob("*.safetensors")
    harm[1](shard)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))) as found:
        read_tensors(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in some().items()})
    assert "\n" not in str(found.value)


def test_equal_tensors_give_equal_files_and_the_entries_are_theirs(tmp_path):
    entries = [write_tensors(tmp_path / name, some()) for name in "ab"]
    assert entries[0] == entries[1]
    for name, entry in entries[0].items():
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert entry == {"bytes": (tmp_path / "a" / name).stat().st_size, "sha256": sha256(tmp_path / "a" / name)}
