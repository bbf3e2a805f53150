"""One loop for every task, parallelism and precision: build → resume → loop → close. No callbacks.

Unusual: nothing reads the device between two log lines; a step with a non-finite loss or gradient is undone on the
device; everything that must survive is in `parts`; all that can be refused is refused before anything is written.
"""

import contextlib
import dataclasses
import functools
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tokenformer import config as native
from tokenformer.config import Config
from tokenformer.config_growth import GrowthStage
from tokenformer.errors import UserError, out_of_memory
from tokenformer.files import write_text
from tokenformer.growth import progressive
from tokenformer.growth.plan import plan_growth
from tokenformer.growth.stages import Progress, chain, check_reached, due, spent, step_of
from tokenformer.growth.stages import rate as rate_factor
from tokenformer.hub.folder import read_config, read_history, sidecars
from tokenformer.hub.open import pick_device
from tokenformer.hub.run_folder import Found, all_steps, find_newest
from tokenformer.models import build as build_model
from tokenformer.models.cost import sample_flops
from tokenformer.ops import pattention
from tokenformer.parallel.mesh import Place, check
from tokenformer.parallel.parallelize import Build, Parallelizer
from tokenformer.train import checkpoint, growing, loggers
from tokenformer.train.checkpoint import CheckpointFailed, Checkpoints
from tokenformer.train.compile import allow_compilations, choose_compiler, wrap
from tokenformer.train.health import Guard, Spikes
from tokenformer.train.language import LanguageTask
from tokenformer.train.optim import Optimizer
from tokenformer.train.report import Clock, Report, Silent, Totals, memory, peak_flops, profiler
from tokenformer.train.run import changes, earlier, lock, with_batch_sizes, writing
from tokenformer.train.schedule import factor
from tokenformer.train.start import first_values
from tokenformer.train.task import Task

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
TASKS: dict[str, type[Task]] = {"language": LanguageTask}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what Slurm is asked to send before preemption


class Trainer:
    """Trains what a config says into a run folder. `run()` returns the signal that ended it early, or None.

    `resume` goes on from the newest checkpoint of the run, or begins it where there is none. `task` and `build` are for
    tasks and models that the package does not know: a class like `Task`, and what makes a model from its config.
    """

    def __init__(
        self,
        config: Config,
        run: str | Path,
        *,
        resume: bool = False,
        command: list[str] | None = None,
        task: Callable[..., Task] | None = None,
        build: Build | None = None,
    ):
        self.config, self.folder, self.resuming = config, Path(run), resume
        self.make_task, self.build_model = task or choose_task(config), build or build_model
        self.command = command or sys.argv
        self.step = 0
        self.asked = 0  # the signal that this process got
        self.stop: signal.Signals | None = None  # the one that all ranks know of

    def run(self) -> signal.Signals | None:
        try:
            self.build()
            with contextlib.ExitStack() as held, self.signals():
                self.place.first_does(lambda: self.take(held))
                self.resume()
                try:
                    self.loop()
                    self.close()
                finally:
                    self.report.close()
        except (MemoryError, RuntimeError) as error:
            if (said := out_of_memory(error)) is None:
                raise
            raise UserError(f"{said} in step {self.step + 1}: {self.need_less}") from None
        self.place.leave()
        return self.stop

    def take(self, held: contextlib.ExitStack) -> None:
        """Lock the folder, and leave nothing in it that is no whole checkpoint."""
        if (self.folder / ".lock").exists() and not self.seen:
            self.notes.append(f"{self.folder} has no checkpoint: it is begun again")
        held.enter_context(lock(self.folder))
        if all_steps(self.folder) != self.seen:  # somebody was here before the lock
            raise UserError(f"another process trained {self.folder} meanwhile: go on with: {self.resume_command}")
        with writing(self.folder):
            self.notes += self.checkpoints.sweep(self.found)

    # build: all that can be refused, nothing written

    def build(self) -> None:
        self.look()
        self.open_task()
        c, done = self.config, len(self.grown.steps)
        dtype, split = COMPUTE[c.train.precision], self.place.degrees.token > 1  # of which there are no kernels yet
        like = torch.empty(0, dtype=dtype, device=self.device)
        self.pattention_path = pattention.backend(like, "reference" if split else None)
        self.compiler = choose_compiler(c.train, self.device)
        first = first_values(c, self.build_model, self.task.files()) if self.found.path is None else None
        self.place.start(self.device)  # so far every rank checked for itself; from here on they act together
        torch.manual_seed(c.seed)
        if self.compiler != "none":
            allow_compilations(self.chain[done:])
        block = functools.partial(wrap, config=c.train, compiler=self.compiler)
        self.parallelizer = Parallelizer(self.build_model, self.place, self.device, dtype, block)
        self.layout = self.parallelizer.make(self.chain[done], first)
        self.model, self.cost = self.layout.model, self.layout.model.cost()
        shares = self.after_growth(done) if done else {}
        self.optimizer = Optimizer(self.layout, c.optimizer, shares)
        self.guard, self.spikes = Guard(c.train, self.device), Spikes(c.train.spike)
        self.totals = Totals(self.task.unit)
        parts: dict = {"guard": self.guard, "spikes": self.spikes, "totals": self.totals, "loader": self.task.loader}
        self.parts = {**parts, "growth": self.grown}
        self.checkpoints = Checkpoints(self.folder, c.checkpoint, self.place)
        self.recent: list[Tensor] = []  # (loss, norm, skipped, scale) of each step since the last log line

    def look(self) -> None:
        """What stands in the folder, and which models the run passes through."""
        self.place = Place(self.config.parallel)
        small_first = not isinstance(self.config.growth, list)
        self.config, self.stages = progressive.resolve(self.config)
        self.said = progressive.describe(self.config) if small_first else []
        before = earlier(self.folder, self.resuming)
        if before is not None and self.config.batch is None:
            self.config = dataclasses.replace(self.config, batch=before.batch)
        self.config = with_batch_sizes(self.config, self.place.data_world, self.place.degrees.pipeline)
        self.changes = [] if before is None else changes(self.folder, before, self.config)
        self.seen, self.found = all_steps(self.folder), Found(None, [], [])
        self.device = self.place.device(pick_device(self.config.train.device, "train.device="))
        self.chain, self.grown = chain(self.config.model, self.stages), Progress()
        self.costs = [sample_flops(model) for model in self.chain]
        if before is not None:  # the first rank reads every byte, and the others use what it found whole
            self.place.start(self.device)
            self.found = self.place.first_does(lambda: find_newest(self.folder))
        if self.found.path is not None:
            with checkpoint.expected_form(self.found.path):
                self.grown.load_state_dict(checkpoint.read_state(self.found.path)["growth"])
            done = len(self.grown.steps)
            if done >= len(self.chain) or read_config(self.found.path / "model") != self.chain[done]:
                raise UserError(
                    f"{self.found.path} holds a model that the config does not lead to by {done} growths: "
                    "resume with the config that the run was made with"
                )
        for model in self.chain[len(self.grown.steps) :]:  # this one and those to come
            check(model, self.place.degrees, self.config.parallel)
        loggers.check(self.config)

    def open_task(self) -> None:
        """Open the data; what they warn of is said when the run begins."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self.task = self.make_task(self.config, self.place, self.device)
        self.notes = sorted({str(w.message) for w in caught if w.category is UserWarning})
        for name in {name for stage in self.stages for name in stage.at} - {"step", "plateau", "patience"}:
            if name != self.task.unit:
                raise UserError(f"growth.at names {name}, but this task counts {self.task.unit}: give these, or a step")
        check_reached(self.stages, self.grown, self.config.steps, self.task.units_per_step)

    def after_growth(self, done: int) -> dict[str, float]:
        """Freeze what the growth before this start froze; the share of the rate of what learns more slowly."""
        stage, before = self.stages[done - 1], self.chain[done - 1]
        with torch.device("meta"):
            names = [name for name, _ in self.build_model(before).named_parameters()]
        growth = plan_growth(before, names, stage, ends=self.model.ends)
        self.layout.freeze(growing.frozen(growth, stage))
        return growing.rates(growth, stage)

    # resume: from the newest complete checkpoint, or from the beginning

    def resume(self) -> None:
        if (found := self.found.path) is not None:
            state = checkpoint.read_state(found)
            self.step = state["step"]
            checkpoint.read_model(found, self.layout)
            self.model.history = read_history(found / "model")
            self.optimizer.load_state_by_name(checkpoint.read_optimizer(found, self.layout))
            with checkpoint.expected_form(found):
                for name, part in self.parts.items():
                    part.load_state_dict(state[name])
                checkpoint.restore_rng(state["rng"])
            self.checkpoints.saved = self.step
        self.report: Report | Silent = Silent()
        self.place.first_does(self.open_report)
        self.announce()
        self.batches = iter(self.task.loader)
        self.clock = Clock()

    def open_report(self) -> None:
        with writing(self.folder):
            write_text(self.folder / "config.yml", native.to_yaml(self.config))
            self.report = Report(self.folder, self.config, self.step, self.command)

    def announce(self) -> None:
        c, say = self.config, self.report.say
        recipe = f"{c.optimizer.kind}, {c.train.precision}, {self.device.type}, {self.place.degrees}"
        say(f"{self.folder}: {c.model.kind} of {self.cost.parameters:,} parameters, {recipe}")
        shares = f"{c.micro_batch} × {self.task.loader.micro_batches} accumulated × {self.place.data_world} ranks"
        say(f"batch {c.batch} = {shares}, {self.task.units_per_step:,} {self.task.unit} per step, {c.steps} steps")
        if any(trunk.kind == "tokenformer" for trunk in c.model.trunks.values() or [c.model]):
            path = self.pattention_path
            why = ", the kernels being for GPUs" if path == "reference" and self.device.type == "cpu" else ""
            say(f"Pattention is computed by the {path} path{why} (TOKENFORMER_PATTENTION chooses)")
        if self.compiler != "none":
            say(f"blocks are compiled by {self.compiler} in the first step (train.compile=none turns it off)")
        if self.found.path is not None:
            say(f"going on from step {self.step} ({self.found.path})")
        changed = [f"changed since the last start: {change}" for change in self.changes]
        for line in (*self.said, *self.found.notes, *self.notes, *changed):
            say(line)

    # loop: micro-batches → gradients → (clip, check) → optimizer → schedule → maybe {log, validate, save}

    def loop(self) -> None:
        c = self.config
        self.model.train()
        window = range(c.log.profile[0], sum(c.log.profile)) if c.log.profile else range(0)
        trace = None
        if self.step == 0 and 0 in c.checkpoint.also:
            self.save()
        while self.step < c.steps and not self.stopping():
            while stage := due(self.stages, self.grown, self.step, self.task.units_per_step):
                self.grow(stage)
            if self.step in window and trace is None:
                trace = profiler(self.folder, self.report.say)
                trace.start()
            self.train_step()
            self.step += 1
            if trace is not None and self.step not in window:
                trace.stop()
                trace = None
            save = self.checkpoints.due(self.step)
            if self.step % c.log.every == 0 or save or self.step == c.steps:
                self.log()
            if (c.validation.every and self.step % c.validation.every == 0) or self.step == c.steps:
                self.validate()
            if save:
                self.save()
        if trace is not None:
            trace.stop()

    def stopping(self) -> bool:
        """Whether some rank was asked to stop: all of them do after the same step."""
        number = self.place.agree(self.asked)
        self.stop = signal.Signals(number) if number else None
        return self.stop is not None

    def train_step(self) -> None:
        """One update by the gradient of the mean loss over all ranks and micro-batches: ∇ Σ total / Σ count.

        Each micro-batch is differentiated as total · scale / expected: `scale` is fp16's loss scale (else 1), and
        `expected`, what Σ count would be if everything counted, makes fp16 gradients those of a mean. Backward passes
        and ranks add up, so what lies in the gradients is G = scale / expected · ∇ Σ total, and the gradient of the
        mean is G / (scale · normaliser) with normaliser = Σ count / expected. Clipping multiplies this divisor by
        max(1, norm / clip), and the optimizer divides by it while it reads G.
        """
        expected = self.task.units_per_step
        scale = self.guard.scale / expected
        total, count = self.task.gradients(self.model, self.batches, scale, self.layout.pipeline)
        total, count = self.place.sum(torch.stack([total, count]))
        self.layout.collect_gradients()
        divisor, skip, norm = self.guard.check(self.layout.norm(), total, count / expected)
        self.optimizer.step(self.rate(self.step), divisor, skip)
        self.layout.clear()
        self.recent.append(torch.stack([total / count, norm, skip, self.guard.scale]))
        self.guard.update(skip)

    def rate(self, step: int) -> float:
        c = self.config

        def before(step: int) -> int:
            to_come = [step_of(stage, self.task.units_per_step) for stage in self.stages[len(self.grown.steps) :]]
            return spent(self.costs, [*self.grown.steps, *to_come], step)

        return c.optimizer.rate * rate_factor(self.stages, self.grown, step, c.steps, c.schedule, factor, before)

    def grow(self, stage: GrowthStage) -> None:
        """A step like the others. What was before it is saved, and a rerun from there is the same to the bit."""
        self.log()
        self.save(wait=True)
        with self.clock.aside():
            before, number = self.cost.parameters, len(self.grown.steps)
            losses = [self.measures().get("loss")]
            self.layout, self.optimizer, said = growing.grow(
                self.layout, self.optimizer, stage, number, self.config.seed, self.parallelizer
            )
            self.grown.grew(self.step)
            self.model, self.cost = self.layout.model, self.layout.model.cost()
            losses = [loss for loss in (*losses, self.measures().get("loss")) if loss is not None]
        after, seen = f"{self.cost.parameters:,}", " → ".join(f"{loss:.5f}" for loss in losses)
        self.report.row("event", self.step, what="growth", to=after, losses=losses, how=self.model.history[-1])
        said_loss = f", validation loss {seen}" if seen else ""
        self.report.say(f"step {self.step}: grown from {before:,} to {after} parameters{said_loss}")
        if said:
            self.report.say(said)

    def log(self) -> None:
        """Reads the device once: what every step since the last log line had."""
        if not self.recent:
            return
        rows = torch.stack(self.recent).tolist()
        self.recent = []
        taken = self.clock.training()
        for step, (loss, _, skipped, _) in enumerate(rows, self.step - len(rows) + 1):
            if skipped:
                self.report.row("event", step, what="skipped", loss=loss)
                self.report.say(f"step {step} was skipped: its loss or gradient is not finite")
            elif self.spikes(loss):
                self.report.row("event", step, what="spike", loss=loss)
                self.report.say(f"step {step}: the loss jumped to {loss:.4f} (mean {self.spikes.mean:.4f})")
        good = [row for row in rows if not row[2]]
        units, flops = len(rows) * self.task.units_per_step, self.task.flops(self.cost)
        self.totals.units += units
        self.totals.flops += units * flops
        self.totals.hours += taken / 3600
        peak = peak_flops(self.device, self.config.train.precision)
        values = {
            "loss": sum(row[0] for row in good) / len(good) if good else math.nan,
            "norm": rows[-1][1],
            "rate": self.rate(self.step - 1),
            **self.totals.state_dict(),
            f"{self.task.unit}_per_second": units / taken,
            "mfu": flops * units / taken / peak if peak and flops else None,
            "memory": memory(self.device),
            "left": (self.config.steps - self.step) * taken / len(rows),
        }
        if self.guard.scaled:
            values["loss_scale"] = rows[-1][3]
        self.report.progress(self.step, values)
        in_a_row = int(self.guard.in_a_row)
        if in_a_row >= self.config.train.skip_limit:
            self.save(wait=True)
            raise UserError(
                f"the loss or gradient was not finite in {in_a_row} steps in a row, up to step {self.step}: the state "
                f"before them is kept in {self.folder / 'checkpoints'}; lower optimizer.rate or look at the data"
            )

    @torch.no_grad()
    def validate(self) -> None:
        with self.clock.aside():
            self.model.eval()
            found = self.measures()
            if found:
                if self.config.validation.every and self.step % self.config.validation.every == 0:
                    self.grown.losses.append(found["loss"])  # not the one at the end: another run might go further
                self.report.row("validation", self.step, **found)
                self.report.say(f"step {self.step}: validation loss {found['loss']:.4f}")
            if self.layout.pipeline is None and (made := self.task.sample(self.model)):
                self.report.sample(self.step, made)
            self.model.train()

    @torch.no_grad()
    def measures(self) -> dict[str, float]:
        return self.task.measures(self.layout.pipeline or self.model)

    def save(self, wait: bool = False) -> None:
        with self.clock.aside():
            self.collect()
            if self.checkpoints.saved == self.step:
                return
            state = {"format": 1, "step": self.step, "rng": checkpoint.rng_state()}
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            beside = sidecars(self.model.config, self.model.history) | self.task.files()
            try:
                self.checkpoints.save(self.step, self.layout, self.optimizer.state_by_name(), beside, state)
            except CheckpointFailed as error:
                self.failed(error)
            if wait:
                self.collect()

    def collect(self) -> None:
        """Wait for a checkpoint that is being written in the background, and hear how it went."""
        try:
            self.checkpoints.wait()
        except CheckpointFailed as error:
            self.failed(error)

    def failed(self, error: CheckpointFailed) -> None:
        self.report.row("event", self.step, what="checkpoint failed", reason=str(error))
        said = f"{error}; the checkpoints before it are untouched"
        if self.config.checkpoint.on_failure == "stop":
            raise UserError(f"{said}: make room or mend that, then go on with: {self.resume_command}") from error
        self.report.say(f"{said}, and training goes on")

    # close: nothing is lost, and the user knows how to go on

    def close(self) -> None:
        self.log()
        self.save(wait=True)
        saved = f"its state is in {self.folder / 'checkpoints'}" if self.checkpoints.saved == self.step else "not saved"
        if self.stop is None:
            self.report.say(f"done after step {self.step}; {saved}")
        else:
            stopped = f"stopped by {self.stop.name} after step {self.step}; {saved}"
            self.report.say(f"{stopped}; go on with: {self.resume_command}")

    @property
    def need_less(self) -> str:
        """What to do where the memory does not suffice."""
        micro = self.config.micro_batch or 1
        less = f"micro_batch={max(1, micro // 2)} (it is {micro}; the batch of {self.config.batch} stays as it is)"
        if micro == 1:
            less = "train.activation_checkpointing=full, a larger parallel.shard or a smaller model (micro_batch= is 1)"
        saved = all_steps(self.folder)
        return f"give {less}, and {f'go on with: {self.resume_command}' if saved else 'start again'}"

    @property
    def resume_command(self) -> str:
        many = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE')} -m "
        return f"{'' if self.place.alone else many}tokenformer train {self.folder} --resume"

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """The first signal asks the loop to end after its step; a second one ends the process as usual.

        A rank of many hears each one several times, from the launcher and from Slurm: it just goes on leaving.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, _frame: object) -> None:
            self.asked = number
            for each in SIGNALS if self.place.alone else ():
                signal.signal(each, before[each])

        before = {each: signal.getsignal(each) for each in SIGNALS}
        for each in SIGNALS:
            signal.signal(each, ask)
        try:
            yield
        finally:
            for each in SIGNALS:
                signal.signal(each, before[each])


def choose_task(config: Config) -> type[Task]:
    """Return the task that a config names, or else the one of its model."""
    name = config.task or config.model.of
    if name not in TASKS:
        raise UserError(f"task is '{name}', but must be {', '.join(TASKS)}; or give `Trainer` a `task`")
    return TASKS[name]
