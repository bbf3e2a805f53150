"""Finds the checkpoints of a run folder, and the newest one that is whole; removes old ones. Imports without torch.

Unusual: `last` is a note for people. Which checkpoint is used follows from the folders themselves, in the same way for
`train --resume` and for every verb that takes a run.
"""

import contextlib
import functools
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenformer.errors import UserError
from tokenformer.files import check_manifest, write_text
from tokenformer.parsing import first_text, is_file, read_json, shown


class Found(NamedTuple):
    """The newest whole checkpoint of a run (None where the run has none at all), and the damaged ones newer than it."""

    path: Path | None
    damaged: list[Path]
    notes: list[str]  # a sentence about each of them, and about a `last` that names nothing


def all_steps(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, oldest first."""
    named = [(path.name[5:], path) for path in (run / "checkpoints").glob("step-*")]
    return dict(sorted((int(step), path) for step, path in named if step.isascii() and step.isdigit()))


def remove_old(run: Path, keep: int, keep_every: int) -> None:
    """Remove all checkpoints but the newest `keep` (0: all are kept) and those at multiples of `keep_every` steps."""
    steps = all_steps(run)
    for step in list(steps)[:-keep] if keep else []:
        if not (keep_every and step % keep_every == 0):
            hidden = steps[step].with_name(f".{steps[step].name}")
            os.rename(steps[step], hidden)  # at once, so that half a checkpoint is never seen
            shutil.rmtree(hidden)


def find_newest(run: Path, check: Callable[[Path], None] = check_manifest) -> Found:
    """Find the newest checkpoint that `check` does not refuse: its files are those of its manifest.

    Refuse a run where all are damaged.
    """
    steps, damaged, notes = all_steps(run), [], []
    last = run / "checkpoints" / "last"
    try:
        named = first_text(last).strip() if is_file(last) else None
        if named is not None and named not in {path.name for path in steps.values()}:
            notes.append(f"{last} names {shown(named)}, which is not there")
    except UserError as error:
        notes.append(_without_advice(error))
    for path in reversed(steps.values()):
        try:
            check(path)
            return Found(path, damaged, notes)
        except (UserError, OSError) as error:
            damaged.append(path)
            notes.append(f"the checkpoint {path} is damaged ({_without_advice(error)})")
    others = sorted(path.name for path in last.parent.glob("[!.]*")) if not steps else []
    notes += [f"{last.parent} holds {shown(', '.join(others))} alone"] if others else []
    if notes:
        raise UserError(f"no checkpoint of {run} is whole: put one back from a copy; {'; '.join(notes)}")
    return Found(None, [], [])


def sweep(run: Path, found: Found) -> list[str]:
    """Remove what a killed process left half-written or half-removed, and rename damaged checkpoints.

    Return a sentence for each of these, which keep their files; `last` then names the checkpoint in use.
    """
    said = []
    for path in (run / "checkpoints").glob(".*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in found.damaged:
        names = (path.with_name(f"{path.name}.damaged{n or ''}") for n in itertools.count())
        aside = next(name for name in names if not name.exists())
        os.rename(path, aside)
        said.append(f"the damaged {path.name} is kept aside as {aside}: delete it when you need it no more")
    if found.path is not None and found.notes:
        write_text(run / "checkpoints" / "last", found.path.name + "\n")
    return said


def _without_advice(error: Exception) -> str:
    return str(error).rsplit(": ", 1)[0]


def newest_whole(run: Path, values: bool = True) -> Path | None:
    """Return the newest whole checkpoint of a run that is only read; print which damaged ones were passed over."""
    path, _, notes = find_newest(run, functools.partial(check_manifest, values=values))
    for note in notes:
        _print_once(f"tokenformer: {note}: {path} is used")
    return path


@functools.cache  # a verb may ask for it several times
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def read_state(checkpoint: Path) -> dict:
    """Read what a run keeps beside its tensors."""
    state = read_json(checkpoint / "state.json")
    with expected_form(checkpoint):
        if type(state["step"]) is not int or checkpoint.name != f"step-{state['step']:08d}":
            raise ValueError(f"step is {state['step']!r:.40}")
    return state


@contextlib.contextmanager
def expected_form(checkpoint: Path) -> Iterator[None]:
    """Refuse in a sentence a state that is not of the form that a run writes."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{checkpoint / 'state.json'} is not of the form that a run writes ({why}): move {checkpoint} away to use "
            "the checkpoint before it"
        ) from None
