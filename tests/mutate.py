"""Plant random bugs, one at a time, and see whether the tests notice.

    python tests/mutate.py --count 150 --seed 1 --jobs 2 --out mutants.jsonl

A bug is a small change of the syntax tree: a comparison or an operator for another, a number off by one, a condition
negated, two arguments swapped, a statement left out. Each is planted in a copy of the tree, where the tests of its
room run until the first fails or the time is over. Survivors are printed with the line as it was and as it is.

Unusual: this is no test, and takes hours. Some survivors are no bugs (a longer time-out, a better-worded message):
read them.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
ROOMS = {  # the tests that belong to each; those of the file's own name run first
    "ops": ["tests/ops", "tests/models"],
    "models": [
        "tests/models",
        "tests/growth/test_tokens.py",
        "tests/hub/test_official.py",
        "tests/infer/test_engine.py",
    ],
    "growth": ["tests/growth", "tests/train/test_growing.py"],
    "data": ["tests/data"],
    "train": ["tests/train"],
    "parallel": [
        "tests/parallel/test_mesh.py",
        "tests/parallel/test_estimate.py",
        "tests/parallel/test_equal.py::test_ten_steps_in_float64_are_those_of_one_process",
    ],
}
LEFT_OUT = ("kernels", "slurm.py", "page.py", "plot.py", "loggers.py")  # need a GPU, a cluster, or a reader
CASES = ("theta-softmax", "token2-adamw", "shard2-muon", "pipeline2-adamw", "grow-token2", "transformer-token2")
FEWER = f"""
RUNS = {{name: run for name, run in RUNS.items() if name in {CASES}}}
"""
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARE |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATE |= {ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
SAYING = {"print", "say", "UserError", "need", "key", "warn", "ValueError", "TypeError"}  # what they get is text


GOOD: set[str] = set()  # tests that were seen to pass without a bug


class Mutant(NamedTuple):
    room: str
    file: str
    line: int
    what: str
    old: str
    new: str
    text: str  # the whole file with the bug


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="bugs, equally many a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--seconds", type=float, default=240, help="time for the tests of one bug")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", help="one JSON line a bug, written as it is found")
    args = parser.parse_args()
    chosen = draw(args.rooms, args.count, random.Random(args.seed))
    verdicts: dict[str, list[Mutant]] = {"caught": [], "timed out": [], "survived": []}
    with tempfile.TemporaryDirectory(prefix="mutate-") as work, ThreadPoolExecutor(args.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            trees.put(plant_tree(Path(work) / str(job)))

        def one(mutant: Mutant) -> tuple[Mutant, str, str, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return mutant, *judge(tree, mutant, args.seconds), time.monotonic() - start
            finally:
                trees.put(tree)

        for mutant, verdict, by, seconds in pool.map(one, chosen):
            verdicts[verdict].append(mutant)
            row = {**mutant._asdict(), "verdict": verdict, "by": by, "seconds": round(seconds, 1)}
            row.pop("text")
            print(
                f"{verdict:10}{mutant.file}:{mutant.line}  {mutant.what}: {mutant.old}  →  {mutant.new}  {by}",
                flush=True,
            )
            if args.out:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    found = len(verdicts["caught"]) + len(verdicts["timed out"])
    print(
        f"{found} of {len(chosen)} caught ({len(verdicts['timed out'])} by time), {len(verdicts['survived'])} survived"
    )
    return 0


def draw(rooms: list[str], count: int, chance: random.Random) -> list[Mutant]:
    """Equally many of each room; inside a room, a kind of change first, so that rare kinds come too."""
    chosen = []
    for i, room in enumerate(rooms):
        kinds: dict[str, list[Mutant]] = {}
        for path in sorted((HERE / "tokenformer" / room).rglob("*.py")):
            if not any(part in LEFT_OUT for part in path.relative_to(HERE).parts):
                for mutant in mutants(room, path):
                    kinds.setdefault(mutant.what, []).append(mutant)
        for _ in range(count * (i + 1) // len(rooms) - count * i // len(rooms)):
            pool = kinds[chance.choice(sorted(kind for kind in kinds if kinds[kind]))]
            chosen.append(pool.pop(chance.randrange(len(pool))))
    return chosen


def mutants(room: str, path: Path) -> Iterator[Mutant]:
    source = path.read_text(encoding="utf-8")
    lines = source.encode().splitlines(keepends=True)  # columns of the tree count bytes
    for what, node, new in changes(ast.parse(source)):
        first, last = node.lineno - 1, node.end_lineno - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        old = ast.get_source_segment(source, node) or ""
        text = b"".join([*lines[:first], before, new.encode(), after, *lines[last + 1 :]]).decode()
        try:
            compile(text, str(path), "exec")
        except SyntaxError:
            continue
        short = " ".join(old.split())
        yield Mutant(room, str(path.relative_to(HERE)), node.lineno, what, short[:90], new[:90], text)


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """What could be changed: (kind, node, its new text)."""
    for node in reached(tree):
        other = copy.deepcopy(node)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
            other.ops[0] = COMPARE[type(node.ops[0])]()
            yield "comparison", node, f"({ast.unparse(other)})"
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATE:
            other.op = OPERATE[type(node.op)]()
            yield "operator", node, f"({ast.unparse(other)})"
        elif isinstance(node, ast.BoolOp):
            other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and, or", node, f"({ast.unparse(other)})"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            value = (not node.value) if isinstance(node.value, bool) else node.value + 1
            yield "constant", node, repr(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield "sign", node, f"({ast.unparse(node.operand)})"
        elif (
            isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args)
        ):
            other.args[0], other.args[1] = other.args[1], other.args[0]
            if ast.unparse(other) != ast.unparse(node):
                yield "arguments", node, ast.unparse(other)
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.NamedExpr):
            yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not isinstance(node.value, ast.Yield):
            yield "left out", node, "pass"


def reached(node: ast.AST) -> Iterator[ast.AST]:
    """What runs and matters: no annotations, docstrings, decorators, messages, or parts of f-strings."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.Call):
                called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if called in SAYING:
                    if called == "need" and child.args:
                        yield from reached(child.args[0])
                    continue
            yield from reached(child)


def plant_tree(folder: Path) -> Path:
    """A copy of what is tracked or new, with a few of the parallel runs alone: all of them take minutes."""
    folder.mkdir()
    listed = subprocess.run(
        ["git", "-C", HERE, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (HERE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(HERE / name, folder / name)
    with open(folder / "tests" / "parallel" / "cases.py", "a", encoding="utf-8") as file:
        file.write(FEWER)
    with open(folder / "tests" / "parallel" / "conftest.py", "a", encoding="utf-8") as file:
        file.write("\nfor name in COUNTS.keys() - {'l2', 'one', 'three', 'softmax', 'whole'}:\n    del COUNTS[name]\n")
    return folder


def judge(tree: Path, mutant: Mutant, seconds: float) -> tuple[str, str]:
    """(verdict, the test that failed). A test that fails without the bug too does not count."""
    path = tree / mutant.file
    named = sorted((tree / "tests" / mutant.room).rglob(f"test_{path.stem}*.py"))
    first = [str(p.relative_to(tree)) for p in named]
    which = "not slow and not gpu and not hosts" + ("" if mutant.room == "parallel" else " and not multi")
    tests = [mutant.file, *first, *(p for p in ROOMS[mutant.room] if (tree / p.split("::")[0]).exists())]
    kept = path.read_text(encoding="utf-8")
    path.write_text(mutant.text, encoding="utf-8")
    try:
        code, failed = tested(tree, [*tests, "-m", which], seconds)
    except subprocess.TimeoutExpired:
        return "timed out", ""
    finally:
        path.write_text(kept, encoding="utf-8")
    if code == 0:
        return "survived", ""
    if failed and failed not in GOOD and tested(tree, [failed], 10 * seconds)[0] != 0:
        raise SystemExit(f"{failed} fails without any bug: nothing can be learned from it")
    GOOD.add(failed)
    return "caught", failed or "at import"


def tested(tree: Path, words: list[str], seconds: float) -> tuple[int, str]:
    """pytest's exit code, and the first test that failed."""
    how = "-x -q --tb=no -p no:cacheprovider -p no:logging".split()
    settings = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *how, *words],
        cwd=tree,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        raise
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return process.returncode, lines[0].split(" ", 1)[1].split(" - ")[0] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
