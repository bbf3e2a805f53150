"""Unpacks streams of .gz, .xz, .bz2 and .zst.

Unusual: the libraries' own readers take a damaged frame (or stream, as xz and bzip2 call it) behind a good one for the
end of the file, which loses text without a word, and read zeros behind the last one for as long as there are any. Here
both are refused.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from tokenformer.errors import UserError

ZEROS = 1 << 20  # the most that may follow a frame; tapes and xz pad files with them
_MAKE: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(31),
    ".xz": lzma.LZMADecompressor,
    ".bz2": bz2.BZ2Decompressor,
    ".zst": lambda: _zstandard().ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
}
ENDINGS = tuple(_MAKE)
DAMAGE = (EOFError, zlib.error, lzma.LZMAError)  # bz2 raises OSError


def decompress(stream: BinaryIO, ending: str) -> BinaryIO:
    """Return a stream of what `stream` holds, unpacked; what is wrong with it raises one of DAMAGE or OSError.

    >>> import gzip
    >>> decompress(io.BytesIO(gzip.compress(b"one, ") + gzip.compress(b"two")), ".gz").read()
    b'one, two'
    """
    return io.BufferedReader(_Frames(stream, ending), 1 << 20)  # type: ignore[return-value]


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UserError("files that end in .zst need zstandard: pip install 'tokenformer[data]'") from None
    return zstandard


class _Frames(io.RawIOBase):
    def __init__(self, stream: BinaryIO, ending: str) -> None:
        self._stream, self._make = stream, _MAKE[ending]
        self._bounded = ending != ".zst"  # whose library unpacks all that it is given at once
        self._frame: Any = self._make()
        self._packed, self._out, self._zeros = b"", memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._out:
            if self._frame is None and not self._begin():
                return 0
            hungry = getattr(self._frame, "needs_input", True)
            packed = self._packed or (self._read() if hungry else b"")
            if not packed and hungry:
                raise EOFError("its end is missing")
            self._out = memoryview(self._unpack(packed, len(buffer)))
            self._packed = getattr(self._frame, "unconsumed_tail", b"")
            if self._frame.eof:
                self._packed, self._frame, self._zeros = self._frame.unused_data, None, 0
        count = min(len(buffer), len(self._out))
        buffer[:count], self._out = self._out[:count], self._out[count:]
        return count

    def _read(self) -> bytes:
        return self._stream.read(1 << (17 if self._bounded else 12))

    def _unpack(self, packed: bytes, most: int) -> bytes:
        if self._bounded:
            return self._frame.decompress(packed, most)
        try:
            return self._frame.decompress(packed)
        except _zstandard().ZstdError as error:
            raise EOFError(str(error)) from None

    def _begin(self) -> bool:
        """Begin the frame that follows; False at the end of the file."""
        while packed := self._packed or self._read():
            self._packed = packed.lstrip(b"\0")
            self._zeros += len(packed) - len(self._packed)
            if self._zeros > ZEROS:
                raise EOFError("zeros follow its end")
            if self._packed:
                self._frame = self._make()
                return True
        return False
