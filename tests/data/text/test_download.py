"""Downloads against a real server on the loopback that breaks off, ignores ranges or changes the file."""

import hashlib
import http.server
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from tokenformer import UserError
from tokenformer.data.text import named
from tokenformer.files import download

CONTENT = random.Random(4).randbytes(600_000)
CODE = "import sys; from tokenformer.files import download; download(sys.argv[1], sys.argv[2])"


class Server(http.server.ThreadingHTTPServer):
    """Serves one file under every name; how it misbehaves is set from outside."""

    content = CONTENT
    seconds_a_block = 0.0
    status = 0  # answer this instead
    ranges = True
    version: str | None = ""  # of the file (ETag; None: it has none); "": the checksum of the content, as a hub says it

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.breaks: list[int] = []  # after how many bytes each of the next answers breaks off
        self.asked: list[int] = []  # where each answer began
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/folder/file.bin"

    def handle_error(self, request, client_address) -> None:
        pass  # a client that went away


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format, *args) -> None:
        pass

    def head(self, start: int) -> bytes:
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            total = len(self.server.content)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        if self.server.version is not None:
            self.send_header("ETag", f'"{self.server.version or hashlib.sha256(self.server.content).hexdigest()}"')
        self.end_headers()
        return body

    def do_HEAD(self) -> None:
        self.send_error(self.server.status) if self.server.status else self.head(0)

    def do_GET(self) -> None:
        server = self.server
        if server.status:
            return self.send_error(server.status)
        start = (
            0
            if not server.ranges
            else int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        )
        server.asked.append(start)
        body = self.head(start)
        limit = server.breaks.pop(0) if server.breaks else len(body)
        for place in range(0, min(limit, len(body)), 20_000):
            self.wfile.write(body[place : min(place + 20_000, limit)])
            self.wfile.flush()
            time.sleep(server.seconds_a_block)
        self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 20_000)  # what is written at a time
    served = Server()
    yield served
    served.shutdown()
    served.server_close()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_fetched_once_under_its_name(server, tmp_path):
    path = download(server.url, tmp_path / "deep" / "f")
    assert path.read_bytes() == CONTENT and names(path.parent) == ["f"]
    download(server.url, path)
    assert server.asked == [0]


def test_broken_off_it_goes_on_where_it_was(server, tmp_path):
    server.breaks = [100_000]
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT
    assert server.asked == [0, 100_000]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.breaks, server.ranges = [100_000], False
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT
    assert server.asked == [0, 0] and names(tmp_path) == ["f"]


def test_of_a_file_that_changed_nothing_old_is_kept(server, tmp_path):
    part = interrupted(server, tmp_path / "f")
    server.content = CONTENT[::-1]
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT[::-1]
    assert not part.exists() and names(tmp_path) == ["f"] and server.asked[-1] == 0


def test_without_a_version_nothing_is_continued(server, tmp_path):
    server.version = None
    interrupted(server, tmp_path / "f")
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT and server.asked[-1] == 0


def test_another_content_than_the_hub_says_is_refused_and_removed(server, tmp_path):
    server.version = "0" * 64
    with pytest.raises(UserError, match=r"file\.bin has not the checksum 000"):
        download(server.url, tmp_path / "f")
    assert names(tmp_path) == ["f.part.lock"]


def test_a_missing_file_is_one_sentence(server, tmp_path):
    server.status = 404
    with pytest.raises(UserError, match=r"could not be fetched \(.*404.*\): go online"):
        download(server.url, tmp_path / "f")
    assert names(tmp_path) == ["f.part.lock"]


def interrupted(server: Server, path: Path) -> Path:
    """Kill a process that downloads; return what it left."""
    content, server.content, server.seconds_a_block = server.content, server.content * 40, 0.002
    process = subprocess.Popen([sys.executable, "-c", CODE, server.url, str(path)])
    end = time.monotonic() + 60
    while not any(p.stat().st_size > 1_000_000 for p in path.parent.glob("f.*.part")):  # 10 MB are written at a time
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.content, server.seconds_a_block = content, 0.0
    [part] = path.parent.glob("f.*.part")
    return part


@pytest.mark.multi
def test_killed_while_fetching_it_goes_on(server, tmp_path):
    interrupted(server, tmp_path / "f")
    server.content = CONTENT * 40
    assert download(server.url, tmp_path / "f").read_bytes() == server.content
    assert server.asked[-1] > 1_000_000


@pytest.mark.multi
def test_several_processes_that_want_one_file_fetch_it_once(server, tmp_path):
    server.seconds_a_block = 0.01
    runs = [subprocess.Popen([sys.executable, "-c", CODE, server.url, str(tmp_path / "f")]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert (tmp_path / "f").read_bytes() == CONTENT and server.asked == [0]


def test_a_shard_of_a_named_set_fetches_its_own_archives_alone(server, tmp_path, monkeypatch):
    server.content = b'{"text": "a"}'
    monkeypatch.setitem(named.SETS, "pile", named.NamedSet(tuple(f"{server.url}/{i}.jsonl" for i in range(5))))
    assert [Path(s.path).name for s in named.fetch("pile", tmp_path, (2, 2))] == ["2.jsonl", "3.jsonl", "4.jsonl"]
    assert len(server.asked) == 3


def test_a_named_set_is_fetched_read_and_checked(server, tmp_path, monkeypatch):
    text = b"start\n  <page>\none\n  <page>\ntwo\n"
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("enwik8", text)
    server.content = archive.read_bytes()
    url, reading = server.url.replace("file.bin", "enwik8.zip"), named.SETS["enwik8"].reading
    monkeypatch.setitem(named.SETS, "enwik8", named.NamedSet((url,), reading, hashlib.md5(text).hexdigest()))
    [source] = named.fetch("enwik8", tmp_path / "d")
    assert (source.path, source.member) == (str(tmp_path / "d" / "enwik8" / "enwik8.zip"), "enwik8")
    monkeypatch.setitem(named.SETS, "enwik8", named.NamedSet((url,), reading, "0" * 32))
    with pytest.raises(UserError, match="is not enwik8"):
        named.fetch("enwik8", tmp_path / "e")
    assert names(tmp_path / "e" / "enwik8") == []
