"""Files from outside: read as torch reads them, or refused in one sentence; nothing in them is ever executed."""

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from tokenformer.errors import UserError
from tokenformer.hub import unpickle

DATA = Path(__file__).parents[1] / "data"
BIN = DATA / "golden" / "l2_norm_gelu" / "pytorch_model.bin"
SHARD = DATA / "zero" / "world2" / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
STATES = DATA / "zero" / "world2" / "global_step2" / "mp_rank_00_model_states.pt"


class Storage:
    """A storage as torch's pickles name it."""

    def __init__(self, key: str = "0", count: int = 6, dtype: object = torch.FloatStorage, kind: str = "storage"):
        self.name = (kind, dtype, key, "cpu", count)


class View:
    """A tensor as torch pickles it, with any numbers."""

    def __init__(self, offset, size, stride, storage=None):
        self.arguments = (storage or Storage(), offset, size, stride, False, OrderedDict())

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.arguments


class TorchPickler(pickle.Pickler):
    def persistent_id(self, thing):
        return thing.name if isinstance(thing, Storage) else None


def pickled(thing: object) -> bytes:
    buffer = io.BytesIO()
    TorchPickler(buffer, protocol=2).dump(thing)
    return buffer.getvalue()


def archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    """A file as torch.save lays it out, around a pickle of our choice."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in (
            {"byteorder": b"little", "data/0": torch.arange(6.0).numpy().tobytes()} | members
        ).items():
            file.writestr(f"archive/{name}", content)
    return path


def survives(path: Path, foreign: str) -> bool:
    """Whether the file was read; anything but a result or a UserError fails the test that calls this."""
    try:
        unpickle.read(path, foreign)
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("theta", ["l2_norm_gelu", "gelu_l2_norm", "softmax"])
def test_an_official_file_is_read_as_torch_reads_it(theta):
    path = DATA / "golden" / theta / "pytorch_model.bin"
    ours, theirs = unpickle.read(path), torch.load(path, weights_only=True)
    assert type(ours) is type(theirs) and list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].stride() == tensor.stride()
        assert torch.equal(ours[name], tensor)
    assert len({tensor.untyped_storage().data_ptr() for tensor in ours.values()}) == 2  # flat storages stay shared


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_known_thing_comes_back(tmp_path, protocol):
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    types += [torch.int8, torch.uint8, torch.bool]
    saved = {
        "types": [torch.arange(7).to(dtype) for dtype in types],
        "shapes": [torch.zeros(()), torch.zeros(0, 3), torch.arange(12.0).reshape(3, 4).t()[1:], torch.empty(0)],
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "plain": (1, -(2**70), 1.5, None, True, "ä", b"bytes" if protocol > 2 else "text", [], {}, {1}, frozenset({2})),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
    }
    torch.save(saved, tmp_path / "all.pt", pickle_protocol=protocol)
    found = unpickle.read(tmp_path / "all.pt")
    for key in ("types", "shapes"):
        for ours, theirs in zip(found[key], saved[key], strict=True):
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
            assert torch.equal(ours, theirs)
    assert type(found["parameter"]) is torch.Tensor and torch.equal(found["parameter"], saved["parameter"])
    assert [found[key] for key in ("plain", "size", "dtype")] == [saved[key] for key in ("plain", "size", "dtype")]


def test_a_state_dict_with_metadata_is_read(tmp_path):
    torch.save(torch.nn.LayerNorm(3).state_dict(), tmp_path / "norm.pt")  # its `_metadata` attribute is dropped
    assert {name: value.tolist() for name, value in unpickle.read(tmp_path / "norm.pt").items()} == {
        "weight": [1, 1, 1],
        "bias": [0, 0, 0],
    }


def test_changing_a_tensor_leaves_the_file_as_it_is(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(torch.ones(1000), path)
    before = path.read_bytes()
    tensor = unpickle.read(path).add_(1)
    assert path.read_bytes() == before
    path.unlink()
    assert tensor.sum() == 2000


@pytest.mark.parametrize("path", [SHARD, STATES], ids=["shard", "model"])
def test_classes_of_deepspeed_and_numpy_are_refused_or_inert(path):
    with pytest.raises(UserError, match=r"deepspeed\.|numpy\."):
        unpickle.read(path)
    content = unpickle.read(path, foreign="ignore")
    inert = [content["optimizer_state_dict"]["loss_scaler"]] if path == SHARD else [content["np_rng_state"][1]]
    assert all(type(thing) is unpickle.Foreign and vars(thing).keys() == {"name"} for thing in inert)


@pytest.mark.parametrize("path", [BIN, SHARD], ids=["bin", "shard"])
def test_a_file_cut_anywhere_is_refused(path, tmp_path):
    content = path.read_bytes()
    cuts = {0, 1, 3, 4, 29, 30, 64, len(content) - 1, len(content) - 22, len(content) - 23}
    for cut in cuts | set(range(0, len(content), len(content) // 80)):
        (tmp_path / "cut").write_bytes(content[:cut])
        assert not survives(tmp_path / "cut", "ignore"), cut


@pytest.mark.parametrize("path", [BIN, SHARD], ids=["bin", "shard"])
def test_a_changed_byte_is_noticed_or_harmless(path, tmp_path):
    content, dice = path.read_bytes(), random.Random(1)
    directory = content.rindex(b"PK\1\2")  # half of the changes near the end, where the zip's directory is
    read = 0
    for turn in range(200):
        changed = bytearray(content)
        changed[dice.randrange(len(content)) if turn % 2 else dice.randrange(directory - 3000, len(content))] = (
            dice.randrange(256)
        )
        (tmp_path / "changed").write_bytes(changed)
        read += survives(tmp_path / "changed", "ignore")
    assert 0 < read < 200  # some bytes are between the parts; those inside have checksums


@pytest.mark.parametrize(("path", "foreign"), [(BIN, "refuse"), (BIN, "ignore"), (SHARD, "ignore"), (STATES, "ignore")])
def test_a_changed_pickle_with_right_checksums_never_breaks_out(path, foreign, tmp_path):
    with zipfile.ZipFile(path) as file:
        members = {name.split("/", 1)[1]: file.read(name) for name in file.namelist()}
    data, dice = members.pop("data.pkl"), random.Random(2)
    read = 0
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(dice.choice([1, 1, 1, 8])):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        read += survives(archive(tmp_path / "changed", bytes(changed), **members), foreign)
    assert 0 < read < 150


TOUCH = b"touch marker"
ATTACKS = {
    "reduce": b"cposix\nsystem\n(X\x0c\0\0\0" + TOUCH + b"tR.",
    "newobj": b"\x80\x02cposix\nsystem\nX\x0c\0\0\0" + TOUCH + b"\x85\x81.",
    "newobj_ex": b"\x80\x04cposix\nsystem\nX\x0c\0\0\0" + TOUCH + b"\x85}\x92.",
    "stack_global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0c" + TOUCH + b"\x85R.",
    "inst": b"(S'" + TOUCH + b"'\niposix\nsystem\n.",
    "obj": b"(cposix\nsystem\nS'" + TOUCH + b"'\no.",
    "dotted": b"\x80\x04\x8c\x05torch\x8c\x10_utils.os.system\x93\x8c\x0c" + TOUCH + b"\x85R.",
    "exec": b'cbuiltins\nexec\n(S\'open("marker", "w")\'\ntR.',
    "getattr": b"cbuiltins\ngetattr\n(cposix\nsystem\nS'__call__'\ntR(S'" + TOUCH + b"'\ntR.",
    "inside": b"}S'weight'\ncposix\nsystem\n(S'" + TOUCH + b"'\ntRs.",
    "state": b"cposix\nsystem\n)\x81(S'" + TOUCH + b"'\ntb.",
}


@pytest.mark.parametrize("foreign", ["refuse", "ignore"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_malicious_pickle_does_nothing(attack, foreign, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    survives(archive(tmp_path / "evil.bin", ATTACKS[attack]), foreign)
    assert not Path("marker").exists()
    if foreign == "refuse" and attack not in ("inst", "obj", "newobj_ex"):
        with pytest.raises(UserError, match=r"posix\.system|os\.system|builtins\.(exec|getattr)"):
            unpickle.read(tmp_path / "evil.bin")


def test_the_attacks_would_work_on_plain_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for attack in ("reduce", "stack_global", "inst", "obj", "exec", "inside"):
        pickle.loads(ATTACKS[attack])
        os.remove("marker")  # was there


def test_a_pickle_cannot_change_our_functions(tmp_path):
    state = b"N}S'__defaults__'\n(I1\nI2\nts\x86"  # pickle would set what is in the second half
    attack = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + state + b"b."
    assert survives(archive(tmp_path / "evil.bin", attack), "refuse")
    assert unpickle._view.__defaults__ is None


def test_huge_numbers_cost_no_memory(tmp_path):
    assert unpickle.read(archive(tmp_path / "memo.bin", b"\x80\x02Nr\xff\xff\xff\xff.")) is None
    assert not survives(archive(tmp_path / "bytes.bin", b"\x80\x05\x96\0\0\0\0\xff\0\0\0."), "ignore")


VIEWS = {
    "beyond": View(0, (7,), (1,)),
    "offset": View(4, (3,), (1,)),
    "far offset": View(2**62, (1,), (1,)),
    "stride": View(0, (2, 2), (5, 1)),
    "huge stride": View(0, (2,), (2**63,)),
    "negative offset": View(-1, (2,), (1,)),
    "negative stride": View(5, (2,), (-1,)),
    "negative size": View(0, (-1,), (1,)),
    "expanded": View(0, (10**12,), (0,)),
    "huge and empty": View(0, (0, 2**70), (1, 1)),
    "lengths": View(0, (2, 3), (1,)),
    "fraction": View(0, (2.0,), (1,)),
    "truth": View(False, (2,), (1,)),
    "text": View(0, "12", "11"),
    "no storage": View(0, (2,), (1,), storage=[1.0, 2.0]),
    "short storage": View(0, (2,), (1,), Storage(count=7)),
    "negative storage": View(0, (2,), (1,), Storage(count=-6)),
    "wrong type": View(0, (2,), (1,), Storage(dtype=torch.DoubleStorage)),
    "no type": View(0, (2,), (1,), Storage(dtype=OrderedDict)),
    "absent storage": View(0, (2,), (1,), Storage(key="1")),
    "other member": View(0, (2,), (1,), Storage(key="../data.pkl")),
    "other kind": View(0, (2,), (1,), Storage(kind="module")),
}


def test_the_hand_made_tensor_is_right_when_its_numbers_are(tmp_path):
    view = unpickle.read(archive(tmp_path / "view.pt", pickled(View(1, (2, 2), (3, 1)))))
    assert view.tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize("view", VIEWS)
def test_a_tensor_outside_its_storage_is_refused(view, tmp_path):
    path = archive(tmp_path / "view.pt", pickled({"weight": VIEWS[view]}))
    by_us = view in ("beyond", "offset", "far offset", "stride", "huge stride", "expanded")
    with pytest.raises(UserError, match=r"view\.pt .*outside its storage" if by_us else r"view\.pt"):
        unpickle.read(path)


def test_other_files_are_refused_with_a_cure(tmp_path):
    def refused(path: Path, words: str) -> None:
        with pytest.raises(UserError, match=words):
            unpickle.read(path)

    torch.save(torch.ones(2), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "legacy.pt", "torch.save it again")
    (tmp_path / "text.pt").write_text("version https://git-lfs.github.com/spec/v1")
    refused(tmp_path / "text.pt", "not a torch file")
    refused(tmp_path / "absent.pt", "No such file")
    refused(tmp_path, "directory")
    refused(archive(tmp_path / "big.pt", pickled(View(0, (6,), (1,))), byteorder=b"big"), "big-endian")
    refused(archive(tmp_path / "deflated.pt", pickled([]), zipfile.ZIP_DEFLATED), "compressed")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("archive/readme", "")
    refused(tmp_path / "other.zip", "not one of torch.save")
    content = bytearray(BIN.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "bit.bin").write_bytes(content)
    refused(tmp_path / "bit.bin", "checksum")
