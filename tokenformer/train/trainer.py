"""One loop for every task, parallelism and precision: build → resume → loop → close. No callbacks.

Unusual: nothing reads the device between two log lines; whether a step is skipped (its loss or gradient is not finite)
is decided on the device; all that a checkpoint must keep is in `parts`; all refusals come before anything is written.
"""

import contextlib
import dataclasses
import functools
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tokenformer import config as native
from tokenformer.config import Config
from tokenformer.config_growth import GrowthStage
from tokenformer.errors import UserError, out_of_memory
from tokenformer.files import is_full, write_text, writing
from tokenformer.growth import progressive
from tokenformer.growth.stages import Progress, chain, check_passed, check_reached, check_units, due, spent, step_of
from tokenformer.growth.stages import rate as rate_factor
from tokenformer.hub.adapter_folder import ABOUT, AdapterFile
from tokenformer.hub.open import pick_device
from tokenformer.hub.run_folder import Found, all_steps, sweep
from tokenformer.hub.sidecars import read_config, read_history, sidecars
from tokenformer.models import build as build_model
from tokenformer.models.cost import training_flops_per_sample
from tokenformer.ops import pattention
from tokenformer.parallel.mesh import Place, check
from tokenformer.parallel.parallelize import Build, Parallelizer
from tokenformer.strict import to_yaml
from tokenformer.train import adapting, checkpoint, fp8, freezing, growing, loggers
from tokenformer.train.average import Average
from tokenformer.train.caption import CaptionTask
from tokenformer.train.checkpoint import CheckpointFailed, Checkpoints
from tokenformer.train.classify import ClassifyTask
from tokenformer.train.compile import allow_compilations, choose_compiler, wrap
from tokenformer.train.draw import DrawTask
from tokenformer.train.health import Guard, Spikes
from tokenformer.train.host import check_host_memory
from tokenformer.train.language import LanguageTask
from tokenformer.train.optim import Optimizer
from tokenformer.train.pair import PairTask
from tokenformer.train.report import Clock, Report, Silent, Totals, memory, peak_flops, profiler
from tokenformer.train.rules import State
from tokenformer.train.run import ELSEWHERE, changes, earlier, less_memory, lock, resume_command, with_batch_sizes
from tokenformer.train.schedule import factor
from tokenformer.train.signals import caught_signals
from tokenformer.train.start import first_values, inherit_files
from tokenformer.train.task import Task

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None, "fp8": torch.bfloat16}
TASKS: dict[str, type[Task]] = {"language": LanguageTask, "classify": ClassifyTask, "pair": PairTask}
TASKS |= {"caption": CaptionTask, "draw": DrawTask}
SHARES = ("top1", "top5", "image_to_text_r1", "text_to_image_r1")  # what a validation prints, where a task measures it


class Trainer:
    """Trains the model of a config and writes a run folder. `run()` returns the signal that ended it early, or None.

    `resume` continues from the newest checkpoint of the run, or begins if there is none. `task` and `build` are for
    tasks and models that the package does not know: a class like `Task`, and a function from a config to a model.
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
        self.make_task, self.build_model = task or choose_task(config), freezing.builder(build or build_model, config)
        self.command, self.step = command or sys.argv, 0
        self.asked = 0  # the signal that this process got
        self.stop: signal.Signals | None = None  # the signal that some rank got, once all ranks know of it

    def run(self) -> signal.Signals | None:
        try:
            self.build()
            with contextlib.ExitStack() as held, caught_signals(self.ask_to_stop, once=self.place.alone):
                self.place.run_on_first(lambda: self.lock_folder(held))
                self.resume()
                try:
                    self.loop()
                    self.close()
                finally:
                    self.report.close()
        except (MemoryError, RuntimeError) as error:
            if (said := out_of_memory(error)) is None:
                raise
            then = f"go on with: {self.resume_command}" if all_steps(self.folder) else "start again"
            raise UserError(f"{said} in step {self.step + 1}: give {less_memory(self.config)}, and {then}") from None
        self.place.leave()
        return self.stop

    # build: everything that can be refused is checked, nothing is written

    def build(self) -> None:
        self.inspect_run()
        self.open_task()
        c, done = self.config, len(self.grown.steps)
        dtype = COMPUTE[c.train.precision]
        self.pattention_path = pattention.backend(torch.empty(0, dtype=dtype, device=self.device))
        self.compiler = choose_compiler(c.train, self.device)
        first, history = None, []  # from a checkpoint they come later
        if c.adapter and self.base:  # what a checkpoint does not hold comes from there, too
            self.base.opened.check_tokenizer(self.task.files().get("tokenizer.json"))
            self.build_model = adapting.builder(self.build_model, self.base, c.adapter)
            first, history = adapting.first_values(self.base, c.seed, self.base.opened.model.ends), self.base.history
            dtype = dtype or torch.float32  # the base may be held in bf16
        elif self.found.path is None:
            first, history, said = first_values(c, self.build_model, self.task.files())
            self.said += said
        self.place.start(self.device)  # so far every rank checked for itself; from here on they communicate
        c = self.config = fp8.choose(c, self.chain, self.device, self.compiler, self.place, self.said.append)
        torch.manual_seed(c.seed)
        if self.compiler != "none":
            allow_compilations(self.chain[done:])
        block = functools.partial(wrap, config=c.train, compiler=self.compiler)
        self.parallelizer = Parallelizer(self.build_model, self.place, self.device, dtype, block)
        self.layout = self.parallelizer.make(self.chain[done], first)
        self.model, self.cost = self.layout.model, self.layout.model.cost()
        self.model.history = history
        if self.base:
            self.layout.elsewhere = {name for name, p in self.layout.named.items() if not p.requires_grad}
            self.base = None  # its tensors are in the model now
        shares = {}
        if done:
            shares = growing.after_growth(self.layout, self.build_model, self.chain[done - 1], self.stages[done - 1])
        self.optimizer = Optimizer(self.layout, c.optimizer, shares)
        self.average = Average(c.train.ema, self.layout) if c.train.ema else None
        self.guard, self.spikes = Guard(c.train, self.device), Spikes(c.train.spike)
        self.totals = Totals(self.task.unit)
        self.parts: dict = {"guard": self.guard, "spikes": self.spikes, "totals": self.totals, "growth": self.grown}
        self.parts["loader"] = self.task.loader
        self.checkpoints = Checkpoints(self.folder, c.checkpoint, self.place, self.device)
        self.recent: list[Tensor] = []  # (loss, norm, skipped, scale) of each step since the last log line

    def inspect_run(self) -> None:
        """Find what the folder holds and which models the run passes through; check that they can be trained here."""
        self.place = Place(self.config.parallel)
        small_first = not isinstance(self.config.growth, list)
        self.config, self.stages = progressive.resolve(self.config)
        self.said = progressive.describe(self.config) if small_first else []
        self.base = None
        if self.config.adapter:
            self.config, self.base = adapting.find_base(self.config, self.config.adapter)
        before = earlier(self.folder, self.resuming)
        self.steps_before = before.steps if before else None
        self.config = fp8.as_before(self.config, before)
        self.config = with_batch_sizes(self.config, self.place.data_world, self.place.degrees.pipeline, before)
        self.changes = [] if before is None else changes(self.folder, before, self.config)
        self.seen, self.found = all_steps(self.folder), Found(None, [], [])
        self.device = self.place.device(pick_device(self.config.train.device, "train.device="))
        self.chain, self.grown = chain(self.base.model if self.base else self.config.model, self.stages), Progress()
        self.costs = [training_flops_per_sample(model) for model in self.chain]
        if before is not None:
            self.place.start(self.device)
            self.found = checkpoint.find_together(self.folder, self.place, self.config.checkpoint.verify)
        if self.found.path is not None:
            with checkpoint.expected_form(self.found.path):
                self.grown.load_state_dict(checkpoint.read_state(self.found.path)["growth"])
            check_passed(self.stages, self.grown, self.folder)
            done = len(self.grown.steps)
            if done >= len(self.chain) or read_config(self.found.path / "model") != self.chain[done]:
                after = f" after its first {done} growths" if done else ""
                raise UserError(
                    f"the model in {self.found.path} is not the one that the config describes{after}: "
                    "resume with the config that the run was made with"
                )
        if self.config.train.ema and self.place.degrees.pipeline > 1:
            raise UserError(
                f"train.ema is {self.config.train.ema} and parallel.pipeline {self.place.degrees.pipeline}, but the "
                "average is not kept for stages of a pipeline: leave one of them out"
            )
        freezing.check(self.config, self.stages)
        fp8.check(self.config, self.chain, self.device)
        for model in self.chain[len(self.grown.steps) :]:  # this one and those to come
            check(model, self.place.degrees, self.config.parallel)
        known = self.build_model is build_model and not self.base and not self.config.model.trunks
        if self.device.type == "cpu" and self.place.alone and known:
            check_host_memory(dataclasses.replace(self.config, model=self.chain[-1]))
        loggers.check(self.config)

    def open_task(self) -> None:
        """Open the data; their warnings are printed when the run begins."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self.task = self.make_task(self.config, self.place, self.device)
        inherit_files(self.task, self.found.path, self.config)
        self.notes = sorted({str(w.message) for w in caught if w.category is UserWarning})
        check_units(self.stages, self.task.unit)
        check_reached(self.stages, self.grown, self.config.steps, self.task.units_per_step)

    def lock_folder(self, held: contextlib.ExitStack) -> None:
        """Lock the folder, and clear its checkpoints of those that are not whole."""
        if (self.folder / ".lock").exists() and not self.seen:
            self.notes.append(f"{self.folder} has no checkpoint: it is begun again")
        held.enter_context(lock(self.folder))
        if all_steps(self.folder) != self.seen:  # another process had the lock before
            raise UserError(f"another process trained {self.folder} meanwhile: go on with: {self.resume_command}")
        with writing(f"the run {self.folder}", ELSEWHERE):
            self.notes += sweep(self.folder, self.found)

    # resume: from the newest whole checkpoint, or from the beginning

    def resume(self) -> None:
        if (found := self.found.path) is not None:
            state = checkpoint.read_state(found)
            self.step = state["step"]
            self.place.run_on_each(lambda: checkpoint.read_model(found, self.layout))
            self.model.history = read_history(found / "model")
            state_by_name: State = {}
            self.place.run_on_each(lambda: state_by_name.update(checkpoint.read_optimizer(found, self.layout)))
            self.optimizer.load_state_by_name(state_by_name)
            if self.average:
                self.average = Average(self.average.decay, self.layout, checkpoint.read_average(found, self.layout))
            with checkpoint.expected_form(found):
                for name, part in self.parts.items():
                    part.load_state_dict(state[name])
                checkpoint.restore_rng(state["rng"])
            self.checkpoints.saved = self.step
        self.report: Report | Silent = Silent()
        self.place.run_on_first(self.open_report)
        self.describe_run()
        self.batches = iter(self.task.loader)
        self.clock = Clock()

    def open_report(self) -> None:
        with writing(f"the run {self.folder}", ELSEWHERE):
            write_text(self.folder / "config.yml", native.to_yaml(self.config))
            self.report = Report(self.folder, self.config, self.step, self.command)

    def describe_run(self) -> None:
        c, say = self.config, self.report.say
        recipe = f"{c.optimizer.kind}, {c.train.precision}, {self.device.type}, {self.place.degrees}"
        kinds = dict.fromkeys(trunk.kind for trunk in c.model.trunks.values() or [c.model])
        say(f"{self.folder}: {' and '.join(kinds)} of {self.cost.parameters:,} parameters, {recipe}")
        shares = f" = {c.micro_batch} × {self.task.loader.micro_batches} accumulated × {self.place.data_world} ranks"
        shares = shares if c.micro_batch != c.batch else ""
        say(f"batch {c.batch}{shares}, {self.task.units_per_step:,} {self.task.unit} per step, {c.steps} steps")
        if c.adapter:
            count = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            say(f"an adapter of {count:,} parameters learns; {c.start} ({str(c.adapter.base)[:12]}) is frozen")
        if "tokenformer" in kinds:
            path = self.pattention_path
            if path == "reference" and self.device.type == "cpu":
                say("Pattention runs in plain PyTorch: the kernels are for GPUs")
            else:
                say(f"Pattention is computed by the {path} path (TOKENFORMER_PATTENTION chooses)")
        if self.compiler != "none":
            say(f"blocks are compiled by {self.compiler} in the first step (train.compile=none turns it off)")
        if self.found.path is not None:
            say(f"going on from step {self.step} ({self.found.path})")
        changed = [f"changed since the last start: {change}" for change in self.changes]
        for line in (*self.said, *self.found.notes, *self.notes, *changed, *self.describe_steps()):
            say(line)

    def describe_steps(self) -> list[str]:
        """Say what another number of steps means for a run that is resumed."""
        c = self.config
        if self.found.path is not None and self.step >= c.steps:
            return [f"all {c.steps} steps are done: give more, such as steps={2 * max(1, self.step)}, to train on"]
        if self.steps_before in (None, c.steps) or any(line.startswith("optimizer.rate:") for line in self.changes):
            return []
        last = max(self.step, min(c.steps, self.steps_before or 0) - 1)
        rates = [(self.rate(step), self.rate(step, self.steps_before)) for step in (self.step, last)]
        other = next((pair for pair in rates if pair[0] != pair[1]), None)
        if other is None:
            return ["the learning rate goes on as it would have"]
        how = f" (schedule.steps={self.steps_before} would keep it)" if c.schedule.count == "steps" else ""
        where = "goes on at" if other is rates[0] else f"is the same here, and at step {last}"
        rate = f"{where} {other[0]:.3g}, not {other[1]:.3g}{how}"
        return [f"the schedule now ends at step {c.steps}: the learning rate {rate}"]

    # loop: maybe grow → micro-batches → gradients → clip, check → rate → optimizer → maybe {log, validate, save}

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
        """Tell whether some rank was asked to stop: then all of them stop after the same step, of many one later."""
        number = self.place.max_of_last_call(self.asked)
        self.stop = signal.Signals(number) if number else None
        return self.stop is not None

    def train_step(self) -> None:
        """Update by the gradient of the mean loss over all ranks and micro-batches: ∇ Σ total / Σ count.

        Each micro-batch is differentiated as total · scale / expected: `scale` is fp16's loss scale (else 1), and
        `expected` is Σ count where nothing is masked, so that fp16 gradients have the size of a mean's. Backward passes
        and ranks add up, so the accumulated gradients are G = scale / expected · ∇ Σ total, and the gradient of the
        mean is G / (scale · normaliser) with normaliser = Σ count / expected. Clipping multiplies this divisor by
        max(1, norm / clip), and the optimizer divides by it when it reads G.
        """
        expected = self.task.units_per_step
        scale = self.guard.scale / expected
        fp8.keep_weights(self.model, self.config, self.place.alone)
        total, count = self.task.gradients(self.model, self.batches, scale, self.layout.pipeline)
        total, count = self.place.sum(torch.stack([total, count]))
        self.layout.collect_gradients()
        divisor, skip, norm = self.guard.check(self.layout.norm(), total, count / expected)
        self.optimizer.step(self.rate(self.step), divisor, skip)
        if self.average:
            self.average.update(self.step)
        self.layout.zero_grad()
        self.recent.append(torch.stack([total / count, norm, skip, self.guard.scale]))
        self.guard.update(skip)

    def rate(self, step: int, steps: int | None = None) -> float:
        """Return the learning rate in a step of this run, or of one with another number of steps."""
        c = self.config

        def before(step: int) -> int:
            to_come = [step_of(stage, self.task.units_per_step) for stage in self.stages[len(self.grown.steps) :]]
            return spent(self.costs, [*self.grown.steps, *to_come], step)

        steps = c.steps if steps is None else steps
        return c.optimizer.rate * rate_factor(self.stages, self.grown, step, steps, c.schedule, factor, before)

    def grow(self, stage: GrowthStage) -> None:
        """Grow the model and its optimizer. The state before is saved, and a rerun from there gives the same bits."""
        self.log()
        self.save(wait=True)
        with self.clock.aside():
            before, number = self.cost.parameters, len(self.model.history)
            losses = [self.measures().get("loss")]
            self.layout, self.optimizer, self.average, said = growing.grow(
                self.layout, self.optimizer, stage, number, self.config.seed, self.parallelizer, self.average
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
        """Read from the device the loss and norm of every step since the last log line, and report them."""
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
            **self.task.logged(),
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
                more = "".join(f", {name} {found[name]:.2%}" for name in SHARES if name in found)
                self.report.say(f"step {self.step}: validation loss {found['loss']:.4f}{more}")
            if self.layout.pipeline is None and (made := self.task.sample(self.model)):
                self.report.sample(self.step, made)
            self.model.train()

    @torch.no_grad()
    def measures(self) -> dict[str, float]:
        with self.average.in_place() if self.average else contextlib.nullcontext():
            return self.task.measures(self.layout.pipeline or self.model)

    def save(self, wait: bool = False) -> None:
        begin = time.monotonic()
        with self.clock.aside():
            self.wait_for_checkpoint()
            if self.checkpoints.saved == self.step:
                return
            state = {"format": 1, "step": self.step, "rng": checkpoint.rng_state()}
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            beside = sidecars(self.model.config, self.model.history) | {**self.task.inherited, **self.task.files()}
            if (adapter := self.config.adapter) is not None:
                beside[ABOUT] = to_yaml(AdapterFile(str(self.config.start), str(adapter.base)))
            with self.failures_reported():
                average = self.average.tensors if self.average else None
                self.checkpoints.save(self.step, self.layout, self.optimizer.state_by_name(), beside, state, average)
            if wait:
                self.wait_for_checkpoint()
        self.report.row("checkpoint", self.step, idle=time.monotonic() - begin)  # seconds that training stood still

    def wait_for_checkpoint(self) -> None:
        with self.failures_reported():
            self.checkpoints.wait()

    @contextlib.contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Report a checkpoint that could not be written; end the run if the config says so."""
        try:
            yield
        except CheckpointFailed as error:
            self.report.row("event", self.step, what="checkpoint failed", reason=str(error))
            said = f"{error}; the checkpoints before it are untouched"
            if self.config.checkpoint.on_failure == "stop":
                do = "make room" if is_full(error) else "mend that"
                raise UserError(f"{said}: {do}, then go on with: {self.resume_command}") from error
            self.report.say(f"{said}, and training goes on")

    # close: save, and say how to continue

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
    def resume_command(self) -> str:
        return resume_command(self.folder, self.place.alone)

    def ask_to_stop(self, number: int) -> None:
        self.asked = number


def choose_task(config: Config) -> type[Task]:
    """Return the task that a config names, or that of its model."""
    name = config.task or {"image": "classify"}.get(config.model.of, config.model.of)
    if name not in TASKS:
        raise UserError(f"task is '{name}', but must be {', '.join(TASKS)}; or give `Trainer` a `task`")
    return TASKS[name]
