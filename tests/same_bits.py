"""Compare this tree with an earlier commit, bit by bit: weights after training, optimizer state, generated text.

    python tests/same_bits.py --base COMMIT

Both trees train tiny models through the command line, with this interpreter, on this machine: AdamW, Muon that grows
twice, pipeline 2 × shard 2, token 2; then they write text with the first one's weights. Exit code 1 where something
differs. What the base gave is kept in a temporary folder, so a second call runs the current tree alone.

Unusual: this is no test. The last bits of floats belong to one kind of CPU and one PyTorch, so nothing is pinned;
only two runs on one machine are compared.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parents[1]
TEXT = HERE / "tests" / "data" / "alice.txt"
MODEL = {"layers": 4, "dim": 32, "heads": 2, "qkv_tokens": 128, "proj_tokens": 128, "ffn_tokens": 256, "context": 64}
COMMON = {
    "model": {**MODEL, "vocab": 384},
    "data": {"path": "set/alice", "split": [95, 5, 0]},
    "steps": 30,
    "batch": 8,
    "train": {"device": "cpu", "precision": "fp32"},
    "validation": {"every": 10, "samples": 4, "generate": 8},
    "log": {"every": 5},
}
MUON = {"optimizer": {"kind": "muon"}}
GROWTH = [
    {"at": {"step": 10}, "qkv_tokens": 160, "ffn_tokens": 384, "warmup": 3, "old_tokens": 0.5},
    {"at": {"step": 20}, "layers": 5, "proj_tokens": 160, "new_tokens": {"proj": "zero_key"}, "state": "keep"},
]
# name → (processes, what the config adds)
RUNS = {
    "adamw": (1, {"optimizer": {"kind": "adamw"}, "micro_batch": 4}),
    "muon-grows-twice": (1, {**MUON, "growth": GROWTH, "train": {"device": "cpu", "precision": "bf16"}}),
    "pipeline2-shard2": (4, {**MUON, "parallel": {"pipeline": 2, "shard": 2}, "micro_batch": 2}),
    "token2": (2, {**MUON, "parallel": {"token": 2}}),
}
PREPARE = ["--tokenizer", "byte", "--separator", r"\n\n", "--workers", "1"]
SETTINGS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
TEXTS = {"greedy": [], "sampled": ["--temperature", "0.8", "--top-k", "40", "--seed", "3"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="COMMIT", help="the commit to compare this tree with")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="some of the runs")
    args = parser.parse_args()
    before = of_commit(args.base, args.only)
    with tempfile.TemporaryDirectory(prefix="same-bits-") as work:
        start = time.monotonic()
        after = results(HERE, Path(work), args.only)
        print(f"this tree: {time.monotonic() - start:.0f} s", file=sys.stderr)
        return compare(before, after)


def of_commit(base: str, only: list[str]) -> Path:
    """The folder of the base's results, made where it is not kept yet."""
    commit = output(["git", "-C", HERE, "rev-parse", "--verify", f"{base}^{{commit}}"])
    about = [Path(__file__).read_text(), torch.__version__, platform.processor(), cpu(), sys.version, *only]
    made_by = hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]
    kept = Path(tempfile.gettempdir()) / f"tokenformer-same-bits-{os.getuid()}" / f"{commit}-{made_by}"
    if kept.is_dir():
        return kept
    with tempfile.TemporaryDirectory(prefix="same-bits-base-") as work:
        tree = Path(work) / "tree"
        output(["git", "-C", HERE, "worktree", "add", "--detach", tree, commit])
        try:
            made = results(tree, Path(work) / "results", only)
        finally:
            output(["git", "-C", HERE, "worktree", "remove", "--force", tree])
        kept.parent.mkdir(exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=kept.parent))
        shutil.copytree(made, beside, dirs_exist_ok=True)
        try:
            beside.rename(kept)
        except OSError:  # another call was faster
            shutil.rmtree(beside)
    return kept


def results(tree: Path, work: Path, only: list[str]) -> Path:
    """A folder with NAME.safetensors and NAME.json for everything that is compared, made by the code of `tree`."""
    made = work / "made"
    made.mkdir(parents=True)
    origin = call(tree, work, ["-c", "import tokenformer; print(tokenformer.__file__)"])
    if not Path(origin).is_relative_to(tree):
        raise SystemExit(f"python imports {origin} instead of the package in {tree}")
    call(tree, work, ["-m", "tokenformer", "prepare", TEXT, "--out", "set", "--name", "alice", *PREPARE])

    def run(name: str) -> None:
        train(tree, work, name, made)
        if name == "adamw":
            for text in TEXTS:
                write(tree, work, text, made)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, only))
    return made


def train(tree: Path, work: Path, name: str, made: Path) -> None:
    processes, added = RUNS[name]
    config = work / f"{name}.yml"
    config.write_text(json.dumps({**COMMON, **added}))  # JSON is YAML
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = several if processes > 1 else []
    call(tree, work, [*launcher, "-m", "tokenformer", "train", config, "--out", f"runs/{name}"])
    checkpoints = (work / "runs" / name / "checkpoints").glob("step-*")
    newest = max(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))
    for part, called in (("model", name), ("optim", f"{name} (optimizer)")):
        save_file(tensors(newest / part), made / f"{called}.safetensors")


def write(tree: Path, work: Path, name: str, made: Path) -> None:
    prompts = ["--prompt", "Alice was beginning", "--prompt", "The Queen", "--tokens", "48", "--logprobs"]
    said = call(tree, work, ["-m", "tokenformer", "generate", "runs/adamw", *prompts, *TEXTS[name], "--device", "cpu"])
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    texts = [row["text"] for row in rows]
    numbers = [row["logprobs"] for row in rows]
    if len(texts) != 2 or not all(texts):
        raise SystemExit(f"generate gave no two texts:\n{said}")
    (made / f"text, {name}.json").write_text(json.dumps(texts))
    save_file({f"{i}": torch.tensor(row) for i, row in enumerate(numbers)}, made / f"logprobs, {name}.safetensors")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint's folder, by PyTorch's own reader: no tree's code is asked."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    meta = reader.read_metadata().state_dict_metadata
    into = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in meta.items()}
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    dcp.load(into, storage_reader=reader, no_dist=True)
    return into


def compare(before: Path, after: Path) -> int:
    names = sorted({path.name for folder in (before, after) for path in folder.iterdir()})
    differing = 0
    print(f"{'':34}{'before':14}{'after':14}")
    for name in names:
        old, new = before / name, after / name
        digests = [digest(path) if path.exists() else "absent" for path in (old, new)]
        verdict = "equal"
        if digests[0] != digests[1]:
            differing += 1
            verdict = "DIFFERS" + (f": {difference(old, new)}" if old.exists() and new.exists() else "")
        print(f"{Path(name).stem:34}{digests[0]:14}{digests[1]:14}{verdict}")
    print("equal" if not differing else f"{differing} of {len(names)} differ")
    return int(differing > 0)


def digest(path: Path) -> str:
    if path.suffix == ".json":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    total = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        total.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        total.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else value.numpy().tobytes())
    return total.hexdigest()[:12]


def difference(old: Path, new: Path) -> str:
    """Where two files differ most: the largest difference over the largest magnitude of that tensor."""
    if old.suffix == ".json":
        pairs = zip(json.loads(old.read_text()), json.loads(new.read_text()), strict=True)
        return next(f"'{one}' became '{other}'" for one, other in pairs if one != other)
    one, other = load_file(old), load_file(new)
    only = sorted(one.keys() ^ other.keys())
    if only:
        return f"names {', '.join(only[:3])}{' …' if len(only) > 3 else ''} are in one of them only"
    worst, where = 0.0, "dtypes"
    for name, value in one.items():
        if value.shape != other[name].shape:
            return f"{name} was {list(value.shape)} and is {list(other[name].shape)}"
        scale = value.double().abs().max().clamp(min=1e-30)
        apart = ((value.double() - other[name].double()).abs().max() / scale).item()
        if not apart <= worst:  # NaN too
            worst, where = apart, name
    return f"by {worst:.1e}, most in {where}"


def call(tree: Path, work: Path, words: list) -> str:
    """What a Python of `tree`'s package prints; the end of the script where it fails."""
    return output([sys.executable, *words], cwd=work, env={**os.environ, "PYTHONPATH": str(tree), **SETTINGS})


def output(words: list, **how) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **how)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(str(word) for word in words)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout.strip()


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
