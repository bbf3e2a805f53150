"""Sets known by name: where their archives are, and how their text becomes documents."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenformer.data.text.inputs import Input, find_inputs, open_input, take_shard
from tokenformer.data.text.reading import Reading
from tokenformer.errors import UserError
from tokenformer.files import download

_HUB = "https://huggingface.co/datasets"
_PILE = f"{_HUB}/monology/pile-uncopyrighted/resolve/main/train/{{:02d}}.jsonl.zst"
_WIKITEXT = f"{_HUB}/Salesforce/wikitext/resolve/main/wikitext-103-raw-v1/train-{{:05d}}-of-00002.parquet"


@dataclass(frozen=True)
class NamedSet:
    """Archives of a set, and how to read them."""

    urls: tuple[str, ...]
    reading: Reading = Reading()
    md5: str = ""  # of the unpacked text of the one archive, where it is published


SETS = {
    # documents joined are the file: each begins with its <page> line
    "enwik8": NamedSet(
        ("http://mattmahoney.net/dc/enwik8.zip",), Reading(before="  <page>"), "a1fa5ffddb56f4953e226637dabbb36a"
    ),
    "openwebtext2": NamedSet((f"{_HUB}/segyges/OpenWebText2/resolve/main/openwebtext2.jsonl.zst.tar",)),
    "pile": NamedSet(tuple(_PILE.format(i) for i in range(30))),
    "pile_subset": NamedSet((_PILE.format(0),)),
    # rows are lines; an article begins with its title, " = Title = "
    "wikitext": NamedSet(tuple(_WIKITEXT.format(i) for i in range(2)), Reading(heading=r" = [^=]+ = \n?")),
}


def fetch(name: str, folder: str | Path, shard: tuple[int, int] | None = None) -> list[Input]:
    """Return the inputs of a set, or of a shard of it. Download what is missing, and compare the published checksum."""
    known, folder = SETS[name], Path(folder) / name
    many = len(known.urls) > 1  # then a shard fetches its own archives alone
    paths = []
    for url in take_shard(known.urls, shard if many else None):
        path = folder / url.rsplit("/", 1)[1]
        fresh = not path.is_file()
        paths.append(download(url, path))
        if known.md5 and fresh and text_md5(path) != known.md5:
            path.unlink()
            raise UserError(f"what came from {url} is not {name} (its checksum differs): start again to fetch it anew")
    return take_shard(find_inputs(paths), None if many else shard)


def text_md5(path: str | Path) -> str:
    """Return the md5 of the unpacked contents of an archive."""
    digest = hashlib.md5(usedforsecurity=False)
    for one in find_inputs([path]):
        for stream, _ in open_input(one):
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def resolve(inputs: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the name of a set, if one stands first, and what to read: local copies of it, or any inputs.

    >>> resolve(["enwik8", "my/enwik8.xz"]), resolve(["my/text.txt"])
    (('enwik8', ['my/enwik8.xz']), (None, ['my/text.txt']))
    """
    first, *rest = inputs
    if first not in SETS:
        return None, list(inputs)
    return first, rest or [first] * Path(first).exists()  # a file of that name is a copy of the set
