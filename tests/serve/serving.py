"""Servers as users start them: a process of its own per server, on a free port of the loopback."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import torch

from tokenformer.config import ModelConfig
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.models import LanguageModel

BYTES = ByteTokenizer()
SHAPE = {"layers": 2, "dim": 32, "heads": 4, "qkv_tokens": 12, "proj_tokens": 10, "ffn_tokens": 24, "context": 256}


def make_model(**keys) -> LanguageModel:
    """A model whose every part matters, and which writes letters most of the time."""
    model = LanguageModel(ModelConfig(**{**SHAPE, **keys}, vocab=384))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.7)
        letters = torch.zeros(384, dtype=torch.bool)
        letters[[b + 1 for b in range(97, 123)]] = True
        model.embedding.weight[~letters] *= 0.5
    return model


class Server:
    """A process that serves; `log` is what it says."""

    def __init__(self, *words: str, port: int = 0, **environment: str) -> None:
        code = [sys.executable, "-m", "tokenformer", "serve", *words, "--port", str(port)]
        self.process = subprocess.Popen(
            code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
        assert self.process.stdout is not None
        self.log = ""
        while not (found := re.search(r"(http://127\.0\.0\.\d+:(\d+))/ ", self.log)):
            line = self.process.stdout.readline()
            assert line, self.log
            self.log += line
        self.url, self.port = found[1], int(found[2])
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.log += line

    def metric(self, name: str, default: float | None = None) -> float:
        found = re.search(rf"^tokenformer_{re.escape(name)} (\S+)", httpx.get(f"{self.url}/metrics").text, flags=re.M)
        if found is None and default is not None:
            return default
        return float(found[1])  # type: ignore[index]

    def resident(self) -> int:
        """Bytes of memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, sig: int = signal.SIGTERM, seconds: float = 60) -> int:
        self.process.send_signal(sig)
        return self.process.wait(seconds)
