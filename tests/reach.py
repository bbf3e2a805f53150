"""Which statements of the package a test reaches, and how long it takes: a plugin of pytest for mutate.py.

    python -m pytest -p tests.reach …     (in the tree that mutate.py prepares)

Every statement leaves a mark in a file of one byte per line. All processes share the file, so what workers and command
lines execute counts too, also where they are killed. torch.compile knows no marks: it has to be switched off.
"""

import ast
import builtins
import json
import mmap
import os
import time
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path

from pluggy import HookimplMarker

TREE = Path(__file__).resolve().parents[1]
WIDTH = 1000  # more than any file has lines
FILES = [path.relative_to(TREE).as_posix() for path in sorted((TREE / "tokenformer").rglob("*.py"))]
FILES = [name for name in FILES if "/kernels/" not in name]  # Triton reads their text


class Marking(ast.NodeTransformer):
    """Writes `__reached__[place] = 1` before every statement but docstrings and imports of __future__."""

    def __init__(self, first: int) -> None:
        self.first = first

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [new for statement in statements for new in self.marked(statement)])
        return node

    def marked(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            return [statement]
        mark = ast.parse(f"__reached__[{self.first + statement.lineno}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        return [mark, statement]


def leave_marks() -> None:
    """From now on this process marks what it executes. `sitecustomize.py` calls this in every process."""
    with open(os.environ["REACHED"], "r+b") as file:
        builtins.__reached__ = mmap.mmap(file.fileno(), 0)
    first = {str(TREE / name): number * WIDTH for number, name in enumerate(FILES)}
    plain = SourceFileLoader.source_to_code

    def source_to_code(self, data, path, **options):
        if path in first:
            data = ast.fix_missing_locations(Marking(first[path]).visit(ast.parse(data)))
        return plain(self, data, path, **options)

    SourceFileLoader.source_to_code = source_to_code


hookimpl = HookimplMarker("pytest")  # pytest itself would slow down every process of the tests
seen: set[int] = set()  # marks of the test that runs now
shared: dict[str, tuple[float, set[int]]] = {}  # seconds and marks of each fixture that outlasts a test
skipped: set[str] = set()


def take() -> set[int]:
    """The marks since the last call."""
    marks = builtins.__reached__
    found = {place for place, byte in enumerate(marks[:]) if byte}
    for place in found:
        marks[place] = 0
    return found


def name_of(fixture) -> str:
    return f"{fixture.baseid}::{fixture.argname}"


@hookimpl
def pytest_configure(config) -> None:
    """A file of the package that pytest is given would be loaded by pytest's own loader, which leaves no marks."""
    for name in set(config.args) & set(FILES):
        import_module(name.removesuffix(".py").replace("/", "."))


@hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share is reached by each of them, not by the first alone."""
    if fixturedef.scope == "function":
        return (yield)
    seen.update(take())
    start = time.perf_counter()
    try:
        return (yield)
    finally:
        seconds, marks = shared.get(name_of(fixturedef), (0.0, set()))
        shared[name_of(fixturedef)] = (seconds + time.perf_counter() - start, marks | take())


def pytest_runtest_logreport(report) -> None:
    if report.skipped:
        skipped.add(report.nodeid)


@hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    seen.clear()
    take()
    before, start = sum(seconds for seconds, _ in shared.values()), time.perf_counter()
    try:
        return (yield)
    finally:
        seen.update(take())
        seconds = time.perf_counter() - start - sum(seconds for seconds, _ in shared.values()) + before
        info = getattr(item, "_fixtureinfo", None)
        used = {name_of(one) for many in info.name2fixturedefs.values() for one in many} if info else set()
        used &= shared.keys()
        places = seen.union(*(shared[name][1] for name in used))
        reached = {name: [] for number, name in enumerate(FILES) if any(p // WIDTH == number for p in places)}
        for place in sorted(places):
            reached[FILES[place // WIDTH]].append(place % WIDTH)
        row = {"test": item.nodeid, "seconds": seconds, "shared": {n: shared[n][0] for n in used}, "reached": reached}
        if item.nodeid not in skipped:
            with open(os.environ["REACHED"] + ".jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
