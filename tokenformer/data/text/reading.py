"""From streams to documents: text (with separators), JSON lines, Parquet.

Unusual: a document comes as one or more units, fragments small enough to be encoded by themselves; a plain text of any
length is never held whole (except with `on_error="skip"`, which must see the end of a document before it accepts it).
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple

from tokenformer.data.parquet import open_parquet, rows
from tokenformer.data.text.cutting import FRAGMENT, cut_near, fragments
from tokenformer.data.text.inputs import DAMAGE, Input, open_input, seekable
from tokenformer.errors import UserError

LONGEST_LINE = 1 << 27
ZEROS = 4096  # so many bytes of 0 in a row are a page that was set aside and never written
Format = Literal["text", "jsonl", "parquet"]
_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Reading:
    """How inputs become documents."""

    format: Format | None = None  # None: by the ending of the name, else text
    field: str = "text"
    separator: str | None = None  # text: what stands between two documents and belongs to none
    before: str | None = None  # text: a line that begins a document and belongs to it
    heading: str | None = None  # rows: a pattern that begins a document; rows up to the next one are joined to it
    on_error: Literal["stop", "skip"] = "stop"
    can_skip: bool = True  # whether the user can choose on_error, so that a refusal may name it


class Unit(NamedTuple):
    """A document or a fragment of one. `left_out` says that a document is not used (then `text` says why)."""

    text: str
    last: bool = True
    left_out: Literal["", "empty", "skipped"] = ""


def read_units(
    given: Input,
    how: Reading,
    cuts: re.Pattern | None = None,
    seen: Callable[[int], object] = lambda count: None,
) -> Iterator[Unit]:
    """Yield the units of an input, in order and always the same."""
    try:
        for stream, inner in open_input(given, seen):
            name = given.name if inner in ("", given.path, given.member) else f"{given.path}: {inner}"
            kind = how.format or _FORMATS.get(os.path.splitext(inner)[1], "text")
            if how.separator and kind != "text":
                raise UserError(f"{inner} is {kind}, whose documents are its rows: leave --separator out")
            if kind == "text":
                yield from _text(stream, how, cuts, name)
            else:
                rows = _json_rows(stream, how, name) if kind == "jsonl" else _parquet_rows(stream, how, name)
                yield from _rows(_joined(rows, how.heading) if how.heading else rows, how, cuts)
    except DAMAGE as error:
        raise UserError(f"{given.name} is damaged or cut off ({error}): get it anew") from None
    except OSError as error:
        raise UserError(f"{given.name} cannot be read ({error}): check it, or get it anew") from None


Rows = Iterator[tuple[str, str | UserError]]  # where a row stands, and its text or why it cannot be used


def _document(text: str, where: str, how: Reading, cuts: re.Pattern | None) -> Iterator[Unit]:
    if not text:
        yield Unit("", left_out="empty")
        return
    try:
        text.encode()
        *first, last = fragments(text, cuts, where)
    except UnicodeEncodeError:
        yield _left_out(f"{where} is not valid Unicode: convert it to UTF-8", how)
    except UserError as error:
        yield _left_out(str(error), how)
    else:
        yield from (Unit(part, last=False) for part in first)
        yield Unit(last)


def _left_out(sentence: str, how: Reading) -> Unit:
    if how.on_error == "stop":
        raise _refusal(sentence, how)
    return Unit(sentence, left_out="skipped")


def _refusal(sentence: str, how: Reading) -> UserError:
    return UserError(sentence + (", or leave such documents out (--on-error skip)" if how.can_skip else ""))


def _rows(rows: Rows, how: Reading, cuts: re.Pattern | None) -> Iterator[Unit]:
    for where, text in rows:
        if isinstance(text, UserError):
            yield _left_out(str(text), how)
        else:
            yield from _document(text, where, how, cuts)


def _joined(rows: Rows, heading: str) -> Rows:
    """Join the rows from one heading up to the next."""
    pattern, parts, begin = re.compile(heading), [], ""
    for where, text in rows:
        if isinstance(text, UserError):
            yield where, text
            continue
        if pattern.fullmatch(text) and parts:
            yield begin, "".join(parts)
            parts = []
        begin = begin if parts else where
        parts.append(text)
    if parts:
        yield begin, "".join(parts)


def _json_rows(stream: BinaryIO, how: Reading, name: str) -> Rows:
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        where = f"{name}, line {number},"
        if len(line) == LONGEST_LINE:
            raise UserError(f"{where} is longer than {LONGEST_LINE >> 20} MB: is it JSON lines?")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.isspace():
            continue
        try:
            text = line.decode()
            line = b""  # a line may be large: hold it once
            row = json.loads(text)
            text = ""
        except UnicodeDecodeError as error:
            yield where, UserError(f"{where} is not UTF-8 (byte {error.start}): convert it")
        except (ValueError, RecursionError) as error:
            yield where, UserError(f"{where} is not JSON ({error}): mend it")
        else:
            given = isinstance(row, dict) and how.field in row
            wrong = f"a field '{how.field}' that is not text" if given else f"no field '{how.field}'"
            bad = UserError(f"{where} has {wrong}: name the right one with --field")
            yield where, row[how.field] if given and isinstance(row[how.field], str) else bad


def _parquet_rows(stream: BinaryIO, how: Reading, name: str) -> Rows:
    with open_parquet(seekable(stream), name) as table:
        names = table.schema_arrow.names
        if how.field not in names:
            raise UserError(f"{name} has no column '{how.field}': name the right one with --field ({', '.join(names)})")
        for number, (text,) in enumerate(rows(table, [how.field]), 1):
            where = f"{name}, row {number},"
            bad = UserError(f"{where} has no text in '{how.field}': name the right column with --field")
            yield where, text if isinstance(text, str) else bad


def _text(stream: BinaryIO, how: Reading, cuts: re.Pattern | None, name: str) -> Iterator[Unit]:
    """Decode blocks as they come; what is known to belong to the open document is yielded as fragments."""
    skipping = how.on_error == "skip"
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if skipping else "strict")
    mark = f"\n{how.before}\n" if how.before else how.separator
    # with `separator` the mark itself is dropped, with `before` its first newline ends the old document
    ends, begins = (1, 1) if how.before else (0, len(mark or ""))
    crlf = mark.replace("\n", "\r\n") if how.separator and mark and "\r" not in mark else ""  # as Windows writes it
    seen = False
    text, searched, number, opened, fed, final = "", 0, 1, False, 0, False
    while not final:
        block = stream.read(1 << 20)
        final = not block
        pending = len(decoder.getstate()[0])
        if (zeros := block.find(bytes(ZEROS))) >= 0:
            raise UserError(f"{name} holds zeros instead of text from byte {fed + zeros:,}: get it anew")
        try:
            more = decoder.decode(block, final)
        except UnicodeDecodeError as error:
            place = fed - pending + error.start
            raise _refusal(f"{name} is not UTF-8 (byte {place:,}): convert it", how) from None
        fresh = max(0, len(text) - len(crlf) + 1)
        text += more.removeprefix("\ufeff") if fed == 0 else more
        fed += len(block)
        seen = seen or (number == 1 and crlf not in ("", mark) and crlf in text[fresh:])
        start = 0
        while mark and (at := text.find(mark, searched)) >= 0:
            if seen and number == 1 and text.startswith(crlf, at - 1):  # \n is found in \r\n, too
                raise _other_line_ends(name, mark, crlf)
            yield from _close(text[start : at + ends], opened, f"{name}, document {number},", how, cuts)
            start = searched = at + begins
            opened, number = False, number + 1
        searched = max(start, len(text) - len(mark or "") + 1)  # behind it a mark may have begun
        if not skipping and cuts is not None and not final:
            where = f"{name}, document {number}," if mark else name
            try:
                while len(text) - start > 2 * FRAGMENT and (stop := cut_near(text, cuts, start, where, searched)):
                    yield Unit(text[start:stop], last=False)
                    start, opened = stop, True
            except UserError as error:
                raise _refusal(str(error), how) from None
        text, searched = text[start:], searched - start
    if seen and number == 1:
        raise _other_line_ends(name, mark, crlf)
    if text or opened or number == 1:  # nothing after the last separator is no document
        yield from _close(text, opened, f"{name}, document {number}," if mark else name, how, cuts)


def _other_line_ends(name: str, mark: str | None, crlf: str) -> UserError:
    differ = f"{name} has the line ends of Windows (\\r\\n), but the separator {mark!r} has others"
    return UserError(f"{differ}: convert the file, or give --separator {crlf!r}")


def _close(text: str, opened: bool, where: str, how: Reading, cuts: re.Pattern | None) -> Iterator[Unit]:
    if opened and not text:
        yield Unit("", last=True)
    else:
        yield from _document(text, where, how, cuts)
