"""Packed streams are read whole or refused, whatever stands behind their first frame."""

import bz2
import gzip
import io
import lzma
import tracemalloc

import pytest
import zstandard

from tests.fuzz import sandbox
from tokenformer.cli.main import main
from tokenformer.data.compressed import DAMAGE, ENDINGS, decompress

PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}
every_ending = pytest.mark.parametrize("ending", ENDINGS)
TEXT = b"Alice was beginning to get very tired\n" * 500


def unpacked(packed: bytes, ending: str) -> bytes:
    return decompress(io.BytesIO(packed), ending).read()


@every_ending
def test_frames_follow_each_other_with_zeros_between_and_behind_them(ending):
    pack = PACK[ending]
    assert unpacked(pack(TEXT) + bytes(4) + pack(b"") + pack(b"end") + bytes(512), ending) == TEXT + b"end"


@every_ending
@pytest.mark.parametrize("damage", ["second frame damaged", "words behind it", "cut off", "second cut off", "empty"])
def test_what_is_not_whole_is_refused(ending, damage):
    """The libraries' own readers of .xz and .bz2 return the first frame alone, without a word."""
    one, other = PACK[ending](TEXT), PACK[ending](b"end")
    packed = {
        "second frame damaged": one + b"X" + other[1:],
        "words behind it": one + b"words",
        "cut off": one[:-1],
        "second cut off": one + other[:-1],
        "empty": b"",
    }[damage]
    with pytest.raises((*DAMAGE, OSError)):
        unpacked(packed, ending)


@pytest.mark.parametrize(("ending", "size", "most"), [  # of .zst 4 kB are unpacked at once, of .xz there is a window
    (".gz", 60, 5), (".xz", 60, 20), (".bz2", 60, 5), (".zst", 600, 150),
])  # fmt: skip
def test_a_bomb_takes_little_memory(ending, size, most):
    stream = decompress(io.BytesIO(PACK[ending](bytes(size * 10**6))), ending)
    tracemalloc.start()
    try:
        assert stream.read(10) == bytes(10)
        assert tracemalloc.get_traced_memory()[1] < most * 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ending", ["", *ENDINGS])
def test_a_text_with_a_hole_of_a_terabyte_is_refused_at_once(tmp_path, ending):
    words = ["prepare", "--out", "out", "--tokenizer", "byte", "--workers", "1"]
    folder = tmp_path / "in"
    folder.mkdir()
    with open(folder / f"a.txt{ending}", "wb") as file:
        file.write(PACK[ending](TEXT) if ending else TEXT)
        file.truncate(10**12)
    ended = sandbox.run(lambda: main([*words, f"a.txt{ending}"]), folder, tmp_path / "said")
    assert ended.how == "exit 2" and "zeros" in ended.err and ended.err.count("\n") == 1, ended
