"""Runs a server, and ends it: what was asked is answered first, and no client holds it up by sending or reading slowly.

Unusual: uvicorn would wait for such clients without a limit, and its limit would also cut texts that are being written.
"""

import asyncio
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from tokenformer.serve.app import Service

READING = 5.0  # seconds that clients have for what they have not read when the last text is written
HURRIED = 1.0  # the same, after a second Ctrl-C
TICK = 0.1


class Server(uvicorn.Server):
    def __init__(self, service: Service) -> None:
        how: dict[str, Any] = {"interface": "asgi3", "lifespan": "off", "proxy_headers": False, "server_header": False}
        super().__init__(uvicorn.Config(service.app, log_level="warning", access_log=False, **how))
        self.service, self.hurried = service, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.hurried |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.end()
        count = self.service.batcher.running + self.service.batcher.waiting
        if count:
            print(f"finishing {count} text{'s' * (count > 1)}; Ctrl-C again stops at once", flush=True)
        limit = asyncio.create_task(self._limit())
        await super().shutdown(sockets)
        limit.cancel()

    async def _limit(self) -> None:
        """Let the texts be written, or stop them after a second Ctrl-C; then drop who has not read in time."""
        batcher, left = self.service.batcher, READING
        while left > 0:
            await asyncio.sleep(TICK)
            if self.hurried:
                batcher.stop()
                left = min(left, HURRIED)
            if self.hurried or not (batcher.running or batcher.waiting):
                left -= TICK
        for connection in list(self.server_state.connections):
            connection.transport.abort()
