"""Training: the config, the data and their order, the schedule, growth and the run folder of `tokenformer`, in JAX.

Unusual: nothing reads the devices between two log lines; a run folder, and a checkpoint in it, has the form that
PyTorch's side reads, and the other way round.
"""

import contextlib
import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from tokenformer import config as native
from tokenformer.config import Config, ModelConfig
from tokenformer.config_data import IGNORED
from tokenformer.config_growth import GrowthStage
from tokenformer.data.text.samples import training_text
from tokenformer.errors import UserError
from tokenformer.files import atomic_folder, write_text, writing
from tokenformer.growth import progressive, stages
from tokenformer.growth.plan import Plan, plan_growth
from tokenformer.hub.open import Opened, locate
from tokenformer.hub.run_folder import Found, expected_form, find_newest, read_state, remove_old, sweep
from tokenformer.hub.sidecars import read_config, read_history, sidecars
from tokenformer.models.cost import cost, training_flops_per_sample
from tokenformer.models.names import parse
from tokenformer.train import loggers
from tokenformer.train.report import Clock, Report, Silent, Totals, memory
from tokenformer.train.run import ELSEWHERE, changes, earlier, lock, with_batch_sizes
from tokenformer.train.schedule import factor
from tokenformer.train.signals import caught_signals
from tokenformer_jax import values
from tokenformer_jax.folder import check_params, load, read_tensors, write_tensors
from tokenformer_jax.generate import generator
from tokenformer_jax.mesh import make_mesh, placement, put, put_rows, whole
from tokenformer_jax.model import ENDS, How, check, loss, shapes
from tokenformer_jax.step import State, fresh, train_step


def check_recipe(c: Config) -> None:
    """Refuse what a run in JAX does not do."""
    refused: dict[str, Any] = {"adapter": c.adapter, "task": c.task not in (None, "language") and c.task}
    refused |= {"train.precision": c.train.precision in ("fp16", "fp8") and c.train.precision, "train.ema": c.train.ema}
    refused |= {"train.drop_path": c.train.drop_path, "data.images": c.data.images, "log.profile": c.log.profile}
    refused |= {"optimizer.layer_decay": c.optimizer.layer_decay != 1 and c.optimizer.layer_decay}
    refused |= {"train.freeze": c.train.freeze != "none" and c.train.freeze}
    for name, value in refused.items():
        if value:
            said = f"{name} is {str(value)[:40]}, which there is not in JAX"
            raise UserError(f"{said}: leave it out, or use `tokenformer`")


class Trainer:
    """Trains the model of a config into a run folder. `run()` returns the signal that ended it early, or None."""

    def __init__(self, config: Config, run: str | Path, *, resume: bool = False) -> None:
        """Open and check everything; nothing is written yet."""
        self.folder, self.step, self.asked, self.saved = Path(run), 0, 0, -1
        self.alone, self.first = jax.process_count() == 1, jax.process_index() == 0
        c, self.stages = progressive.resolve(config)
        check_recipe(c)
        loggers.check(c)
        before = earlier(self.folder, resume)
        c = dataclasses.replace(c, batch=before.batch) if before and c.batch is None else c
        self.mesh = make_mesh(c.parallel, c.train.device)
        self.rows = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        self.share = self.rows // jax.process_count()  # of the rows, that is of devices that split a batch, here
        self.config = c = with_batch_sizes(c, self.rows)
        self.said = [f"changed: {line}" for line in changes(self.folder, before, c)] if before else []
        self.chain, self.grown = [check(model) for model in stages.chain(c.model, self.stages)], stages.Progress()
        self.costs = [training_flops_per_sample(model) for model in self.chain]
        for model in self.chain:
            [placement(name, shape, self.mesh) for name, shape in shapes(model).items()]  # refuses what cannot be split
        self.float = jax.dtypes.canonicalize_dtype(np.float64)  # of parameters: fp32, unless JAX_ENABLE_X64 is set
        self.how = How(
            jnp.bfloat16 if c.train.precision == "bf16" else None, c.train.activation_checkpointing, self.mesh
        )
        cut = {"micro_batch": (c.micro_batch or 1) * self.share, "rank": jax.process_index()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self.tokenizer, self.loader, self.held_out = training_text(c, world=jax.process_count(), **cut)
        self.said += sorted({str(w.message) for w in caught})
        self.units = (c.batch or 0) * c.model.context  # tokens per step
        self.totals, self.in_a_row = Totals("tokens"), 0  # of steps that were skipped
        self.parts = {"growth": self.grown, "loader": self.loader, "totals": self.totals}
        self.found = find_newest(self.folder) if before else Found(None, [], [])
        self.said += self.found.notes
        self.restore(self.found.path) if self.found.path else self.begin()
        stages.check_units(self.stages, "tokens")
        stages.check_reached(self.stages, self.grown, c.steps, self.units)

    def begin(self) -> None:
        """Begin with the initialisation, or with other weights."""
        c, self.history = self.config, []
        params = values.initial_params(self.chain[0], c.seed)
        if c.start:
            given = load(c.start)
            Opened(c.start, locate(c.start, values=False)).check_tokenizer(self.tokenizer.to_json())
            params, self.history = values.start_from(given.params, params, c.start), given.history
            self.said.append(f"a new run begins with the weights of {c.start}")
        self.install(self.chain[0], params, {})

    def restore(self, found: Path) -> None:
        """Continue from a checkpoint, also one that PyTorch wrote."""
        state = read_state(found)
        self.step = self.saved = state["step"]
        with expected_form(found):
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
        done = len(self.grown.steps)
        if done >= len(self.chain) or check(read_config(found / "model")) != self.chain[done]:
            raise UserError(f"the model in {found} is not the one that the config describes: give the run's own config")
        self.history, optim, params = read_history(found / "model"), values.State(), read_tensors(found / "model")
        check_params(self.chain[done], params, str(found))
        for name, array in read_tensors(found / "optim").items():
            kind, _, parameter = name.partition("/")
            optim.setdefault(parameter, {})[kind] = array
        self.install(self.chain[done], params, optim)
        self.said.append(f"going on from step {self.step} ({found})")

    def install(self, model: ModelConfig, params: values.Arrays, state: values.State) -> None:
        """Lay a model and its optimizer over the devices, and make the programs that compute it."""
        c, done, self.model = self.config, len(self.grown.steps), model
        self.params = put({name: array.astype(self.float) for name, array in params.items()}, self.mesh)
        self.state: State = {}
        for name, array in params.items():
            entry = state.get(name) or fresh(name, array.shape, c.optimizer)
            entry = {k: v.astype(self.float if v.ndim else np.float32) for k, v in entry.items()}
            self.state[name] = put(entry, self.mesh, name)
        frozen, shares = set(), {}
        if done and (stage := self.stages[done - 1]).old_tokens != 1:
            kept = self.plan(self.chain[done - 1], stage).kept
            frozen = kept if stage.old_tokens == 0 else set()
            shares = {name: stage.old_tokens for name in kept - frozen if parse(name, ENDS).token}
        self.train = train_step(c, model, self.how, frozen, shares)
        how = self.how._replace(remat="none")
        self.sums = jax.jit(lambda p, b: loss(p, model, b["ids"], b["labels"], b.get("documents"), how))
        self.generate = generator(model, How(how.dtype))

    def plan(self, before: ModelConfig, stage: GrowthStage, number: int = 0) -> Plan:
        return plan_growth(before, list(shapes(before)), stage, ends=ENDS, seed=self.config.seed, number=number)

    def run(self) -> int | None:
        with contextlib.ExitStack() as held:
            if self.first:
                held.enter_context(lock(self.folder))
            self.report = self.open_report()
            held.callback(self.report.close)
            if self.alone:  # several processes would stop after different steps
                held.enter_context(caught_signals(lambda number: setattr(self, "asked", number), once=True))
            self.loop()
        return self.asked or None

    def loop(self) -> None:
        c, batches, self.recent, self.clock = self.config, iter(self.loader), list[Array](), Clock()
        if self.step == 0 and 0 in c.checkpoint.also:
            self.save()
        while self.step < c.steps and not self.asked:
            while stage := stages.due(self.stages, self.grown, self.step, self.units):
                self.log()
                with self.clock.aside():
                    self.grow(stage)
            some = [next(batches).fields for _ in range(self.loader.micro_batches)]
            batch = {name: put_rows(np.stack([fields[name] for fields in some]), self.mesh, lead=1) for name in some[0]}
            rate = jnp.asarray(self.rate(self.step), self.float)
            self.params, self.state, numbers = self.train(self.params, self.state, batch, rate)
            self.recent.append(numbers)
            self.step += 1
            save = (c.checkpoint.every and self.step % c.checkpoint.every == 0) or self.step in c.checkpoint.also
            if self.step % c.log.every == 0 or save or self.step == c.steps:
                self.log()
            with self.clock.aside():
                if (c.validation.every and self.step % c.validation.every == 0) or self.step == c.steps:
                    self.validate()
                if save:
                    self.save()
        self.log()
        self.save()
        self.report.say(f"{'stopped' if self.asked else 'done'} after step {self.step}; its state is in {self.folder}")

    def rate(self, step: int) -> float:
        """Return the learning rate in a step, as the PyTorch trainer computes it."""
        c = self.config

        def before(step: int) -> int:
            to_come = [stages.step_of(stage, self.units) for stage in self.stages[len(self.grown.steps) :]]
            return stages.spent(self.costs, [*self.grown.steps, *to_come], step)

        return c.optimizer.rate * stages.rate(self.stages, self.grown, step, c.steps, c.schedule, factor, before)

    def grow(self, stage: GrowthStage) -> None:
        """Grow the model and its optimizer; the state before is saved, and a rerun from there gives the same bits."""
        self.save()
        plan, losses = self.plan(self.model, stage, len(self.history)), [self.measure()]
        params, state = {name: whole(array) for name, array in self.params.items()}, values.State()
        if stage.state == "keep":
            state = {name: {k: whole(v) for k, v in entry.items()} for name, entry in self.state.items()}
        self.grown.grew(self.step)
        self.install(check(plan.config), *values.grow(plan, params, state))
        self.history.append(plan.event)
        losses = [found for found in (*losses, self.measure()) if found is not None]
        sizes = [f"{cost(model).parameters:,}" for model in self.chain[len(self.grown.steps) - 1 :]]
        self.report.row("event", self.step, what="growth", to=sizes[1], losses=losses, how=plan.event)
        seen = f", validation loss {' → '.join(f'{loss:.5f}' for loss in losses)}" if losses else ""
        self.report.say(f"step {self.step}: grown from {sizes[0]} to {sizes[1]} parameters{seen}")

    def measure(self) -> float | None:
        """Return the mean loss over the held-out samples, the same ones each time; None if there are none."""
        if not self.held_out.samples:
            return None
        total = count = 0.0
        self.held_out.samples_seen = 0
        for batch in self.held_out:
            fields = {}
            for name, rows in batch.fields.items():  # rows are added until every device has as many
                more, filler = [(0, -len(rows) % self.share), (0, 0)], IGNORED if name == "labels" else 0
                fields[name] = put_rows(np.pad(rows, more, constant_values=filler), self.mesh)
            found = self.sums(self.params, fields)
            total, count = total + float(found[0]), count + float(found[1])
            if batch.last:
                break
        return total / count

    def validate(self) -> None:
        found, v = self.measure(), self.config.validation
        if found is not None:
            if v.every and self.step % v.every == 0:
                self.grown.losses.append(found)  # not the one at the end: another run might go further
            self.report.row("validation", self.step, loss=found, perplexity=math.exp(min(found, 700)))
            self.report.say(f"step {self.step}: validation loss {found:.4f}")
        if v.generate and self.alone:
            ids = np.array([self.tokenizer.encode(v.prompt) or [self.tokenizer.end_of_document]])
            made = self.generate(self.params, ids, v.generate, v.temperature, seed=self.config.seed)
            self.report.sample(self.step, {"text": self.tokenizer.decode(made[0].tolist())})

    def open_report(self) -> Report | Silent:
        """Clear what a killed process left half-written, write the config, and say what is trained."""
        if not self.first:
            return Silent()
        with writing(f"the run {self.folder}", ELSEWHERE):
            self.said += sweep(self.folder, self.found)
            write_text(self.folder / "config.yml", native.to_yaml(self.config))
            report = Report(self.folder, self.config, self.step, sys.argv)
        where = f"{self.mesh.devices.flat[0].platform}, {', '.join(f'{k} {v}' for k, v in self.mesh.shape.items())}"
        recipe = f"{self.config.optimizer.kind}, {self.config.train.precision}, {where}"
        for line in (f"{self.folder}: tokenformer of {cost(self.model).parameters:,} parameters, {recipe}", *self.said):
            report.say(line)
        return report

    def log(self) -> None:
        """Read from the devices what every step since the last log line found, and report it."""
        if not self.recent:
            return
        rows, self.recent = np.stack(jax.device_get(self.recent)).tolist(), []
        taken, units = self.clock.training(), len(rows) * self.units
        for step, (found, _, skipped) in enumerate(rows, self.step - len(rows) + 1):
            self.in_a_row = self.in_a_row + 1 if skipped else 0
            if skipped:
                self.report.row("event", step, what="skipped", loss=found)
                self.report.say(f"step {step} was skipped: its loss or gradient is not finite")
        good = [row[0] for row in rows if not row[2]] or [math.nan]
        self.totals.units += units
        self.totals.flops += len(rows) * (self.config.batch or 0) * self.costs[len(self.grown.steps)]
        self.totals.hours += taken / 3600
        held = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or memory()
        about = {"loss": sum(good) / len(good), "norm": rows[-1][1], "rate": self.rate(self.step - 1)}
        about |= {**self.totals.state_dict(), "tokens_per_second": units / taken, "mfu": None, "memory": held}
        self.report.progress(self.step, {**about, "left": (self.config.steps - self.step) * taken / len(rows)})
        if self.in_a_row >= self.config.train.skip_limit:
            self.save()
            why = f"the loss or gradient was not finite in {self.in_a_row} steps in a row, up to step {self.step}"
            raise UserError(f"{why}: lower optimizer.rate or look at the data")

    def save(self) -> None:
        """Write a checkpoint as the PyTorch trainer does: into a hidden folder, the manifest last, then its name."""
        if self.saved == self.step:
            return
        params = {name: whole(array) for name, array in self.params.items()}
        optim = {f"{k}/{name}": whole(v) for name, entry in self.state.items() for k, v in entry.items()}
        state = {"format": 1, "step": self.step, **{name: part.state_dict() for name, part in self.parts.items()}}
        if self.first:
            path = self.folder / "checkpoints" / f"step-{self.step:08d}"
            with atomic_folder(path) as folder:
                write_tensors(folder / "model", params)
                write_tensors(folder / "optim", optim)
                for name, text in sidecars(self.model, self.history, self.tokenizer.to_json()).items():
                    (folder / "model" / name).write_text(text, encoding="utf-8")
                (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
            write_text(path.parent / "last", path.name + "\n")
            remove_old(self.folder, self.config.checkpoint.keep, self.config.checkpoint.keep_every)
        if not self.alone:
            multihost_utils.sync_global_devices("saved")
        self.saved = self.step
