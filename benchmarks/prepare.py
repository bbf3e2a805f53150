"""`tokenformer prepare` on 2 workers against the `tokenizers` library's encode_batch_fast on the same text and cores.

  python benchmarks/prepare.py TEXT [--megabytes 48] [--repeats 3]     speed (TEXT may be packed with .xz)
  python benchmarks/prepare.py TEXT --long 100                         one document of 100 MB: peak memory, same tokens

Unusual: ours is the whole command (start, reading JSON lines, writing the set), the rival encodes strings in memory.
"""

import argparse
import contextlib
import json
import lzma
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RAW = """
import json, sys, time
from tokenformer.data.text.tokenizer import load_tokenizer
documents = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
library = load_tokenizer("gpt-neox-20b")._inner
library.encode_batch_fast(documents[:8])
start, cpu = time.perf_counter(), time.process_time()
encoded = library.encode_batch_fast(documents)
print(time.perf_counter() - start, time.process_time() - cpu)
"""
WHOLE = """
import sys, numpy, pathlib
from tokenformer.data.text.tokenizer import load_tokenizer
text = pathlib.Path(sys.argv[1]).read_bytes().decode()
ids = load_tokenizer("gpt-neox-20b")._inner.encode_batch_fast([text])[0].ids
numpy.array([*ids, 0], numpy.uint16).tofile(sys.argv[2])
"""


def read(path: str, size: int) -> str:
    opened = lzma.open if path.endswith(".xz") else open
    with opened(path, "rb") as file:
        return file.read(size).decode(errors="ignore")


def documents(text: str) -> list[str]:
    """Documents of 1,000 to 16,000 characters, as web pages have."""
    rng, out, place = np.random.default_rng(0), [], 0
    while place < len(text):
        length = int(rng.integers(1000, 16_000))
        out.append(text[place : place + length])
        place += length
    return out


def run(*arguments: object) -> tuple[float, float, int]:
    """Run the command line: seconds, CPU seconds, and the largest sum of proportional memory of all its processes."""
    start, before, peak = time.perf_counter(), os.times(), 0
    command = [sys.executable, "-m", "tokenformer", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        total = 0
        with contextlib.suppress(OSError, StopIteration):  # one of them just ended
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in [process.pid, *children]:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        peak = max(peak, total)
        time.sleep(0.05)
    assert process.returncode == 0
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, cpu, peak


def report(**values) -> None:
    commit = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    values.update(device=f"{platform.machine()}, {os.cpu_count()} cores", commit=commit)
    print(json.dumps(values), flush=True)


def speed(path: str, megabytes: float, repeats: int, workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = documents(read(path, int(megabytes * 1e6)))
        size = sum(len(t.encode()) for t in texts) / 1e6
        corpus = Path(folder) / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
        env = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
        ours, raw = [], []
        for repeat in range(repeats):  # in turn, so that whatever else the machine does hits both
            answer = subprocess.run([sys.executable, "-c", RAW, corpus], env=env, capture_output=True, check=True)
            raw.append([float(n) for n in answer.stdout.split()])
            ours.append(run("prepare", corpus, "--out", folder, "--name", f"r{repeat}", "--workers", workers))
    value, rival = (size / min(r[0] for r in runs) for runs in (ours, raw))
    report(
        name="prepare",
        model="gpt-neox-20b",
        value=round(value, 3),
        unit="MB/s",
        rival="tokenizers.encode_batch_fast",
        rival_value=round(rival, 3),
        ratio=round(value / rival, 3),
        cpu_ratio=round(min(r[1] for r in raw) / min(r[1] for r in ours), 3),
        workers=workers,
        text_mb=round(size, 1),
        runs=[round(size / r[0], 2) for r in ours],
        rival_runs=[round(size / r[0], 2) for r in raw],
        peak_mb=round(max(r[2] for r in ours) / 1e6),
    )


def long_document(path: str, megabytes: float, workers: int, kind: str, check: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = read(path, int(megabytes * 1e6))
        corpus, whole = Path(folder) / f"long.{kind}", Path(folder) / "whole.txt"
        with open(whole, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        with open(corpus, "w", encoding="utf-8", newline="") as file:
            file.write(text if kind == "txt" else json.dumps({"text": text}, ensure_ascii=False))
        size = len(text.encode())
        del text
        seconds, _, peak = run("prepare", corpus, "--out", folder, "--name", "long", "--workers", workers)
        tokens = np.fromfile(Path(folder) / "long_text_document.bin", np.uint16)
        same: bool | str = "not checked"
        if check:
            subprocess.run([sys.executable, "-c", WHOLE, whole, Path(folder) / "whole.bin"], check=True)
            same = bool(np.array_equal(tokens, np.fromfile(Path(folder) / "whole.bin", np.uint16)))
    report(
        name=f"prepare one document ({kind})",
        model="gpt-neox-20b",
        value=round(peak / 1e6),
        unit="MB of memory at most, all processes",
        document_mb=round(size / 1e6, 1),
        tokens=len(tokens),
        same_tokens_as_whole=same,
        mb_a_second=round(size / 1e6 / seconds, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--megabytes", type=float, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--long", type=float, help="prepare one document of so many MB instead")
    parser.add_argument("--kind", choices=["txt", "jsonl"], default="txt", help="of the long document")
    parser.add_argument("--no-check", action="store_true", help="do not encode the long document whole (many GB)")
    args = parser.parse_args()
    if args.long:
        long_document(args.text, args.long, args.workers, args.kind, not args.no_check)
    else:
        speed(args.text, args.megabytes, args.repeats, args.workers)


if __name__ == "__main__":
    main()
