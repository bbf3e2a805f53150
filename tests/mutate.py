"""Plant random bugs, one at a time, and see whether the tests notice.

    nice python tests/mutate.py --count 150 --seed 1 --out mutants.jsonl
    nice python tests/mutate.py --rooms infer serve inside eval adapters.py --count 50 --seconds 30 --out others.jsonl

A bug is a small change of the syntax tree: a comparison or an operator for another, a number off by one, a condition
negated, two arguments swapped, a statement left out. What cannot be a bug (messages, types, time-outs) is not drawn.

First the tests run once in a copy of the tree and say which statements each of them reaches (reach.py). This takes
some 15 minutes (in the second line 5) and is kept beside --out: other rooms need another name. Then each bug is planted
in that copy, and the tests that reach its statement run, the quickest first, until one fails or their time is over: in
a process forked from this one, which has torch loaded. A test that failed counts if, by itself, it fails with the bug
and passes without. Run again with the same --out, it goes on where it stopped.

Unusual: this is no test, and takes an hour or two of one core. Read the survivors: some are no bugs, the others want
a test. `mutants.md` tells what was found.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
ROOMS = ("ops", "models", "growth", "data", "train", "parallel")
LEFT_OUT = ("kernels", "kernel_step.py", "page.py", "plot.py", "loggers.py")  # for a GPU, or for somebody who looks
TESTS = {  # beside those in the folder of a room; "": of all in ROOMS
    "": "cli/test_{data,grow,shrink,train,prepare,tokenizer,info_convert}.py infer/test_engine.py test_config.py"
    " hub/test_{official,folder,tools}.py test_before.py",
    "infer": "cli/test_{generate,captions,pairs,draw,predict}.py",
    "eval": "cli/test_{eval,captions,pairs,predict}.py",
    "adapters.py": "test_adapters.py hub/test_{adapter_folder,hf_adapters}.py cli/test_adapter.py",
    "hub": "cli/test_{info_convert,adapter}.py test_before.py",
    "data/images": "cli/test_{data_images,eval_images,predict}.py train/test_classify.py",
    "models/image.py": "models/test_image.py hub/test_hf_images.py train/test_classify.py",
    "ops/augment.py": "ops/test_augment.py train/test_classify.py",
    "train/classify.py": "train/test_classify.py cli/test_eval_images.py",
    "train/fp8.py": "train/test_fp8.py",
    "ops/fp8.py": "ops/test_fp8.py",
}
SLOW = ("tests/infer/test_kernels.py", "tests/serve/test_load.py")  # Triton's interpreter, and what only load shows
BY_CASE = ("tests/parallel/test_equal.py", "tests/parallel/test_tokens.py")  # all of their runs at once take minutes,
CASES = (  # so these alone are run, each by itself
    *"token2-adamw theta-softmax theta-gelu_l2_norm shard2-muon pipeline2-adamw pipeline2-interleaved-muon".split(),
    *"hybrid-adamw grow-token2 grow-both transformer-token2 llama-both whole-token2 joint offload zero2".split(),
)
ONLY = """
import os
{0} = {{name: run for name, run in {0}.items() if name in os.environ.get("ONLY", name).split()}}
"""
LOADED = "pytest hypothesis numpy yaml safetensors.torch tokenizers torch._dynamo torch.distributed.fsdp"
LOADED += " torch.distributed.checkpoint torch.distributed.pipelining torch.distributed.tensor.parallel"
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARE |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATE |= {ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
SAYING = set("print say tell UserError need key warn warning progress Progress ValueError TypeError sleep".split())
NO_SWAP = set("isinstance getattr hasattr next max min cast promote_types".split())  # fails at once, or changes nothing
NO_BUG = set("timeout seconds flush daemon non_blocking stacklevel strict maxsize".split())  # keywords


class Mutant(NamedTuple):
    room: str
    file: str
    line: int
    first: int  # a test that reaches a statement that begins on these lines may notice the bug
    last: int
    what: str
    old: str
    new: str
    text: str  # the whole file with the bug


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="bugs, equally many per room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help="folders or files of the package")
    parser.add_argument("--seconds", type=float, default=60, help="of tests per bug, as long as they take without it")
    parser.add_argument("--out", default="mutants.jsonl", help="one JSON line per bug")
    args = parser.parse_args()
    out = Path(args.out).resolve()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    chosen = draw(args.rooms, args.count, random.Random(args.seed))
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as work:
        tree = plant_tree(Path(work) / "tree")
        reach = out.with_suffix(".reach.jsonl")
        if not reach.exists():
            find_reach(tree, Path(work), reach, args.rooms)
        tests = [json.loads(line) for line in reach.read_text(encoding="utf-8").splitlines()]
        for module in LOADED.split():
            importlib.import_module(module)
        for mutant in chosen:
            place = {"file": mutant.file, "line": mutant.line, "old": mutant.old, "new": mutant.new}
            if not any(place.items() <= row.items() for row in rows):
                start = time.monotonic()
                verdict, by, why = judge(tree, mutant, tests, args.seconds)
                row = {"room": mutant.room, "what": mutant.what, **place, "verdict": verdict, "by": by, "why": why}
                rows.append({**row, "seconds": round(time.monotonic() - start, 1)})
                with open(out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1], ensure_ascii=False) + "\n")
                print(f"{verdict:10}{mutant.file}:{mutant.line}  {mutant.old}  →  {mutant.new}  {by}", flush=True)
    for room in (*args.rooms, ""):
        verdicts = [row["verdict"] for row in rows if row["room"].startswith(room)]
        found = len(verdicts) - verdicts.count("survived")
        print(f"{room or 'all':10}{found} of {len(verdicts)} caught, {verdicts.count('timed out')} of them by time")
    return 0


def draw(rooms: list[str], count: int, chance: random.Random) -> list[Mutant]:
    """Equally many of each room; inside a room, a kind of change first, so that rare kinds come too."""
    chosen: list[Mutant] = []
    for i, room in enumerate(rooms):
        kinds: dict[str, list[tuple]] = {}
        root = HERE / "tokenformer" / room
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            if not any(part in LEFT_OUT for part in path.relative_to(root.parent).parts[1:]):
                for what, node, new, where in changes(ast.parse(path.read_text(encoding="utf-8"))):
                    kinds.setdefault(what, []).append((path, node, new, where))
        while len(chosen) < count * (i + 1) // len(rooms):
            what = chance.choice(sorted(kind for kind in kinds if kinds[kind]))
            path, node, new, where = kinds[what].pop(chance.randrange(len(kinds[what])))
            source = path.read_text(encoding="utf-8")
            lines = source.encode().splitlines(keepends=True)  # columns of the tree count bytes
            first, last = node.lineno - 1, node.end_lineno - 1
            before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            text = b"".join([*lines[:first], before, new.encode(), after, *lines[last + 1 :]]).decode()
            old, file = " ".join(ast.get_source_segment(source, node).split()), str(path.relative_to(HERE))
            with contextlib.suppress(SyntaxError):
                compile(text, file, "exec")
                chosen.append(Mutant(room, file, node.lineno, *where, what, old[:90], new[:90], text))
    return chosen


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt, str, tuple[int, int]]]:
    """What could be changed: (kind, node, its new text, which lines a test has to reach)."""
    for node, where in running(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
            other = copy.deepcopy(node)
            other.ops[0] = COMPARE[type(node.ops[0])]()
            yield "comparison", node, f"({ast.unparse(other)})", where
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATE and not joins_text(node):
            other = copy.copy(node)
            other.op = OPERATE[type(node.op)]()
            yield "operator", node, f"({ast.unparse(other)})", where
        elif isinstance(node, ast.BoolOp):
            other = copy.copy(node)
            other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and, or", node, f"({ast.unparse(other)})", where
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            value = (not node.value) if isinstance(node.value, bool) else node.value + 1
            yield "constant", node, repr(value), where
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield "sign", node, f"({ast.unparse(node.operand)})", where
        elif isinstance(node, ast.Call) and len(node.args) > 1 and called(node) not in NO_SWAP:
            other = copy.copy(node)
            other.args = [node.args[1], node.args[0], *node.args[2:]]
            if ast.unparse(other) != ast.unparse(node) and not any(isinstance(a, ast.Starred) for a in node.args):
                yield "arguments", node, ast.unparse(other), where
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.NamedExpr | ast.UnaryOp | ast.Compare):  # those are changed above
                yield "condition", node.test, f"(not ({ast.unparse(node.test)}))", where
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not isinstance(node.value, ast.Yield):
            yield "left out", node, "pass", where


def joins_text(node: ast.BinOp) -> bool:
    """A path or a text, for which another operator is no mistake that anybody makes."""
    parts = (node.left, node.right)
    return any(
        isinstance(p, ast.JoinedStr) or (isinstance(p, ast.Constant) and isinstance(p.value, str)) for p in parts
    )


def running(node: ast.AST, where: tuple[int, int] = (1, 999), inside: bool = False) -> Iterator[tuple]:
    """What runs and matters, with its lines: the statement inside a function, the function of a default, else all."""
    if isinstance(node, ast.stmt) and inside:
        where = (node.lineno, node.lineno)
    elif isinstance(node, ast.FunctionDef):
        where, inside = (node.lineno, node.end_lineno or node.lineno), True
    yield node, where
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if called(child) == "need":  # need(what must hold, a sentence)
                    yield from running(child.args[0], where, inside)
                elif isinstance(child, ast.AST) and not only_said(child):
                    yield from running(child, where, inside)


def called(node: object) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def only_said(node: ast.AST) -> bool:
    """Text for a reader, or what makes nothing wrong."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or called(node.value) in SAYING - {"need"}
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    if isinstance(node, ast.keyword):
        return node.arg in NO_BUG
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert) or called(node) in SAYING


def plant_tree(folder: Path) -> Path:
    """A copy of what is tracked or new, where processes may mark what they reach and $ONLY names the parallel runs."""
    listed = subprocess.run(
        ["git", "-C", HERE, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (HERE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(HERE / name, folder / name)
    (folder / "sitecustomize.py").write_text(
        "import os\nif 'REACHED' in os.environ:\n    from tests.reach import leave_marks\n\n    leave_marks()\n"
    )
    for name, what in (("cases.py", "RUNS"), ("conftest.py", "COUNTS")):
        with open(folder / "tests" / "parallel" / name, "a", encoding="utf-8") as file:
            file.write(ONLY.format(what))
    return folder


def environment(tree: Path, tests: list[str]) -> dict[str, str]:
    cases = [re.search(r"\[(.*?)(-statistics\d)?\]", test)[1] for test in tests if test.startswith(BY_CASE)]
    found = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return found | ({"ONLY": " ".join(cases)} if cases else {})


def tests_of(rooms: list[str]) -> list[str]:
    """Of each room the doctests, its tests, and what else is its own. ROOMS are tested together."""
    old = [*ROOMS, ""] if set(rooms) & set(ROOMS) else []
    found: list[str] = []
    for room in [*old, *(room for room in rooms if room not in old)]:
        found += [f"tokenformer/{room}", f"tests/{room}"] * bool(room)
        for name in TESTS.get(room, "").split():
            before, many, after = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", name).groups()
            found += [f"tests/{before}{one}{after}" for one in (many or "").split(",")]
    return [name for name in dict.fromkeys(found) if (HERE / name).exists()]


def find_reach(tree: Path, work: Path, reach: Path, rooms: list[str]) -> None:
    """Runs their tests once, in a tree whose processes mark the statements that they execute."""
    marks = work / "marks"
    marks.write_bytes(bytes(400_000))  # 1,000 for each file
    settings = {"REACHED": str(marks), "TORCH_COMPILE_DISABLE": "1"}  # a mark would end a graph
    how = [sys.executable, "-m", "pytest", "-p", "tests.reach", "-p", "no:cacheprovider", "--tb=line"]
    how += ["-m", "not slow and not gpu and not hosts and not browser"]
    tests = [*tests_of(rooms), *(f"--ignore={file}" for file in (*BY_CASE, *SLOW))]
    for case in (None, *(CASES if set(rooms) & set(ROOMS) else ())):
        which = tests if case is None else [*BY_CASE, "-k", f"[{case}"]
        more = {} if case is None else {"ONLY": case}
        subprocess.run(
            [*how, *which], cwd=tree, env={**os.environ, **environment(tree, []), **settings, **more}, check=False
        )
    shutil.copyfile(f"{marks}.jsonl", reach)


def chosen_tests(mutant: Mutant, tests: list[dict], seconds: float) -> list[tuple[list[str], float]]:
    """The quickest that reach the bug, as long as the time allows: those of one process, then each parallel run."""
    lines = range(mutant.first, mutant.last + 1)
    found = [test for test in tests if any(line in lines for line in test["reached"].get(mutant.file, ()))]
    together: list[str] = []
    alone: list[tuple[list[str], float]] = []
    paid: set[str] = set()  # a fixture that tests share is made once
    spent = 0.0
    for test in sorted(found, key=lambda test: test["seconds"] + sum(test["shared"].values())):
        cost = test["seconds"] + sum(cost for name, cost in test["shared"].items() if name not in paid)
        if spent + cost > seconds and spent:
            break
        paid |= test["shared"].keys()
        spent += cost
        if test["test"].startswith(BY_CASE):
            alone.append(([test["test"]], cost))
        else:
            together.append(test["test"])
    return [(together, spent)] * bool(together) + alone


def judge(tree: Path, mutant: Mutant, tests: list[dict], seconds: float) -> tuple[str, str, str]:
    """(verdict, the test that failed, how). It counts if that test by itself fails with the bug and passes without."""
    path = tree / mutant.file
    kept = path.read_text(encoding="utf-8")
    batches = chosen_tests(mutant, tests, seconds)
    if not batches:
        return "survived", "", "no test reaches it"
    while batches:
        batch, cost = batches.pop(0)
        path.write_text(mutant.text, encoding="utf-8")
        try:
            failed, why = tested(tree, batch, 5 * cost + 60)
            alone = [failed if failed and "::" in failed else batch[0]]  # a file whose import fails has no test
            again = len(batch) > 1 and failed and tested(tree, alone, 5 * cost + 60)[0] is None
        finally:
            path.write_text(kept, encoding="utf-8")
        if failed == "":
            return "timed out", "", why
        if failed and not again and tested(tree, alone, 5 * cost + 60)[0] is None:
            return "caught", failed, why
        if failed:
            print(f"{failed} passes by itself" if again else f"{failed} fails without the bug too", flush=True)
            if failed in batch[:-1]:
                batches.insert(0, (batch[batch.index(failed) + 1 :], cost))
    return "survived", "", ""


class Witness:
    """A plugin of pytest that writes down which test failed first, and how."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.pytest_collectreport(report)

    def pytest_collectreport(self, report) -> None:
        if report.failed and not self.file.exists():
            said = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.file.write_text(json.dumps([report.nodeid, (said or report.longreprtext.splitlines()[-1:])[0][:200]]))


def tested(tree: Path, tests: list[str], seconds: float) -> tuple[str | None, str]:
    """The first test that failed, or None, and how. Past the time it is ""."""
    witness, log = tree.parent / "witness", tree.parent / "log"
    temporary = tempfile.mkdtemp(dir=tree.parent)  # another each time: a disk that a test mounted may stay
    witness.unlink(missing_ok=True)
    for cache in (tree / "tokenformer").rglob("__pycache__"):  # a process that was given no environment wrote it
        shutil.rmtree(cache)
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(tree)
        os.environ |= environment(tree, tests)
        sys.path[0], sys.dont_write_bytecode = str(tree), True
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code: int = 1
        try:
            words = ["-x", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={temporary}", *tests]
            code = int(importlib.import_module("pytest").main(words, plugins=[Witness(witness)]))
        finally:
            os._exit(code)
    end, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < end:
        time.sleep(0.05)
        found, status = os.waitpid(pid, os.WNOHANG)
        status = status if found else None
    if status is None:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "", f"no end after {seconds:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the tests left running
    if witness.exists():
        return tuple(json.loads(witness.read_text()))
    if status:
        return tests[0], "\n".join(log.read_text(errors="replace").splitlines()[-3:])[-300:]
    return None, ""


if __name__ == "__main__":
    sys.exit(main())
