"""What studies share: arms (single runs) that are run once and remembered, within a time; grids; their arguments.

A script of a study has `sys.path.insert(1, str(Path(__file__).parents[1]))` before it imports this file.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T, R = TypeVar("T"), TypeVar("R")


class OutOfTime(Exception):
    pass


class Arms:
    """Runs arms that are not done yet, and remembers what they gave: a line of FOLDER/arms.jsonl each.

    `tell` says what one gave. With `processes`, as many are run at once, in workers that `begin` made ready: small
    models leave most of a GPU idle. Whoever wants an arm then waits for it in a thread (`each`).
    """

    def __init__(
        self, folder: Path, tell: Callable[[dict], str], seconds: float = 1e9,
        processes: int = 0, begin: Callable | None = None, given: tuple = (),
    ) -> None:  # fmt: skip
        self.file, self.tell, self.end = folder / "arms.jsonl", tell, time.monotonic() + seconds
        lines = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        if lines and not lines[-1].endswith("\n"):  # cut by a kill
            self.file.write_text("".join(lines := lines[:-1]))
        self.done: dict[str, dict] = {entry["name"]: entry for entry in map(json.loads, lines)}
        self.asked: dict[str, Future] = {}
        self.ran: list[str] = []
        self.places, self.lock = threading.Semaphore(max(1, processes)), threading.Lock()
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(processes, spawn, begin, given) if processes else None

    def once(self, name: str, keys: Mapping, work: Callable, given: Any, needed: Callable[[], float]) -> dict:
        """Return the line of an arm: `keys` and what `work(given)` returns. `needed`: the seconds that it may take."""
        with self.lock:
            if name in self.done:
                return self.done[name]
            mine = name not in self.asked
            future = self.asked.setdefault(name, Future())
        if mine:  # somebody else may want the same, and then waits for it
            try:
                future.set_result(self._start(name, keys, work, given, needed))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _start(self, name: str, keys: Mapping, work: Callable, given: Any, needed: Callable[[], float]) -> dict:
        with self.places:
            if needed() > self.end - time.monotonic():
                print(f"not begun, {needed():.0f} s are needed: {name}", flush=True)
                raise OutOfTime
            print(f"begun: {name}", flush=True)
            begun = time.monotonic()
            facts = self.pool.submit(work, given).result() if self.pool else work(given)
        entry = {"name": name, **keys, "seconds": time.monotonic() - begun, **facts}
        self.add(entry)
        self.ran.append(name)
        print(f"{name}: {self.tell(entry)}, {entry['seconds']:.0f} s", flush=True)
        return entry

    def add(self, entry: dict) -> None:
        with self.lock:
            with open(self.file, "a") as file:
                file.write(json.dumps(entry) + "\n")
            self.done[entry["name"]] = entry
            self.asked.pop(entry["name"], None)

    def pace(self, of: Callable[[dict], float | None], first: float) -> float:
        """Return one and a half times the median of what arms needed so far, as `of` says it; before any, `first`."""
        found = [value for entry in list(self.done.values()) if (value := of(entry)) is not None]
        return 1.5 * statistics.median(found) if found else first

    def phases(self, table: Mapping[str, Callable[[], object]], at_once: bool = False) -> None:
        """Run phases, in threads or one after the other. When time is over, arms under way end and are kept."""
        try:
            if at_once:
                each(table.values(), lambda phase: phase())
            else:
                for phase in table.values():
                    phase()
            print("complete", flush=True)
        except OutOfTime:
            print("out of time: start it again to go on", flush=True)
        finally:
            if self.pool:
                self.pool.shutdown()


def each(things: Iterable[T], do: Callable[[T], R]) -> list[R]:
    """Return what `do` gives for each thing, in threads; all end before an error is raised, OutOfTime last."""
    things = list(things)
    with ThreadPoolExecutor(max(1, len(things))) as threads:
        found = [threads.submit(do, thing) for thing in things]
    errors = [error for future in found if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, OutOfTime)):
        raise error
    return [future.result() for future in found]


def twofold(value: float, up: bool) -> float:
    return value * 2 if up else value / 2


def threefold(rate: float, up: bool) -> float:
    """Return the next rate of 1, 3, 10, 30, …

    >>> threefold(0.003, True), threefold(0.003, False), threefold(0.01, False)
    (0.01, 0.001, 0.003)
    """
    whole = f"{rate:.0e}"[0] == "3"
    return float(f"{rate * (10 / 3 if whole else 3) if up else rate / (3 if whole else 10 / 3):.0e}")


def best_of_grid(
    grid: Sequence[float], losses: Callable[[list[float]], list[float]], extensions: int, beside: Callable = twofold
) -> float:
    """Return the value of lowest loss. The grid is extended until that is inside, as often as is allowed.

    >>> best_of_grid([1, 2, 4], lambda grid: [abs(value - 7) for value in grid], extensions=2)
    8
    """
    values = sorted(grid)
    while True:
        found = [loss if math.isfinite(loss) else math.inf for loss in losses(values)]
        best = values[found.index(min(found))]
        if best not in (values[0], values[-1]) or not extensions:
            return best
        values, extensions = sorted([*values, beside(best, best == values[-1])]), extensions - 1


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error.

    >>> summary([1.0, 3.0])
    (2.0, 1.0)
    """
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.mean(values), deviation / math.sqrt(len(values))


def percent(values: Sequence[float]) -> str:
    """Return mean ± standard deviation in percent.

    >>> percent([0.1, 0.2]), percent([0.25])
    ('15.0 ± 7.1', '25.0')
    """
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def arguments(script: str, doc: str | None, phases: Iterable[str], processes: int = 0) -> argparse.ArgumentParser:
    """Return the arguments of a study's run.py."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--phase", nargs="+", choices=list(phases), default=list(phases))
    parser.add_argument("--seconds", type=float, default=1e9, help="an arm that would not end in time is not begun")
    parser.add_argument("--out", type=Path, default=Path(script).parent)
    parser.add_argument("--check", action="store_true", help="all phases at toy size on a CPU")
    if processes:
        parser.add_argument("--processes", type=int, default=processes, help="arms that are run at once")
    return parser


def report(script: str, doc: str | None, tables: Callable[[list[dict]], str], draw: Callable | None = None) -> None:
    """Be the main function of a study's report.py: print tables of its arms, and draw a figure where one is wanted."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(script).parent)
    if draw:
        parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    entries = {entry["name"]: entry for entry in map(json.loads, (args.out / "arms.jsonl").read_text().splitlines())}
    print(tables(list(entries.values())))
    if draw and args.figure:
        draw(list(entries.values()), args.figure)
