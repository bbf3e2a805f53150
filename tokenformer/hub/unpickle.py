"""Reads pickled torch files from outside without executing anything of them: tensors and plain containers only.

Unusual: it is the pickle module's machine in Python (five bytes can make the one in C fill 64 GB); files are mapped.
"""

import io
import math
import mmap
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from tokenformer.errors import UserError


def read(path: str | Path, foreign: Literal["refuse", "ignore"] = "refuse") -> Any:
    """Return what `torch.save` wrote to `path`; tensors are plain ones, and views of one storage stay so.

    What is neither a tensor nor a plain container is refused, or with `foreign="ignore"` becomes an inert `Foreign`.

    >>> import tempfile
    >>> file = tempfile.NamedTemporaryFile()
    >>> torch.save({"step": 3, "weight": torch.ones(2)}, file.name)
    >>> read(file.name)
    {'step': 3, 'weight': tensor([1., 1.])}
    """
    try:
        with open(path, "rb") as file:
            start = file.read(2)
            if start[:1] == b"\x80":  # a bare pickle, as torch wrote before 1.6
                raise UserError("is in torch's old format; if you trust it, torch.load it and torch.save it again")
            if start != b"PK":
                raise UserError("is not a torch file; check that it is the right one and download it again")
            return _Archive(file, foreign).load()
    except UserError as error:  # raised without the path, here and below
        raise UserError(f"{path} {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check the path") from None
    except Exception as error:  # what a damaged zip or pickle can raise has no bound
        raise UserError(f"{path} is cut off or damaged ({type(error).__name__}); download or copy it again") from error


def _view(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Stand in for torch._utils._rebuild_tensor_v2, without gradients and hooks."""
    if not isinstance(storage, torch.Tensor) or any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
        raise UserError("describes a tensor as torch never does; do not use it")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # More elements than the storage has (an expanded view) would let a small file claim any amount of memory.
    if math.prod(size) > storage.numel() or (0 not in size and last >= storage.numel()):
        raise UserError(f"has a tensor of shape {tuple(size)} that reaches outside its storage; download it again")
    return torch.as_strided(storage, tuple(size), tuple(stride), offset)


class Foreign:
    """Stands for a class or function that a file names: never imported, called or filled; only its name is kept."""

    def __init__(self, name: str) -> None:
        self.name = name

    def append(self, *_: object) -> None:
        """Drop the items that the file adds."""

    extend = add = __setitem__ = append


_TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_CALLS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    **{f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
}
_GLOBALS = _CALLS | {f"torch.{name}": getattr(torch, name) for name in _TYPES}
_GLOBALS |= {f"torch.{kind}Storage": getattr(torch, name) for kind, name in zip(_STORAGES, _TYPES, strict=True)}
# What torch.save never writes; the last one allocates before it reads.
_UNUSED = {pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.PERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4}
_UNUSED |= {pickle.BYTEARRAY8}


# Which items of the stack become keys or members, that is, are hashed.
_HASHED = {pickle.SETITEM: slice(-2, -1), pickle.SETITEMS: slice(0, None, 2), pickle.DICT: slice(0, None, 2)}
_HASHED |= {pickle.ADDITEMS: slice(None), pickle.FROZENSET: slice(None)}


def _check_keys(keys: Iterable[Any]) -> None:
    """Refuse keys that take for ever, or all of the stack, to hash: weights need texts and numbers alone."""
    for key in keys:
        for part in key if type(key) is tuple else (key,):
            if not isinstance(part, str | bytes | int | float | None | torch.dtype | Foreign):
                raise UserError(f"has a {type(part).__name__} as a key, which no weights need; do not use it")


def _hashing(code: int, where: slice) -> Callable[[Any], None]:
    def load(self: Any) -> None:
        _check_keys(self.stack[where])
        pickle._Unpickler.dispatch[code](self)

    return load


class _Archive(pickle._Unpickler):
    """A torch zip file: pickle's machine with the few calls above, and the zip's members as storages."""

    stack: list[Any]

    def __init__(self, file: io.BufferedReader, foreign: str) -> None:
        self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, and writes never reach the file
        self.members = {info.filename: info for info in zipfile.ZipFile(file).infolist()}
        pickles = [name for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UserError("is a zip file but not one of torch.save; check that it is the right one")
        self.root = pickles[0].removesuffix("data.pkl")
        if f"{self.root}byteorder" in self.members and self.map[slice(*self.span("byteorder"))] != b"little":
            raise UserError("was written on a big-endian machine; save it again on a little-endian one")
        self.foreign, self.storages = foreign, {}
        super().__init__(io.BytesIO(self.map[slice(*self.span("data.pkl"))]))

    def span(self, name: str) -> tuple[int, int]:
        """Return where a member begins and ends in the file, after verifying its checksum."""
        info = self.members[self.root + name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise UserError("is compressed or encrypted inside, as torch.save never does; torch.save it again")
        signature, names, extra = struct.unpack_from("<4s22xHH", self.map, info.header_offset)
        end = (start := info.header_offset + 30 + names + extra) + info.file_size
        with memoryview(self.map) as whole, whole[start:end] as part:
            if signature != b"PK\3\4" or len(part) != info.file_size or zlib.crc32(part) != info.CRC:
                raise UserError(f"is damaged ({name!r}: length or checksum differs); download or copy it again")
        return start, end

    def persistent_load(self, pid: Any) -> torch.Tensor:
        kind, dtype, key, _, count = pid  # a storage's class stands for its type, see _GLOBALS
        known = kind == "storage" and isinstance(key, str)
        if not known or not isinstance(dtype, torch.dtype) or type(count) is not int:
            raise UserError("has a storage of a kind that is not known here; save it again as safetensors")
        if (key, dtype, count) not in self.storages:
            start, end = self.span(f"data/{key}")
            if end - start != count * dtype.itemsize:
                raise UserError(f"has {end - start} bytes where {count} of {dtype} should be; download it again")
            flat = torch.frombuffer(self.map, dtype=dtype, count=count, offset=start) if count else torch.empty(0)
            self.storages[key, dtype, count] = flat.clone() if start % dtype.itemsize else flat.to(dtype)
        return self.storages[key, dtype, count]

    def find_class(self, module: str, name: str) -> Any:
        if (full := f"{module}.{name}") not in _GLOBALS and self.foreign == "refuse":
            raise UserError(f"asks for {full[:99]!r}, which no tensor needs, and is refused; get it as safetensors")
        return _GLOBALS[full] if full in _GLOBALS else Foreign(full)

    def load_call(self) -> None:
        """REDUCE and NEWOBJ: the stack ends in what to call and its arguments."""
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, Foreign) and not any(called is known for known in _CALLS.values()):
            raise UserError("calls what is not a function; do not use it")
        if called in (set, frozenset, OrderedDict):
            _check_keys(item for items in arguments for item in items)
        self.stack.append(called if isinstance(called, Foreign) else called(*arguments))

    def load_build(self) -> None:
        """BUILD sets attributes, and would do so on our own functions too; weights need none, so they are dropped."""
        self.stack.pop()

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _UNUSED},
        **{pickle.REDUCE[0]: load_call, pickle.NEWOBJ[0]: load_call, pickle.BUILD[0]: load_build},
        **{code[0]: _hashing(code[0], where) for code, where in _HASHED.items()},
    }
