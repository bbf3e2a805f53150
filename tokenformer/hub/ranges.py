"""Reads parts of files from a folder on a server: a model of the Hugging Face hub, or a plain http(s) address.

Unusual: every broken connection is continued where it broke, so callers see one stream. A server that knows no ranges
answers with the whole file, of which the bytes that nobody asked for are dropped.
"""

import re
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote, unquote, urlsplit

from tokenformer.errors import UserError
from tokenformer.files import MANIFEST
from tokenformer.hub.download import asking
from tokenformer.hub.open import HubName, find_source

TRIES, PAUSE = 5, 1.0  # how often an answer may break without a new byte; the seconds before the next try


class ServerChanged(UserError):
    """What the server holds is not what its manifest says."""


class Server:
    """A folder on a server. `name` is what the folder is called there, `moved` how many bytes came so far."""

    def __init__(self, source: str, name: str, url: Callable[[str], str], token: bool) -> None:
        self.source, self.name, self.url, self.token = source, name, url, token
        self.moved, self.ranges = 0, True

    def read(self, file: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` to `end`; without an `end` all that there are."""
        from huggingface_hub import errors

        at, failures = start, 0
        while end is None or at < end:
            before, why = at, "the answer is empty"
            try:
                for chunk in self._ask(file, at, end):
                    at += len(chunk)
                    yield chunk
                if end is None:
                    return
            except errors.HfHubHTTPError as error:
                status = error.response.status_code
                if status == 416 or (status == 404 and file != MANIFEST):  # 416: the file ends before the range
                    raise self.changed(file) from None
                if status == 404:
                    raise UserError(f"{self.source} has no {file}: {_ONLY}") from None
                do = "check the address, or log in" if status < 500 else "run it again later, what came is kept"
                raise UserError(f"{self.source}: {file} cannot be fetched (HTTP status {status}): {do}") from None
            except errors.OfflineModeIsEnabled:
                raise UserError(f"{self.source} cannot be fetched, since HF_HUB_OFFLINE is set: unset it") from None
            except errors.HTTPError as error:
                why = " ".join(str(error).split())[:200] or type(error).__name__
            failures = failures + 1 if at == before else 0
            if failures > TRIES:
                do = "run it again, what came is kept"
                raise UserError(f"{self.source}: {file} could not be fetched wholly ({why}): {do}")
            time.sleep(PAUSE if failures else 0)

    def _ask(self, file: str, at: int, end: int | None) -> Iterator[bytes]:
        """Yield what one answer brings of these bytes."""
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        headers = build_hf_headers(token=None if self.token else False) | {"Accept-Encoding": "identity"}
        if end is not None or at:  # a file whose size nobody knows is continued, too, where it broke
            headers["Range"] = f"bytes={at}-{'' if end is None else end - 1}"
        more = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "retry_on_exceptions": ()}
        with http_stream_backoff("GET", self.url(file), **more) as response:
            hf_raise_for_status(response)
            whole, where = response.status_code != 206, response.headers.get("Content-Range", "")
            if not whole and not where.startswith(f"bytes {at}-"):
                raise UserError(f"{self.source} sent '{where[:80]}' where byte {at} was asked for: {_OTHER}")
            self.ranges = self.ranges and (not whole or end is None)
            skip = at if whole else 0
            for chunk in response.iter_bytes():
                self.moved += len(chunk)
                skip, chunk = max(0, skip - len(chunk)), chunk[skip:]
                chunk = chunk if end is None else chunk[: end - at]
                at += len(chunk)
                if chunk:
                    yield chunk
                if at == end and (whole or not chunk):  # a range is read to its end, so that its connection is kept
                    return
            if whole and end is not None:
                raise self.changed(file)

    def changed(self, file: str) -> ServerChanged:
        why = "it changed meanwhile, or is damaged"
        do = "run it again; if that does not help, the folder there must be written anew"
        return ServerChanged(f"{self.source}: {file} is not the file that its {MANIFEST} describes ({why}): {do}")

    def text(self, file: str, most: int) -> bytes:
        """Return the content of a file that may have `most` bytes."""
        found = bytearray()
        for chunk in self.read(file):
            found += chunk
            if len(found) > most:
                raise UserError(f"{self.source}: {file} has more than {most:,} bytes, as no such file may: {_OTHER}")
        return bytes(found)


_ONLY = "give the address of a folder that tokenformer wrote, or a hub name of one"
_OTHER = "give another address"


def open_server(source: str) -> Server:
    """Return the folder that an address or a name of the hub means. Of the hub one commit is read, the newest of its
    revision, so that it cannot change meanwhile.
    """
    if re.match(r"https?://", source, re.I):
        return _address(source)
    found = find_source(source)
    if not isinstance(found, HubName):
        raise UserError(f"{source} is here already: pull takes an address (https://…) or a name of the hub; copy it")
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    name, revision = found
    with asking(name, revision):
        try:
            about = get_hf_file_metadata(hf_hub_url(name, MANIFEST, revision=revision))
        except errors.EntryNotFoundError:
            raise UserError(f"{source} has no {MANIFEST}: {_ONLY}") from None
    commit = about.commit_hash or revision
    return Server(source, name.split("/")[1], lambda file: hf_hub_url(name, file, revision=commit), token=True)


def _address(source: str) -> Server:
    """Return the folder at an address. No token of the hub is sent there."""
    try:
        parts = urlsplit(source.removesuffix(f"/{MANIFEST}"))
        if not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
            raise ValueError
    except ValueError:
        why = "is no address of a folder"
        raise UserError(f"{source[:200]} {why}: give one such as https://host/models/mine") from None
    base, shown = parts.geturl().rstrip("/"), parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return Server(shown, unquote(parts.path.rstrip("/").rpartition("/")[2]), lambda f: f"{base}/{quote(f)}", False)
