"""Tables and progress: by rich (imported when it is used) on a terminal, as plain lines elsewhere."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Print a table; columns of nothing but numbers are aligned to the right."""
    right = [bool(rows) and all(_numeric(str(row[i])) for row in rows) for i in range(len(head))]
    if not sys.stdout.isatty():
        cells = [[str(c) for c in row] for row in [head, *rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        if title:
            print(title)
        for row in cells:
            parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
            print("  ".join(parts).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left")
    for name, numbers in zip(head, right, strict=True):
        grid.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        grid.add_row(*(str(c) for c in row))
    Console().print(grid)


def in_words(size: float) -> str:
    """Return a number of bytes as people say it.

    >>> in_words(812), in_words(8_120_000), in_words(1_234_567_890)
    ('812 bytes', '8.1 MB', '1.2 GB')
    """
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def drop_output() -> None:
    """Discard what is still to be printed: its reader has gone, or its disk is full."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _numeric(text: str) -> bool:
    return text.lstrip("-+")[:1].isdigit() or text in ("", "–")


@contextlib.contextmanager
def progress(title: str, total: float | None, unit: str = "", before: float = 0.0) -> Iterator[Callable[[float], None]]:
    """Show on standard error how much of a total is done, as `meter` does; `advance(amount)` adds to it. `before`: what
    was done earlier and counts in no rate.

    >>> with progress("counting", 3) as advance:
    ...     for _ in range(3):
    ...         advance(1)
    """
    done, start = 0.0, time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done
        done += amount
        rate = f", {done / (time.monotonic() - start + 1e-9):,.0f}{unit}/s" if unit else ""
        show(before + done, f"{before + done:,.0f}{unit}{rate}")

    with meter(title, total, before) as show:
        yield advance


@contextlib.contextmanager
def meter(title: str, total: float | None, before: float = 0.0) -> Iterator[Callable[[float, str], None]]:
    """Show progress and a note (rates, counts) by `show(done, note)`: a bar on a terminal, a line every 10 s in a log.

    >>> with meter("reading", 100) as show:
    ...     show(50, "3 MB/s")
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        percent, left = TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn()
        columns = [TextColumn("{task.description}"), BarColumn(), percent, TextColumn("{task.fields[note]}"), left]
        if not total:
            columns = [column for column in columns if column not in (percent, left)]
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total, completed=int(before), note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
        return
    start = time.monotonic()
    printed = start - 8  # the first line comes after 2 s

    def show(done: float, note: str) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= 10:
            printed = now
            share = f"{100 * done / total:.0f} %, " if total else ""
            new = done - before
            left = f", {(now - start) * (total - done) / new:.0f} s left" if total and new else ""
            print(f"{title}: {share}{note}{left}", file=sys.stderr, flush=True)

    yield show
