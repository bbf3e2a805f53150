"""What the user sees: a live line on a terminal, plain lines elsewhere and in `log`, and always metrics.jsonl.

MFU = training FLOPs per unit (attention counted once) · units/s / the GPU's dense 16-bit peak; none if that is unknown.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import platform
import resource
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer import __version__
from tokenformer.config import Config
from tokenformer.errors import UserError
from tokenformer.files import write_text
from tokenformer.parsing import read_json
from tokenformer.terminal import drop_output
from tokenformer.train import loggers

if TYPE_CHECKING:
    import torch

LONGEST = 1 << 20  # bytes of a line of metrics.jsonl
# Dense 16-bit TFLOP/s by a part of the name that CUDA gives; longer names first where one holds another.
PEAKS = {
    "GB200": 2500, "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989,
    "A100": 312, "A800": 312, "L40S": 362, "L4": 121, "A40": 150, "A10": 125, "A6000": 155, "4090": 165, "3090": 71,
    "V100": 125, "T4": 65,
}  # fmt: skip


def peak_flops(device: "torch.device", precision: str) -> float | None:
    """Return the 16-bit peak of a known GPU; None for everything else: a guessed MFU is worse than none."""
    if device.type != "cuda" or precision == "fp32":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in PEAKS.items() if part in name), None)


def environment(command: list[str]) -> dict[str, Any]:
    """Describe what this start of a run is made with."""
    root, commit = Path(__file__).resolve().parents[2], None
    if (root / ".git").exists() and shutil.which("git"):  # a checkout, not a package inside somebody else's
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
        commit = git.stdout.strip() or None
    torch, more = sys.modules.get("torch"), {}  # a twin in another framework reports without it
    if torch is not None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        more = {"torch": torch.__version__, "gpu": gpu, "threads": torch.get_num_threads()}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "tokenformer": __version__,
        "commit": commit,
        "python": platform.python_version(),
        **more,
        "platform": platform.platform(),
    }


class Lines:
    """A file that lines are appended to. What cannot be written now (the disk is full) is kept and written later."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""

    def add(self, line: str) -> OSError | None:
        """Append a line, or return the error. The file never holds a part of a line."""
        self.waiting += (line + "\n").encode(errors="replace")
        try:
            with open(self.path, "ab", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                if file.write(self.waiting) < len(self.waiting):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return error
        self.waiting = b""
        return None


class Report:
    """Reports one run from `step` on. Rows of later steps, which a resumed run repeats, are dropped.

    Making one may raise OSError. After that no failure to report ends the run: each is printed once.
    """

    def __init__(self, run: Path, config: Config, step: int, command: list[str]) -> None:
        self.run, self.config = run, config
        self.log, self.metrics = Lines(run / "log"), Lines(run / "metrics.jsonl")
        self.failing: set[str] = set()  # what was said to fail, and does still
        starts = read_json(run / "environment.json") if (run / "environment.json").is_file() else {}
        starts.setdefault("id", secrets.token_hex(4))
        if not isinstance(starts.setdefault("starts", []), list):
            raise UserError(f"{run / 'environment.json'} is not what a run writes: restore it or move it away")
        starts["starts"].append({"step": step, **environment(command)})
        write_text(run / "environment.json", json.dumps(starts, indent=1) + "\n")
        if self.metrics.path.is_file():
            rows = [row for row in read_rows(run) if row["step"] < step or (row["step"] == step and not grown(row))]
            write_text(self.metrics.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self.loggers = loggers.open_loggers(config, run, starts["id"], step)
        self.begin = time.monotonic()
        self.bar = _bar(config.steps, step) if sys.stdout.isatty() else None

    def say(self, text: str) -> None:
        """Print a line, and append it to `log`."""
        self._add(self.log, text)
        try:
            if self.bar is not None:
                self.bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)
        except OSError as error:
            if isinstance(error, BrokenPipeError):  # its reader left
                drop_output()
            self._failed("standard output", error)

    def row(self, kind: str, step: int, **values: Any) -> None:
        """Add a line to metrics.jsonl, and its numbers to the loggers. A number that is not finite becomes null."""
        values = {name: _finite(value) for name, value in values.items()}
        row = {"kind": kind, "step": step, "seconds": round(time.monotonic() - self.begin, 3), **values}
        self._add(self.metrics, json.dumps(row, ensure_ascii=False))
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        for logger in list(self.loggers):
            try:
                logger.log(step, numbers)
            except Exception as error:  # another package's, of whatever kind
                self.loggers.remove(logger)
                self._failed(f"log.{logger.name}", error)

    def sample(self, step: int, made: Mapping[str, str | bytes]) -> None:
        """Keep the samples of a task: text in the metrics and as a line, bytes as files of samples/STEP/."""
        texts = {name: content for name, content in made.items() if isinstance(content, str)}
        if texts:
            self.row("sample", step, **texts)
        for text in texts.values():
            self.say(f"step {step}: sample: {text!r}")
        folder = self.run / "samples" / f"{step}"
        for name, content in made.items():
            if isinstance(content, bytes):
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content)
                except OSError as error:
                    self._failed("samples", error)
                else:
                    self.say(f"step {step}: sample: {folder / name}")

    def progress(self, step: int, values: dict[str, Any]) -> None:
        """Add the training row of a log step, and show its line."""
        self.row("train", step, **values)
        line = describe(step, self.config.steps, values)
        if self.bar is not None:
            self._add(self.log, line)
            self.bar.update(self.bar.task_ids[0], completed=step, description=line)
        else:
            self.say(line)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        for logger in self.loggers:
            try:
                logger.close()
            except Exception as error:
                self._failed(f"log.{logger.name}", error)
        if "standard output" in self.failing:  # what is left of it would change the code that Python leaves with
            drop_output()

    def _add(self, lines: Lines, line: str) -> None:
        error = lines.add(line)
        if error is None:
            self.failing.discard(str(lines.path))
        else:
            self._failed(str(lines.path), error)

    def _failed(self, what: str, error: Exception) -> None:
        """Print that something cannot be written, once until it can be again."""
        if what not in self.failing:
            self.failing.add(what)
            why = (isinstance(error, OSError) and error.strerror) or error
            said = f"{what} cannot be written ({why}): training goes on without it"
            self.log.add(said)
            with contextlib.suppress(OSError):
                print(f"tokenformer: {said}", file=sys.stderr, flush=True)


class Silent:
    """The report of every rank but the first: each of its methods does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **named: None


@dataclasses.dataclass
class Totals:
    """What the run has cost so far, in the task's unit (tokens, images, …)."""

    unit: str
    units: int = 0
    flops: float = 0.0
    hours: float = 0.0  # of training; validation and saving do not count

    def state_dict(self) -> dict:
        return {self.unit: self.units, "flops": self.flops, "hours": self.hours}

    def load_state_dict(self, state: dict) -> None:
        self.units, self.flops, self.hours = int(state[self.unit]), float(state["flops"]), float(state["hours"])


class Clock:
    """The time spent training since it was last asked for, without validation and saving (`aside`)."""

    def __init__(self) -> None:
        self.since, self.not_counted = time.monotonic(), 0.0

    def training(self) -> float:
        now = time.monotonic()
        taken = now - self.since - self.not_counted
        self.since, self.not_counted = now, 0.0
        return max(taken, 1e-9)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.not_counted += time.monotonic() - begin


def describe(step: int, steps: int, values: dict[str, Any]) -> str:
    """Return the line of a log step.

    >>> describe(40, 100, {"loss": 2.5, "rate": 1e-3, "tokens_per_second": 5e4, "memory": 3e9, "left": 75, "mfu": None})
    'step 40/100  loss 2.5000  rate 1.00e-03  50,000 tokens/s  3.0 GB  1:15 left'
    """
    loss = values["loss"]
    parts = [f"step {step}/{steps}", f"loss {math.nan if loss is None else loss:.4f}", f"rate {values['rate']:.2e}"]
    unit = unit_of(values)
    parts.append(f"{values[f'{unit}_per_second']:,.0f} {unit}/s")
    if values["mfu"] is not None:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    parts.append(f"{values['memory'] / 1e9:.1f} GB")
    if values.get("damaged"):
        parts.append(f"{values['damaged']:,} damaged {unit}")
    minutes, seconds = divmod(round(values["left"]), 60)
    hours, minutes = divmod(minutes, 60)
    parts.append((f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}") + " left")
    return "  ".join(parts)


def unit_of(row: Mapping[str, Any]) -> str:
    """Return what a training row counts: tokens, images, …"""
    return next(name.removesuffix("_per_second") for name in row if name.endswith("_per_second"))


def memory(device: "torch.device | None" = None) -> int:
    """Return the most bytes held so far: on the GPU, or by this process."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def grown(row: dict) -> bool:
    """Tell whether a row is a growth: it comes after the checkpoint of its step, so resuming there repeats it."""
    return row["kind"] == "event" and row.get("what") == "growth"


def _finite(value: Any) -> Any:
    """Return what stands in metrics.jsonl for a value."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(run: str | Path) -> list[dict]:
    """Read the rows of a run's metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    path = Path(run) / "metrics.jsonl"
    try:
        with open(path, "rb") as file:
            while line := file.readline(LONGEST):
                if len(line) == LONGEST:
                    raise UserError(f"{path} has a line of a megabyte, which no run writes: mend it or move it away")
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict) and isinstance(row.get("step"), int) and "kind" in row:
                    rows.append({name: _finite(value) for name, value in row.items()})
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): mend it or move it away") from None
    return rows


def _bar(steps: int, step: int) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
    bar.add_task("starting", total=steps, completed=step)
    bar.start()
    return bar


def profiler(run: Path, say: Callable[[str], None]) -> "torch.profiler.profile":
    """Return a profiler that writes a trace into the run's folder when it is stopped."""
    import torch

    def export(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(run / "trace.json"))
        say(f"trace of the profiled steps: {run / 'trace.json'} (open it in chrome://tracing or ui.perfetto.dev)")

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=kinds, on_trace_ready=export)
