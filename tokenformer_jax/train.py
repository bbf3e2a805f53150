"""Training: the config, the data and their order, the schedule, growth and the run folder of `tokenformer`, in JAX.

Unusual: a step is one compiled program (micro-batches, gradients, clipping, update), the same on one device and on
many; nothing reads the device between two log lines.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import time
from collections.abc import Callable
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
from tokenformer.data.text.samples import open_sets, text_loader, text_tokenizer
from tokenformer.data.text.tokenizer import padded_vocab
from tokenformer.errors import UserError
from tokenformer.files import atomic_folder, write_text, writing
from tokenformer.growth import progressive
from tokenformer.growth.plan import Plan, plan_growth
from tokenformer.growth.stages import Progress, chain, check_reached, due, spent, step_of
from tokenformer.growth.stages import rate as rate_factor
from tokenformer.hub.open import Opened, locate
from tokenformer.hub.run_folder import all_steps, find_newest
from tokenformer.hub.sidecars import read_config, read_history, sidecars
from tokenformer.models.cost import cost, training_flops_per_sample
from tokenformer.models.names import parse
from tokenformer.parsing import read_json
from tokenformer.train.run import ELSEWHERE, changes, earlier, lock, with_batch_sizes
from tokenformer.train.schedule import factor
from tokenformer.train.signals import caught_signals
from tokenformer_jax import values
from tokenformer_jax.folder import load, read_tensors, write_tensors
from tokenformer_jax.generate import generator
from tokenformer_jax.mesh import make_mesh, placement, put, put_rows, whole
from tokenformer_jax.model import ENDS, How, Params, check, loss, shapes
from tokenformer_jax.optim import State, fresh, update


def check_recipe(config: Config) -> None:
    """Refuse what a run in JAX does not do."""
    c, do = config, "leave it out, or train with the package `tokenformer`"
    refused = {
        "adapter": c.adapter,
        "task": c.task if c.task != "language" else None,
        "train.precision": "fp16" if c.train.precision == "fp16" else None,
        "train.ema": c.train.ema,
        "train.drop_path": c.train.drop_path,
        "optimizer.layer_decay": c.optimizer.layer_decay if c.optimizer.layer_decay != 1 else None,
        "log.tensorboard": c.log.tensorboard,
        "log.wandb": c.log.wandb if c.log.wandb != "none" else None,
        "log.profile": c.log.profile,
    }
    for name, value in refused.items():
        if value:
            raise UserError(f"{name} is {str(value)[:40]}, which there is not in JAX: {do}")


def gradient_step(config: Config, model: ModelConfig, how: How, frozen: set[str], shares: dict[str, float]) -> Callable:
    """Return the compiled step: (params, state, batch (micro-batches, rows, T), rate) → (params, state, [loss, norm,
    skipped]). It updates by the gradient of the mean loss over all labels of all micro-batches, as the PyTorch trainer.
    """
    assert config.batch is not None and how.mesh is not None
    expected, mesh = config.batch * model.context, how.mesh

    def laid_out(tensors: Params) -> dict[str, Array]:
        place = jax.lax.with_sharding_constraint
        return {name: place(tensor, placement(name, tensor.shape, mesh)) for name, tensor in tensors.items()}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: State, batch: dict[str, Array], rate: Array) -> tuple[Params, State, Array]:
        learning = {name: param for name, param in params.items() if name not in frozen}

        def of(learning: Params, micro: dict[str, Array]) -> tuple[Array, tuple[Array, Array]]:
            documents = micro.get("documents")
            total, count = loss({**params, **learning}, model, micro["ids"], micro["labels"], documents, how)
            return total / expected, (total, count)

        def accumulate(sums: tuple, micro: dict[str, Array]) -> tuple[tuple, None]:
            (_, found), gradients = jax.value_and_grad(of, has_aux=True)(learning, micro)
            return jax.tree.map(jnp.add, sums, (laid_out(gradients), *found)), None

        like = jax.eval_shape(lambda: of(learning, {name: field[0] for name, field in batch.items()})[1])
        sums = (jax.tree.map(jnp.zeros_like, learning), *(jnp.zeros(s.shape, s.dtype) for s in like))
        (gradients, total, count), _ = jax.lax.scan(accumulate, sums, batch)
        divisor = count / expected
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in gradients.values())) / divisor
        good = jnp.isfinite(norm) & jnp.isfinite(total)
        if config.train.clip:
            divisor = divisor * jnp.maximum(norm / config.train.clip, 1)
        gradients = {name: gradient / divisor.astype(gradient.dtype) for name, gradient in gradients.items()}
        new, kept = update(params, gradients, state, config.optimizer, rate, shares, mesh)
        new = {name: jnp.where(good, new[name], learning[name]) for name in learning}
        kept = {name: {k: jnp.where(good, v, state[name][k]) for k, v in kept[name].items()} for name in learning}
        kept = {n: {k: laid_out({n: v})[n] for k, v in entry.items()} for n, entry in kept.items()}
        numbers = jnp.stack([total / count, norm, 1.0 - good])
        return {**params, **laid_out(new)}, {**state, **kept}, numbers

    return step


class Trainer:
    """Trains the model of a config into a run folder, which PyTorch's side reads too. `run()` returns the signal that
    ended it early, or None.
    """

    def __init__(self, config: Config, run: str | Path, *, resume: bool = False) -> None:
        self.folder, self.step, self.asked, self.saved = Path(run), 0, 0, -1
        self.first = jax.process_index() == 0
        self.config, self.stages = progressive.resolve(config)
        check_recipe(self.config)
        before = earlier(self.folder, resume)
        if before is not None and self.config.batch is None:
            self.config = dataclasses.replace(self.config, batch=before.batch)
        self.mesh = make_mesh(self.config.parallel, self.config.train.device)
        self.rows = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        c = self.config = with_batch_sizes(self.config, self.rows)
        self.said = [] if before is None else [f"changed: {line}" for line in changes(self.folder, before, c)]
        self.chain, self.grown = [check(model) for model in chain(c.model, self.stages)], Progress()
        self.costs = [training_flops_per_sample(model) for model in self.chain]
        for model in self.chain:
            for name, shape in shapes(model).items():
                placement(name, shape, self.mesh)  # refuses what cannot be split
        self.float = jax.dtypes.canonicalize_dtype(np.float64)  # fp32, unless JAX_ENABLE_X64 is set
        self.how = How(
            jnp.bfloat16 if c.train.precision == "bf16" else None, c.train.activation_checkpointing, self.mesh
        )
        self.open_data()
        self.totals = {"tokens": 0, "hours": 0.0, "in_a_row": 0}
        found = find_newest(self.folder).path if before is not None else None
        self.restore(found) if found else self.begin()

    def open_data(self) -> None:
        """Open the text, in the order and the steps of the PyTorch trainer; each process reads its share of a batch."""
        c, share = self.config, self.rows // jax.process_count()
        assert c.batch is not None and c.micro_batch is not None
        sets = open_sets(c.data, c.model.vocab)
        self.tokenizer = text_tokenizer(c.data, sets)
        if self.tokenizer.vocab_size > c.model.vocab:
            vocab = f"set model.vocab={padded_vocab(self.tokenizer.vocab_size)}, or prepare it with another tokenizer"
            have = f"the data has a vocabulary of {self.tokenizer.vocab_size} ids but model.vocab is {c.model.vocab}"
            raise UserError(f"{have}: {vocab}")
        cut: dict[str, Any] = {"rank": jax.process_index(), "world": jax.process_count()}
        cut |= {"context": c.model.context, "seed": c.seed, "micro_batch": c.micro_batch * share, "sets": sets}
        self.loader = text_loader(c.data, batch=c.batch, samples=c.steps * c.batch, **cut)
        times = c.steps // c.validation.every + 1 if c.validation.every else 1
        wanted = c.validation.samples if c.validation.batches is None else c.validation.batches * c.batch
        more: dict[str, Any] = {"part": "validation", "epochs": None if len(sets) > 1 else 1, "empty": True}
        self.held_out = text_loader(c.data, batch=wanted, samples=times * wanted, **more, **cut)
        self.units = c.batch * c.model.context
        check_reached(self.stages, self.grown, c.steps, self.units)

    def begin(self) -> None:
        """First values: the initialisation, or other weights."""
        c, self.history = self.config, []
        params = values.initial_params(self.chain[0], c.seed)
        if c.start:
            given = load(c.start)
            Opened(c.start, locate(c.start, values=False)).check_tokenizer(self.tokenizer.to_json())
            params, self.history = values.start_from(given.params, self.chain[0], c.seed, c.start), given.history
            self.said.append(f"a new run begins with the weights of {c.start}")
        self.install(self.chain[0], params, {})

    def restore(self, found: Path) -> None:
        """Continue from a checkpoint, also one that PyTorch wrote."""
        state = read_json(found / "state.json")
        try:
            self.step, parts = int(state["step"]), {"growth": self.grown, "loader": self.loader}
            for name, part in parts.items():
                part.load_state_dict(state[name])
            self.totals |= {k: state.get("totals", {}).get(k, v) for k, v in self.totals.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{found / 'state.json'} is not of the form that a run writes ({error}): move it") from None
        done = len(self.grown.steps)
        if done >= len(self.chain) or check(read_config(found / "model")) != self.chain[done]:
            raise UserError(f"the model in {found} is not the one that the config describes: give the run's own config")
        self.history, optim = read_history(found / "model"), values.State()
        for name, array in read_tensors(found / "optim").items():
            kind, _, parameter = name.partition("/")
            optim.setdefault(parameter, {})[kind] = array
        self.install(self.chain[done], read_tensors(found / "model"), optim)
        self.said.append(f"going on from step {self.step} ({found})")
        self.saved = self.step

    def install(self, model: ModelConfig, params: values.Arrays, state: values.State) -> None:
        """Lay a model and its optimizer over the devices, and make the programs that compute it."""
        c, done = self.config, len(self.grown.steps)
        state = {n: state.get(n) or fresh(n, p.shape, c.optimizer, self.float) for n, p in params.items()}
        self.model = model
        self.params = put({name: array.astype(self.float) for name, array in params.items()}, self.mesh)
        wide = {n: {k: v if k == "step" else v.astype(self.float) for k, v in s.items()} for n, s in state.items()}
        self.state: State = {name: put(entry, self.mesh, name) for name, entry in wide.items()}
        frozen, shares = set(), {}
        if done and (stage := self.stages[done - 1]).old_tokens != 1:
            kept = self.plan(self.chain[done - 1], stage, 0).kept
            frozen = kept if stage.old_tokens == 0 else set()
            shares = {n: stage.old_tokens for n in kept - frozen if parse(n, ENDS).token}
        self.compiled = gradient_step(c, model, self.how, frozen, shares)
        measured = self.how._replace(remat="none")
        self.measured = jax.jit(
            lambda params, b: loss(params, model, b["ids"], b["labels"], b.get("documents"), measured)
        )
        self.generate = generator(model, measured)

    def plan(self, before: ModelConfig, stage: GrowthStage, number: int) -> Plan:
        return plan_growth(before, list(shapes(before)), stage, ends=ENDS, seed=self.config.seed, number=number)

    def run(self) -> int | None:
        alone = jax.process_count() == 1  # otherwise processes would stop after different steps
        with contextlib.ExitStack() as held:
            if self.first:
                held.enter_context(lock(self.folder))
                self.open_log()
            if alone:
                held.enter_context(caught_signals(lambda number: setattr(self, "asked", number), once=True))
            self.loop()
        return self.asked or None

    def loop(self) -> None:
        c, self.recent, self.since = self.config, list[Array](), time.monotonic()
        batches, micro_batches = iter(self.loader), self.loader.micro_batches
        while self.step < c.steps and not self.asked:
            while stage := due(self.stages, self.grown, self.step, self.units):
                self.grow(stage)
            some = [next(batches).fields for _ in range(micro_batches)]
            batch = {name: put_rows(np.stack([fields[name] for fields in some]), self.mesh, lead=1) for name in some[0]}
            rate = jnp.asarray(self.rate(self.step), self.float)
            self.params, self.state, numbers = self.compiled(self.params, self.state, batch, rate)
            self.recent.append(numbers)
            self.step += 1
            save = (c.checkpoint.every and self.step % c.checkpoint.every == 0) or self.step in c.checkpoint.also
            if self.step % c.log.every == 0 or save or self.step == c.steps:
                self.log()
            if (c.validation.every and self.step % c.validation.every == 0) or self.step == c.steps:
                self.validate()
            if save:
                self.save()
        self.log()
        self.save()
        self.say(f"{'stopped' if self.asked else 'done'} after step {self.step}; its state is in {self.folder}")

    def rate(self, step: int) -> float:
        """Return the learning rate in a step, as the PyTorch trainer computes it."""
        c = self.config

        def before(step: int) -> int:
            to_come = [step_of(stage, self.units) for stage in self.stages[len(self.grown.steps) :]]
            return spent(self.costs, [*self.grown.steps, *to_come], step)

        return c.optimizer.rate * rate_factor(self.stages, self.grown, step, c.steps, c.schedule, factor, before)

    def grow(self, stage: GrowthStage) -> None:
        """Grow the model and its optimizer; the state before is saved, and a rerun from there gives the same bits."""
        self.log()
        self.save()
        growth, losses = self.plan(self.model, stage, len(self.history)), [self.measure()]
        state = {n: {k: whole(v) for k, v in entry.items()} for n, entry in self.state.items()}
        made, kept = values.grow(growth, self.whole_params(), state if stage.state == "keep" else {})
        self.grown.grew(self.step)
        self.install(check(growth.config), made, kept)
        self.history.append(growth.event)
        losses = [loss for loss in (*losses, self.measure()) if loss is not None]
        sizes = [cost(model).parameters for model in self.chain[len(self.grown.steps) - 1 :][:2]]
        self.row("event", what="growth", to=f"{sizes[1]:,}", losses=losses, how=growth.event)
        seen = f", validation loss {' → '.join(f'{loss:.5f}' for loss in losses)}" if losses else ""
        self.say(f"step {self.step}: grown from {sizes[0]:,} to {sizes[1]:,} parameters{seen}")

    def whole_params(self) -> values.Arrays:
        return {name: whole(array) for name, array in self.params.items()}

    def measure(self) -> float | None:
        """Return the mean loss over the held-out samples, the same ones each time."""
        if not self.held_out.samples:
            return None
        total, count, share = 0.0, 0.0, self.rows // jax.process_count()
        self.held_out.samples_seen = 0
        for batch in self.held_out:
            fields = {}
            for name, rows in batch.fields.items():  # rows are added until every device has as many
                short = [(0, -len(rows) % share), (0, 0)]
                filler = IGNORED if name == "labels" else 0
                fields[name] = put_rows(np.pad(rows, short, constant_values=filler), self.mesh)
            found = self.measured(self.params, fields)
            total, count = total + float(found[0]), count + float(found[1])
            if batch.last:
                break
        return total / count

    def validate(self) -> None:
        found, v = self.measure(), self.config.validation
        if found is not None:
            if v.every and self.step % v.every == 0:
                self.grown.losses.append(found)
            self.row("validation", loss=found, perplexity=math.exp(min(found, 700)))
            self.say(f"step {self.step}: validation loss {found:.4f}")
        if v.generate and jax.process_count() == 1:
            ids = np.array([self.tokenizer.encode(v.prompt) or [self.tokenizer.end_of_document]])
            made = self.generate(self.params, ids, v.generate, v.temperature, seed=self.config.seed)
            self.row("sample", text=self.tokenizer.decode(made[0].tolist()))
        self.since = time.monotonic()

    # what the user sees

    def open_log(self) -> None:
        """Write the config, and drop the rows of later steps, which a resumed run repeats."""
        with writing(f"the run {self.folder}", ELSEWHERE):
            for path in (self.folder / "checkpoints").glob(".*"):  # what a killed process left half-written
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_text(self.folder / "config.yml", native.to_yaml(self.config))
            metrics = self.folder / "metrics.jsonl"
            rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
            at = [
                row
                for row in rows
                if row["step"] <= self.step and (row["step"], row.get("what")) != (self.step, "growth")
            ]
            write_text(metrics, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in at))
        where = f"{self.mesh.devices.flat[0].platform}, {', '.join(f'{k} {v}' for k, v in self.mesh.shape.items())}"
        recipe = f"{self.config.optimizer.kind}, {self.config.train.precision}, {where}"
        self.say(f"{self.folder}: tokenformer of {cost(self.model).parameters:,} parameters, {recipe}")
        for line in self.said:
            self.say(line)

    def say(self, line: str) -> None:
        if self.first:
            print(line, flush=True)
            with open(self.folder / "log", "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def row(self, kind: str, **found: Any) -> None:
        if self.first:
            found = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": self.step, **found}, ensure_ascii=False) + "\n")

    def log(self) -> None:
        """Read from the devices what every step since the last log line found, and report it."""
        if not self.recent:
            return
        rows, self.recent = np.stack(jax.device_get(self.recent)).tolist(), []
        taken, self.since = time.monotonic() - self.since, time.monotonic()
        for step, (found, _, skipped) in enumerate(rows, self.step - len(rows) + 1):
            self.totals["in_a_row"] = self.totals["in_a_row"] + 1 if skipped else 0
            if skipped:
                self.say(f"step {step} was skipped: its loss or gradient is not finite ({found})")
        good = [row[0] for row in rows if not row[2]]
        mean, tokens = sum(good) / len(good) if good else math.nan, len(rows) * self.units
        self.totals["tokens"] += tokens
        self.totals["hours"] += taken / 3600
        about = {"loss": mean, "norm": rows[-1][1], "rate": self.rate(self.step - 1), "tokens": self.totals["tokens"]}
        self.row("train", **about, hours=self.totals["hours"], tokens_per_second=tokens / taken)
        pace = f"rate {about['rate']:.2e}  {tokens / taken:,.0f} tokens/s"
        self.say(f"step {self.step}/{self.config.steps}  loss {mean:.4f}  {pace}")
        if self.totals["in_a_row"] >= self.config.train.skip_limit:
            self.save()
            why = f"the loss or gradient was not finite in {self.totals['in_a_row']} steps in a row, up to {self.step}"
            raise UserError(f"{why}: lower optimizer.rate or look at the data")

    def save(self) -> None:
        """Write a checkpoint as the PyTorch trainer does: into a hidden folder, the manifest last, then its name."""
        if self.saved == self.step:
            return
        params = self.whole_params()
        optim = {f"{k}/{name}": whole(v) for name, entry in self.state.items() for k, v in entry.items()}
        state = {"format": 1, "step": self.step, "loader": self.loader.state_dict(), "growth": self.grown.state_dict()}
        if self.first:
            path = self.folder / "checkpoints" / f"step-{self.step:08d}"
            with atomic_folder(path) as folder:
                write_tensors(folder / "model", params)
                write_tensors(folder / "optim", optim)
                for name, text in sidecars(self.model, self.history, self.tokenizer.to_json()).items():
                    (folder / "model" / name).write_text(text, encoding="utf-8")
                (folder / "state.json").write_text(json.dumps({**state, "totals": self.totals}), encoding="utf-8")
            write_text(path.parent / "last", path.name + "\n")
            self.remove_old()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("saved")
        self.saved, self.since = self.step, time.monotonic()

    def remove_old(self) -> None:
        keep, steps = self.config.checkpoint, all_steps(self.folder)
        for step in list(steps)[: -keep.keep] if keep.keep else ():
            if not (keep.keep_every and step % keep.keep_every == 0):
                hidden = steps[step].with_name(f".{steps[step].name}")
                os.rename(steps[step], hidden)  # at once, so that half a checkpoint is never seen
                shutil.rmtree(hidden)
