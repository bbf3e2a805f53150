"""Downloads against a real server on the loopback that breaks off, ignores ranges or changes the file."""

import hashlib
import http.server
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tokenformer import UserError
from tokenformer.data.text import named
from tokenformer.files import download

CONTENT = random.Random(4).randbytes(600_000)


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; how it misbehaves is set from outside."""

    content, version = CONTENT, '"v1"'
    breaks: list[int]  # after how many bytes each of the next answers breaks off
    ranges = honest = True
    seconds_a_block = 0.0
    status = 0  # answer this instead
    linked = ""  # a hub's checksum, named while it redirects

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.breaks, self.asked = [], []
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

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        if server.linked and "resolved" not in self.path:
            self.send_response(302)
            self.send_header("Location", "/resolved/file.bin")
            self.send_header("X-Linked-Etag", f'"{server.linked}"')
            self.end_headers()
            return
        server.asked.append((wanted, self.headers.get("If-Range")))
        if server.status:
            self.send_error(server.status)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        same = not server.honest or self.headers.get("If-Range") in (None, server.version)
        partial = bool(wanted) and server.ranges and same
        if partial and start >= len(server.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = server.content[start if partial else 0 :]
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        self.send_header("Content-Length", str(len(body)))
        if server.version:
            self.send_header("ETag", server.version)
        self.end_headers()
        limit = server.breaks.pop(0) if server.breaks else len(body)
        for place in range(0, min(limit, len(body)), 20_000):
            self.wfile.write(body[place : min(place + 20_000, limit)])
            self.wfile.flush()
            time.sleep(server.seconds_a_block)
        self.close_connection = True


@pytest.fixture
def server():
    served = Server()
    yield served
    served.shutdown()
    served.server_close()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_a_file_comes_whole_under_its_name(server, tmp_path):
    path = download(server.url, tmp_path / "deep" / "f", checksum=hashlib.sha256(CONTENT).hexdigest())
    assert path.read_bytes() == CONTENT and names(path.parent) == ["f"]
    download(server.url, path)
    assert len(server.asked) == 1  # what is there is not asked for again


def test_broken_off_it_goes_on_where_it_was(server, tmp_path):
    server.breaks = [250_000, 100_000, 1]
    assert download(server.url, tmp_path / "f", pause=0.01).read_bytes() == CONTENT
    assert server.asked == [
        (None, None),
        ("bytes=250000-", '"v1"'),
        ("bytes=350000-", '"v1"'),
        ("bytes=350001-", '"v1"'),
    ]
    assert names(tmp_path) == ["f"]


def test_a_try_that_brought_something_does_not_count_as_failed(server, tmp_path):
    server.breaks = [50_000] * 4
    assert download(server.url, tmp_path / "f", tries=2, pause=0).read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.breaks, server.ranges = [250_000], False
    assert download(server.url, tmp_path / "f", pause=0.01).read_bytes() == CONTENT
    assert len(server.asked) == 2


@pytest.mark.parametrize("honest", [True, False], ids=["sends it whole", "sends a range of the new file"])
def test_a_file_that_changed_between_two_tries_is_fetched_anew(server, tmp_path, honest):
    server.breaks = [250_000]
    with pytest.raises(UserError, match="could not be fetched"):
        download(server.url, tmp_path / "f", tries=1)
    server.content, server.version, server.honest = random.Random(5).randbytes(500_000), '"v2"', honest
    assert download(server.url, tmp_path / "f", pause=0.01).read_bytes() == server.content


def test_without_a_version_nothing_is_continued(server, tmp_path):
    server.breaks, server.version = [250_000], ""
    assert download(server.url, tmp_path / "f", pause=0.01).read_bytes() == CONTENT
    assert server.asked == [(None, None)] * 2


def test_a_part_that_was_already_whole_takes_its_name(server, tmp_path):
    (tmp_path / "f.part").write_bytes(CONTENT)
    (tmp_path / "f.part.json").write_text(json.dumps({"version": '"v1"', "total": len(CONTENT), "sha256": ""}))
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT
    assert server.asked == [("bytes=600000-", '"v1"')]


def test_a_wrong_checksum_is_refused_and_removed(server, tmp_path):
    with pytest.raises(UserError, match="has not the checksum 00"):
        download(server.url, tmp_path / "f", checksum="00" * 32)
    assert names(tmp_path) == []


def test_the_checksum_that_a_hub_names_is_used(server, tmp_path):
    server.linked = hashlib.sha256(CONTENT).hexdigest()
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT
    server.linked = "ab" * 32
    with pytest.raises(UserError, match="has not the checksum abab"):
        download(server.url, tmp_path / "g")


def test_a_missing_file_is_said_at_once_and_a_busy_server_is_tried_again(server, tmp_path):
    server.status = 404
    with pytest.raises(UserError, match="answers 404 Not Found: give the path of a local copy"):
        download(server.url, tmp_path / "f")
    assert len(server.asked) == 1
    server.status = 503
    with pytest.raises(UserError, match="could not be fetched"):
        download(server.url, tmp_path / "f", tries=3, pause=0.01)
    assert len(server.asked) == 4


def test_when_nothing_comes_what_came_before_is_kept(server, tmp_path):
    server.breaks = [100_000, 0, 0]
    with pytest.raises(UserError, match=r"it broke off after 100,000 of 600,000 bytes.*\(0\.1 MB are kept\)"):
        download(server.url, tmp_path / "f", tries=3, pause=0.01)
    assert names(tmp_path) == ["f.part", "f.part.json"]
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.multi
def test_killed_while_fetching_it_goes_on(server, tmp_path):
    server.seconds_a_block = 0.05
    code = "import sys; from tokenformer.files import download; download(sys.argv[1], sys.argv[2])"
    process = subprocess.Popen([sys.executable, "-c", code, server.url, str(tmp_path / "f")])
    end = time.monotonic() + 30
    while not (tmp_path / "f.part").exists() or (tmp_path / "f.part").stat().st_size < 100_000:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(tmp_path) == ["f.part", "f.part.json"]
    server.seconds_a_block = 0.0
    assert download(server.url, tmp_path / "f").read_bytes() == CONTENT
    assert int(server.asked[-1][0].removeprefix("bytes=").rstrip("-")) >= 100_000


@pytest.mark.multi
def test_several_processes_that_want_one_file_fetch_it_once(server, tmp_path):
    server.seconds_a_block = 0.01
    code = "import sys; from tokenformer.files import download; download(sys.argv[1], sys.argv[2])"
    runs = [subprocess.Popen([sys.executable, "-c", code, server.url, str(tmp_path / "f")]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert (tmp_path / "f").read_bytes() == CONTENT and len(server.asked) == 1


def test_a_shard_of_a_named_set_fetches_its_own_archives_alone(server, tmp_path):
    server.content = b'{"text": "a"}'
    old = named.SETS["pile"]
    named.SETS["pile"] = named.NamedSet(tuple(f"{server.url}/{i}.jsonl" for i in range(5)))
    try:
        assert [Path(s.path).name for s in named.fetch("pile", tmp_path, (2, 2))] == ["2.jsonl", "3.jsonl", "4.jsonl"]
        assert len(server.asked) == 3
    finally:
        named.SETS["pile"] = old


def test_a_named_set_is_fetched_read_and_checked(server, tmp_path):
    import zipfile

    text = b"start\n  <page>\none\n  <page>\ntwo\n"
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("enwik8", text)
    server.content = archive.read_bytes()
    url = server.url.replace("file.bin", "enwik8.zip")
    old = named.SETS["enwik8"]
    named.SETS["enwik8"] = named.NamedSet((url,), old.reading, hashlib.md5(text).hexdigest())
    try:
        [source] = named.fetch("enwik8", tmp_path / "d")
        assert (source.path, source.member) == (str(tmp_path / "d" / "enwik8" / "enwik8.zip"), "enwik8")
        named.SETS["enwik8"] = named.NamedSet((url,), old.reading, "0" * 32)
        with pytest.raises(UserError, match="is not enwik8"):
            named.fetch("enwik8", tmp_path / "e")
        assert names(tmp_path / "e" / "enwik8") == []
    finally:
        named.SETS["enwik8"] = old
