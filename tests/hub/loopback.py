"""A server on the loopback that sends folders in ranges, counts the bytes and misbehaves as it is told."""

import http.server
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote


class Loopback(http.server.ThreadingHTTPServer):
    """Serves the files below `root` under /, and as models of a hub under /OWNER/NAME/resolve/REVISION/."""

    ranges = True
    shift = 0  # ranges begin so many bytes too late
    redirects = False  # answer with another address first, as the hub does
    seconds_per_block = 0.0
    block = 1 << 16

    def __init__(self, root: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.root = root
        self.sent: Counter[str] = Counter()  # bytes of bodies by name of the file
        self.asked: list[tuple[str, str]] = []  # file and range of every request
        self.breaks: list[int] = []  # after how many bytes each of the next answers with weights breaks off
        self.most = 0  # after so many bytes every answer breaks off; 0: none does
        self.answers: list[int] = []  # statuses that the next requests get instead
        self.before: Callable[[str], object] = lambda name: None  # called before a file is answered
        self.tokens: list[tuple[str, str | None]] = []  # kind of every request for a file, and its Authorization
        self.connections = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def handle_error(self, request, client_address) -> None:
        pass  # a client that went away


class Handler(http.server.BaseHTTPRequestHandler):
    server: Loopback
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def log_message(self, format, *args) -> None:
        pass

    def head(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(length), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_GET(self) -> None:
        server = self.server
        path = unquote(self.path).lstrip("/")
        if server.redirects and not path.startswith("moved/"):
            return self.head(302, 0, Location=f"/moved/{path}")
        path = re.sub(r"^[^/]+/([^/]+)/resolve/[^/]+/", r"\1/", path.removeprefix("moved/"))
        name = path.rsplit("/")[-1]
        server.asked.append((name, self.headers.get("Range", "")))
        if server.answers:
            return self.head(server.answers.pop(0), 0)
        server.before(name)
        if not (server.root / path).is_file():
            return self.head(404, 0, X_Error_Code="EntryNotFound")
        server.tokens.append((self.command, self.headers.get("Authorization")))
        with open(server.root / path, "rb") as file:
            start, end, status = 0, os.fstat(file.fileno()).st_size, 200
            more = {"X_Repo_Commit": "c" * 40, "ETag": '"1"'}
            if server.ranges and (found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
                size, start, end, status = end, int(found[1]) + server.shift, min(int(found[2] or end) + 1, end), 206
                if start >= end:
                    return self.head(416, 0)
                more["Content_Range"] = f"bytes {start}-{end - 1}/{size}"
            self.head(status, end - start, **more)
            if self.command == "GET":
                file.seek(start)
                self.send(name, file, end - start)

    do_HEAD = do_GET

    def send(self, name: str, file: BinaryIO, size: int) -> None:
        server, left = self.server, size
        if server.breaks and name.endswith(".safetensors") and size > server.breaks[0]:
            left = server.breaks.pop(0)
            self.close_connection = True
        if server.most and size > server.most:
            left, self.close_connection = server.most, True
        while left:
            piece = file.read(min(server.block, left))
            server.sent[name] += len(piece)  # before the client can have it, and count
            self.wfile.write(piece)
            self.wfile.flush()
            left -= len(piece)
            time.sleep(server.seconds_per_block)
