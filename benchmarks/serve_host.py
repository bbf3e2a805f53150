"""What HTTP, streams and Python add to the steps of a server: instead of a GPU with a model, a device that only waits.

  python benchmarks/serve_host.py [--step 0.0035] [--prompt 0.0009] [--clients 64]

A step takes --step seconds and a prompt of 128 ids --prompt more (1.5B on an H200), tokens are random, and the host may
begin a step before the last one has ended, as with CUDA graphs. Clients read streams, as in benchmarks/serve.py; each
round is one JSON line. `rival_value` is what steps and prompts alone would give if all prompts came at once. The server
and its clients have a core each, if there are two.
"""

import argparse
import asyncio
import gc
import os
import re
import subprocess
import sys
import time

import torch
from decode import NEW, say
from serve import by_http
from step import commit

from tokenformer import ModelConfig, models
from tokenformer.data.text.tokenizer import load_tokenizer
from tokenformer.infer.engine import Engine
from tokenformer.infer.slots import Slots, Text, Token

ROUNDS = 5


class Made:
    """Tokens of a step that ends at a certain time."""

    def __init__(self, texts: list[Text], end: float) -> None:
        self.texts, self.end = texts, end

    def __iter__(self):
        time.sleep(max(0.0, self.end - time.perf_counter()))
        ids = torch.randint(50_000, (len(self.texts),)).tolist()  # as a tensor that came from the device
        return zip(self.texts, map(Token, ids), strict=True)


class Waiting(Slots):
    """Slots whose steps compute nothing."""

    step = prompt = end = 0.0

    def launch(self) -> list[Made]:
        made: list[Made] = []
        self.end = max(self.end, time.perf_counter())
        for _ in range(12):  # the lock of Python is let go and taken again as often as by a real step
            torch.empty(64).zero_()
        if self.texts:
            self.end += self.step
            made.append(Made(list(self.texts), self.end))
        if self.entering:
            self.end += self.prompt * len(self.entering)
            made.append(Made(list(self.entering), self.end))
            for text in (text for text in self.entering if not text.gone):
                self._move(text, len(self.texts))
                self.texts.append(text)
            self.entering = []
        return made

    def _move(self, text: Text, row: int) -> None:
        if row < len(self.texts):
            self.texts[row] = text
        text.row = row


def run_server(args: argparse.Namespace) -> None:
    from tokenformer.serve import batching
    from tokenformer.serve.app import Service
    from tokenformer.serve.run import Address, serve

    pin(0)
    batching.Slots, Waiting.step, Waiting.prompt = Waiting, args.step, args.prompt
    tokenizer = load_tokenizer("gpt-neox-20b")
    config = ModelConfig(
        layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=4, vocab=tokenizer.vocab_size, context=2048
    )
    engine = Engine(models.build(config), vocab=tokenizer.vocab_size)
    service = Service(engine, tokenizer, {"waiting": {}}, rows=args.clients)
    service.batcher.lag = True
    sys.exit(serve(service, Address("127.0.0.1", 0, None, False)))


def pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.0035)
    parser.add_argument("--prompt", type=float, default=0.0009)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        return run_server(args)
    words = [sys.executable, __file__, "--serve", *sys.argv[1:]]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r":(\d+)/ ", process.stdout.readline())
        assert found is not None
        pin(1)
        gc.freeze()
        alone = args.clients * NEW / (args.clients * args.prompt + (NEW - 1) * args.step)
        for _ in range(ROUNDS):
            rate, first = asyncio.run(by_http(int(found[1]), args.clients))
            about = {"rival": "steps and prompts alone", "rival_value": round(alone), "ratio": round(rate / alone, 3)}
            about |= {"first_token_seconds": round(first, 3), "clients": args.clients, "unit": "tokens/s"}
            say(name="server, no model", value=round(rate), **about, device="CPU", commit=commit())
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
