"""The server on one GPU: throughput of concurrent requests and time to the first token, beside `generate` and a rival.

  python benchmarks/serve.py [--shape 1.5b] [--clients 64] [--parts ours rival]

Ours: the batcher and the protocol's objects without HTTP, then `generate` with the same batch; then a real server on
loopback with as many clients that read streams. Rival: transformers' continuous batching (`generate_batch`) with
GPT-NeoX of equal size. Prompts of 128 ids, 256 new tokens, bf16, random weights. Prints JSON lines.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from decode import NEW, PROMPT, RIVALS, random_model, say
from step import commit, parsed

from tokenformer import hub
from tokenformer.data.text.tokenizer import load_tokenizer
from tokenformer.infer import Engine
from tokenformer.infer.slots import Text
from tokenformer.infer.text import Piecewise
from tokenformer.serve.batching import Answer, Batcher, Piece


def prompts(clients: int) -> list[list[int]]:
    return torch.randint(50000, (clients, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()


def by_generate(engine: Engine, clients: int) -> float:
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = sum(len(row.ids) for row in engine.generate(prompts(clients), NEW))
        best = max(best, made / (time.perf_counter() - start))
    return best


def by_batcher(engine: Engine, tokenizer, clients: int) -> tuple[float, float]:
    """Return tokens per second and the mean time to the first token; all requests come at once."""
    batcher = Batcher(engine, tokenizer, clients, 4 * clients)
    best = (0.0, 0.0)
    for _ in range(4):  # the first one captures the graphs
        firsts: dict[int, float] = {}
        left, made = set(range(clients)), 0

        def send(piece: Piece, firsts=firsts, left=left) -> None:
            firsts.setdefault(piece.index, time.perf_counter())
            if piece.reason is not None:
                left.discard(piece.index)

        start = time.perf_counter()
        for i, ids in enumerate(prompts(clients)):
            batcher.submit([Answer(i, Text(ids), NEW, Piecewise(tokenizer.decode, []), None, send)])
        while left:
            time.sleep(0.0005)
        made = clients * NEW
        rate = made / (time.perf_counter() - start)
        best = max(best, (rate, sum(firsts.values()) / clients - start))
    batcher.close()
    return best


async def by_http(port: int, clients: int) -> tuple[float, float]:
    async def one(ids: list[int]) -> tuple[int, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"prompt": ids, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": True}
        text = json.dumps({**body, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(text)}"
        writer.write(head.encode() + b"\r\n\r\n" + text)
        begun, first, made = time.perf_counter(), 0.0, 0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                made += len(json.loads(line[6:])["choices"][0]["token_ids"])
        writer.close()
        return made, first

    start = time.perf_counter()
    found = await asyncio.gather(*(one(ids) for ids in prompts(clients)))
    made = sum(count for count, _ in found)
    assert made == clients * NEW, made
    return made / (time.perf_counter() - start), sum(first for _, first in found) / clients


def serve(folder: Path, clients: int) -> tuple[float, float]:
    words = [sys.executable, "-m", "tokenformer", "serve", str(folder), "--port", "0", "--rows", str(clients)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        port = int(re.search(r":(\d+)/ ", line)[1])  # type: ignore[index]
        return max(asyncio.run(by_http(port, clients)) for _ in range(4))
    finally:
        process.terminate()
        process.wait()


def rival(shape: str, clients: int) -> float:
    from transformers import GenerationConfig, GPTNeoXConfig, GPTNeoXForCausalLM

    _, layers, dim, heads = RIVALS[shape]
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * dim, max_position_embeddings=2048, rotary_pct=0.25,
    )  # fmt: skip
    with torch.device("cuda"):
        model = GPTNeoXForCausalLM(config).to(torch.bfloat16).eval()
    how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        found = model.generate_batch(inputs=prompts(clients), generation_config=how)
        made = sum(len(output.generated_tokens) for output in found.values())
        best = max(best, made / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b", choices=list(RIVALS))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--parts", nargs="+", default=["ours", "rival"], choices=["ours", "rival"])
    args = parsed(parser)
    about = {"model": f"TokenFormer {args.shape}", "clients": args.clients, "unit": "tokens/s", "commit": commit()}
    about["device"] = torch.cuda.get_device_name()
    ours = 0.0
    if "ours" in args.parts:
        model, tokenizer = random_model(args.shape, torch.bfloat16), load_tokenizer("gpt-neox-20b")
        engine = Engine(model, vocab=tokenizer.vocab_size)
        batched = by_generate(engine, args.clients)
        say(name="generate", value=round(batched, 1), **about)
        engine._last = None
        rate, first = by_batcher(engine, tokenizer, args.clients)
        line = {"rival": "generate", "rival_value": round(batched, 1), "ratio": round(rate / batched, 3)}
        say(name="batcher", value=round(rate, 1), first_token_seconds=round(first, 4), **line, **about)
        with tempfile.TemporaryDirectory() as place:
            hub.save(model, Path(place) / "model", tokenizer_json=tokenizer.to_json())
            del engine, model
            torch.cuda.empty_cache()
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            ours, first = serve(Path(place) / "model", args.clients)
        line["ratio"] = round(ours / batched, 3)
        say(name="server", value=round(ours, 1), first_token_seconds=round(first, 4), **line, **about)
    if "rival" in args.parts:
        theirs = rival(args.shape, args.clients)
        ratio = round(ours / theirs, 3) if ours else None
        name = f"transformers {RIVALS[args.shape][0]}, generate_batch"
        say(
            name="server beside a rival",
            value=round(ours, 1),
            rival=name,
            rival_value=round(theirs, 1),
            ratio=ratio,
            **about,
        )


if __name__ == "__main__":
    main()
