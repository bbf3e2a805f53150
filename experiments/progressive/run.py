"""Does growing early save compute? Scratch is tuned, ways of growing are searched, the best is confirmed.

  python experiments/progressive/run.py --data DATA [--phase speed tune search zero confirm books large] [--seconds 540]
      [--out experiments/progressive] [--at-once 2]
  python experiments/progressive/run.py --data DATA --check          # the arithmetic, on the CPU, in a minute

DATA holds enwik8.xz and books.txt.xz. Finished arms are skipped and each is written to OUT/arms.jsonl as it ends: the
study can be done in parts, a stop loses the arms under way. A phase first completes those that it depends on.
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from arms import SETTINGS, Arm, Plan, Stage, size
from harness import Harness, Machine, grow

SEEDS = (0, 1, 2)
DECAYS, BUDGETS, FRONTIER = (0.25, 0.5, 1.0), (10, 20, 70), (1.0, 1.3, 1.7)
FIXED = ((288, 288, 3456), 432, 288)  # smaller shapes that never grow, the best first
MARGIN = 12  # seconds for setting up and validating an arm


class OutOfTime(Exception):
    pass


class Study:
    """Runs arms that are not done yet, some at once, and remembers what they gave."""

    def __init__(self, harness: Harness, out: Path, seconds: float, at_once: int, tiny: bool) -> None:
        self.harness, self.at_once, self.tiny = harness, at_once, tiny
        self.file, self.end = out / "arms.jsonl", time.monotonic() + seconds
        self.done: dict[str, dict] = {}
        if self.file.exists():
            self.done = {r["arm"]: r for r in map(json.loads, self.file.read_text().splitlines())}

    def record(self, arm: Arm, facts: dict) -> None:
        entry = {"arm": arm.name, "recipe": arm.recipe, **dataclasses.asdict(arm), **facts}
        with open(self.file, "a") as file:
            file.write(json.dumps(entry) + "\n")
        self.done[arm.name] = json.loads(json.dumps(entry))
        print(
            f"{arm.name}: loss {facts['loss']:.4f}, {facts['flops'] / 1e15:.3f} PFLOP, {facts['gpu_seconds']:.1f} s "
            f"alone, {facts['wall_seconds']:.1f} s here, {facts['shared_steps']} of {facts['steps']} steps shared"
            + (f", {facts['skipped']} skipped" if facts["skipped"] else ""),
            flush=True,
        )

    def run(self, arms: Sequence[Arm]) -> list[float]:
        """The losses of these arms, which are run where they were not before. OutOfTime where that needs too long."""
        waiting = [Plan(arm) for arm in dict.fromkeys(arms) if arm.name not in self.done]
        running: list[tuple[Plan, object]] = []
        late = False
        while waiting or running:
            for plan in list(waiting):
                if len(running) >= self.at_once or self.shares_with(plan, running):
                    continue
                waiting.remove(plan)
                left = self.end - time.monotonic()
                needed = MARGIN + sum(self.harness.expected(p) for p in (plan, *(other for other, _ in running)))
                if needed > left:
                    print(f"not begun, {needed:.0f} s are needed and {left:.0f} s left: {plan.arm.name}", flush=True)
                    late = True
                    continue
                running.append((plan, self.harness.run(plan)))
            for plan, steps in list(running):
                facts = next(steps)
                if facts is not None:
                    self.record(plan.arm, facts)
                    running.remove((plan, steps))
        if late:
            raise OutOfTime
        return [self.loss(arm) for arm in arms]

    def shares_with(self, plan: Plan, running: list) -> bool:
        """Whether an arm under way will soon leave a state from which this one can go on."""
        state = self.harness.latest(plan)
        have = state.step if state else 0
        return any(
            mark > have and mark < min(plan.steps, other.steps) and plan.digest(mark) == other.digest(mark)
            for other, _ in running
            for mark in other.marks()
        )

    def loss(self, arm: Arm) -> float:
        return self.done[arm.name]["loss"]

    def best(self, arms: Sequence[Arm]) -> Arm:
        losses = self.run(arms)
        return arms[losses.index(min(losses))]

    def line(self, arm: Arm, key: str, values: Sequence[float], ratio: float = 0.0, most: int = 4) -> Arm:
        """The best of these values of a key; with a ratio the grid is extended until the best is not at its edge."""
        values = sorted(values)
        for _ in range(most + 1):
            best = self.best([dataclasses.replace(arm, **{key: v}) for v in values])
            value = getattr(best, key)
            if not ratio or value not in (values[0], values[-1]):
                return best
            values = sorted([*values, value * ratio if value == values[-1] else value / ratio])
        print(f"the best {key} is still at the edge of its grid, {value:g}: {best.name}", flush=True)
        return best

    def seeds(self, arm: Arm) -> list[Arm]:
        return [dataclasses.replace(arm, seed=seed) for seed in SEEDS]


# --- The phases -----------------------------------------------------------------------------------------------------


def base(study: Study) -> Arm:
    return Arm(setting="tiny" if study.tiny else "7m")


def grown(arm: Arm, first: int | tuple, *stages: tuple[float, int | tuple], **how) -> Arm:
    """The same arm, begun at `first` and grown at these shares of its compute."""
    whole = SETTINGS[arm.setting].final
    ratio = whole / 864  # sizes are named as for the 7 M model

    def scaled(n: int | tuple) -> tuple:
        return tuple(max(1, round(part * ratio)) for part in (n if isinstance(n, tuple) else size(n)))

    layers = how.pop("start_layers", None)
    made = tuple(Stage(at, scaled(n), **how) for at, n in stages)
    return dataclasses.replace(arm, start=scaled(first), start_layers=layers, stages=made)


def tune(study: Study) -> Arm:
    """Scratch at 20 tokens per parameter: rate, decay, batch, and the rate once more, finer, with what was chosen."""
    arm = study.line(base(study), "factor", (0.5, 1.0), 2.0)
    arm = study.line(arm, "decay", DECAYS)
    study.run([grown(arm, 96, (0.1, 864)), grown(arm, 96, (0.03, 288), (0.12, 864))])
    arm = study.line(arm, "batch", (0.5, 1.0, 2.0), 2.0)
    return study.line(arm, "factor", (arm.factor / 2**0.5, arm.factor, arm.factor * 2**0.5), 2**0.5)


def rate_again(study: Study, arm: Arm) -> Arm:
    """Scratch at another budget: the rate once more."""
    return study.line(arm, "factor", (arm.factor / 2**0.5, arm.factor, arm.factor * 2**0.5), 2**0.5)


def search(study: Study) -> Arm:
    """Ways of growing at 10 tokens per parameter, each idea beside the best before it; the three best at 20."""
    tuned = tune(study)
    arm = rate_again(study, dataclasses.replace(tuned, budget=10))
    times = [grown(arm, 96, (at, 864)) for at in (0.15, 0.08, 0.25)]
    times += [grown(arm, 96, (a, 288), (b, 864)) for a, b in ((0.04, 0.16), (0.02, 0.1), (0.06, 0.25))]
    small = [grown(arm, 32, (0.04, 864)), grown(arm, 32, (0.08, 864)), grown(arm, 288, (0.25, 864))]
    hops = [
        grown(arm, 432, (0.3, 864)),
        grown(arm, 48, (0.02, 144), (0.06, 432), (0.16, 864)),
        grown(arm, 32, (0.01, 96), (0.04, 288), (0.16, 864)),
        grown(arm, 96, (0.03, 192), (0.08, 432), (0.2, 864)),
    ]
    best = study.best([*times, *small, *hops])
    kinds = ({"ramp": ("new", 0.0, 200)}, {"ramp": ("new", 0.5, 200)}, {"ramp": ("all", 0.5, 200)})
    kinds += ({"ramp": ("hold", 1.3, 250)}, {"rule": "copy"}, {"rule": "copy", "noise": 0.5}, {"rule": "split"})
    kinds += ({"rule": "zero_value"},)
    sizes = [best.start, *(stage.size for stage in best.stages)]
    whole = all(b % a == 0 for small, big in itertools.pairwise(sizes) for a, b in zip(small, big, strict=True))
    varied = [vary(best, **kind) for kind in kinds if whole or kind.get("rule") != "split"]
    at = best.stages[-1].at
    varied.append(grown(arm, (864, 864, 384), (at, 864)))  # ffn tokens alone
    varied += [grown(arm, (96, 96, 3456), (when, 864)) for when in (at, 0.1, 0.5)]  # all but them
    shapes = [grown(arm, n) for n in (*FIXED, (96, 96, 3456))]  # never grown: is it the shape alone?
    study.run([*shapes, *varied])
    pool = [*times, *small, *hops, *varied]
    best = study.best(pool)
    rates = [dataclasses.replace(best, factor=best.factor * r) for r in (0.5**0.5, 2**0.5)]
    study.run(rates)  # grown arms may choose the rate from the grid that scratch had
    ranked = sorted(pool, key=study.loss)[:3]
    best = study.best([dataclasses.replace(a, budget=20, factor=tuned.factor) for a in ranked])
    study.run([dataclasses.replace(a, budget=20, factor=tuned.factor) for a in shapes[:-1]])
    return best


def vary(arm: Arm, **kind) -> Arm:
    return dataclasses.replace(arm, stages=tuple(dataclasses.replace(stage, **kind) for stage in arm.stages))


def confirm(study: Study) -> None:
    """Three seeds of scratch and of the recipe at each budget, the frontier of scratch, and equal tokens."""
    recipe, tuned = search(study), tune(study)
    for budget in (20, 10, 70):
        scratch = dataclasses.replace(tuned, budget=budget)
        scratch = scratch if budget == 20 else rate_again(study, scratch)
        mine = like(recipe, scratch)
        longest_first = sorted(FRONTIER, reverse=True)  # the others leave it at the end of their constant rate
        seeds = study.seeds(scratch)[: 1 if budget == 70 else None]
        study.run([*study.seeds(mine), *(dataclasses.replace(a, times=t) for a in seeds for t in longest_first)])
        study.run(study.seeds(scratch))
        if budget != 70:
            study.run(study.seeds(grown(scratch, FIXED[0])))
    for budget in (20, 10):
        mine = like(recipe, dataclasses.replace(tuned, budget=budget))
        study.run([dataclasses.replace(mine, times=times) for times in (0.6, 0.8)])
        study.run([dataclasses.replace(a, equal_tokens=True) for a in study.seeds(mine)])
    rival = dataclasses.replace(tuned, kind="transformer")
    rate_again(study, rival)


def zero(study: Study) -> None:
    """Blocks that add nothing at first, for scratch, recipe, fixed shape and Transformer: is growth's gain that?"""
    recipe, tuned = search(study), tune(study)
    for budget in (20, 10):
        scratch = dataclasses.replace(tuned, budget=budget, init="zero")
        scratch = rate_again(study, scratch)
        rivals = [like(recipe, scratch), grown(scratch, 96, (0.1, 864)), grown(scratch, FIXED[0])]
        study.run(rivals)
        if budget == 20:
            for init in ("zero", "official"):
                rate_again(study, dataclasses.replace(scratch, kind="transformer", init=init))
        study.run([*study.seeds(scratch), *study.seeds(rivals[0]), *study.seeds(rivals[2])])
        study.run([dataclasses.replace(a, times=t) for a in study.seeds(scratch)[:2] for t in (1.7, 1.3)])


def like(recipe: Arm, scratch: Arm) -> Arm:
    """The recipe with what scratch chose at its budget."""
    return dataclasses.replace(scratch, start=recipe.start, start_layers=recipe.start_layers, stages=recipe.stages)


def books(study: Study) -> None:
    """The other text at 20 tokens per parameter: nothing is chosen there."""
    scratch = dataclasses.replace(tune(study), text="books")
    mine = like(search(study), scratch)
    longest_first = sorted(FRONTIER, reverse=True)
    frontier = [dataclasses.replace(a, times=t) for a in study.seeds(scratch) for t in longest_first]
    study.run([*study.seeds(mine), *frontier])


def large(study: Study) -> None:
    """32 M matmul parameters on both texts: scratch and a Transformer at three rates, three seeds of the best."""
    tuned, recipe = tune(study), search(study)
    name = "tiny-large" if study.tiny else "32m"
    arm = dataclasses.replace(tuned, setting=name, text="blend", factor=tuned.factor)
    ratio = SETTINGS[name].final / SETTINGS[tuned.setting].final
    resized = [tuple(max(1, round(n * ratio)) for n in s) for s in (recipe.start, *(t.size for t in recipe.stages))]
    stages = tuple(dataclasses.replace(t, size=s) for t, s in zip(recipe.stages, resized[1:], strict=True))
    for a in (arm, dataclasses.replace(arm, start=resized[0], stages=stages)):
        plan = Plan(a)
        print(f"expected: {study.harness.expected(plan):.0f} s, {plan.steps} steps: {a.name}", flush=True)
    factors = (arm.factor / 2, arm.factor, arm.factor * 2)
    scratch = study.line(arm, "factor", factors, 2.0)
    mine = dataclasses.replace(scratch, start=resized[0], stages=stages)
    study.run([mine])
    study.line(dataclasses.replace(arm, kind="transformer"), "factor", factors, 2.0)
    study.run([*study.seeds(mine), *study.seeds(scratch)])
    study.run([dataclasses.replace(scratch, times=times) for times in FRONTIER])


def speed(study: Study) -> None:
    """Seconds of a step of each shape alone, of two at once, compiled, and what a step of the largest consists of."""
    harness, arm = study.harness, base(study)
    plan = Plan(grown(arm, 96, (0.03, 288), (0.12, 864)))
    state = harness.fresh(plan)
    for leg in range(3):
        if leg:
            stage = plan.arm.stages[leg - 1]
            made = grow(state.config, state.tensors, state.optimizer, stage, 0, leg - 1)
            state = dataclasses.replace(state, leg=leg, config=made[0], tensors=made[1])
        key, machine = harness.machine(plan, state, frozenset(state.tensors))
        harness.free[key].append(machine)
    plan = Plan(arm)
    state, old = harness.fresh(plan), frozenset()
    pair = [harness.machine(plan, state, old), harness.machine(plan, state, old)]
    begin, count = time.monotonic(), 20
    for _ in range(count):
        for _, machine in pair:
            machine.steps(1)
    for key, machine in pair:
        machine.wait()
        harness.free[key].append(machine)
    print(f"  two at once: {1e3 * (time.monotonic() - begin) / count / 2:.2f} ms a step", flush=True)
    if harness.device == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            pair[0][1].steps(3)
            pair[0][1].wait()
        kernels = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:16]
        for kernel in kernels:
            print(f"  {kernel.self_device_time_total / 3e3:8.3f} ms a step in {kernel.count // 3} × {kernel.key[:90]}")
    compiled = Machine(state.config, frozenset(), plan.sequences, harness.text(arm.text), True)
    print(
        f"  compiled: {1e3 * compiled.step_seconds:.2f} ms a step, set up in {compiled.setup_seconds:.1f} s", flush=True
    )


PHASES = {"tune": tune, "search": search, "zero": zero, "confirm": confirm, "books": books, "large": large}


# --- Arithmetic that the report uses too ----------------------------------------------------------------------------


def compute_to_same_loss(frontier: dict[float, float], loss: float) -> float:
    """1/c, where scratch needs c times the budget for this loss; by lines in log compute, beyond the ends continued.

    >>> round(compute_to_same_loss({1.0: 1.05, 1.3: 1.03, 1.7: 1.01}, 1.03), 4)
    0.7692
    """
    points = sorted(frontier.items())
    pairs = list(itertools.pairwise(points))
    (a, high), (b, low) = next(((p, q) for p, q in pairs if loss >= q[1]), pairs[-1])
    share = (high - loss) / (high - low)
    return math.exp(-(math.log(a) + share * (math.log(b) - math.log(a))))


def frontier_of(losses: dict[float, dict[int, float]]) -> dict[float, float]:
    """Scratch's loss over compute: the mean of all seeds at 1; elsewhere that plus the mean paired difference."""
    at_one = statistics.mean(losses[1.0].values())
    found = {}
    for times, by_seed in losses.items():
        both = [by_seed[s] - losses[1.0][s] for s in by_seed if s in losses[1.0]]
        if both:
            found[times] = at_one + statistics.mean(both)
    return found


# --- The check ------------------------------------------------------------------------------------------------------


def check(folder: Path) -> None:
    """On tiny models: growth is exact, forks equal whole runs, compute is equal, rates end at zero, the arithmetic."""
    arm = Arm(setting="tiny", decay=0.25)
    arms = [arm, *(grown(arm, 288, (0.1, 864), rule=rule) for rule in ("segment", "copy", "split"))]
    arms.append(grown(arm, 96, (0.05, 288), (0.2, 864), ramp=("new", 0.5, 5)))
    arms.append(grown(arm, 96, (0.2, 864), start_layers=1, layers=2))
    arms.append(grown(arm, 288, (0.05, 864)))  # leaves the second in its middle
    plans = [Plan(a) for a in arms]
    for plan in plans:
        assert 0 <= plan.total - plan.spent < plan.costs[-1], plan.arm.name
        assert plan.total == plans[0].total
        assert plan.rates[-1] < 2.1 * plan.rates.max() * plan.costs[-1] / (0.25 * plan.total), plan.rates[-1]
        sums = sum((e - b) * one for (b, e), one in zip(plan.legs, plan.costs, strict=True))
        assert sums == plan.spent
    equal = Plan(dataclasses.replace(arms[1], equal_tokens=True))
    assert abs(equal.tokens - plans[0].tokens) <= 2 * plans[0].tokens / plans[0].steps
    assert Plan(dataclasses.replace(arm, batch=0.5)).tokens == plans[0].tokens
    whole = {plan.arm.name: finish(Harness(folder, "cpu", True), plan) for plan in plans}
    for plan in plans:
        for step, before, after in whole[plan.arm.name]["growths"]:
            assert abs(before["enwik8"] - after["enwik8"]) < 2e-5, (plan.arm.name, step, before, after)
    both, shared = Harness(folder, "cpu", True), 0
    longer = [Plan(dataclasses.replace(a, times=1.3)) for a in arms[:2]]
    for plan in [*longer, *plans]:
        facts = finish(both, plan)
        shared += facts["shared_steps"] > 0
        if plan.arm.name in whole:
            assert facts["loss"] == whole[plan.arm.name]["loss"], plan.arm.name
            assert facts["curve"] == whole[plan.arm.name]["curve"], plan.arm.name
    assert shared >= 2, shared
    frontier = {1.0: 1.05, 1.3: 1.03, 1.7: 1.01}
    assert compute_to_same_loss(frontier, 1.05) == 1 and abs(compute_to_same_loss(frontier, 1.01) - 1 / 1.7) < 1e-12
    half = compute_to_same_loss(frontier, 1.04)
    assert abs(half - 1.3**-0.5) < 1e-12 and compute_to_same_loss(frontier, 1.07) > 1 > compute_to_same_loss(
        frontier, 1
    )
    mean = frontier_of({1.0: {0: 1.0, 1: 1.2, 2: 1.1}, 1.3: {1: 1.1}})
    assert abs(mean[1.0] - 1.1) < 1e-12 and abs(mean[1.3] - 1.0) < 1e-12
    print(f"checked: {len(plans)} arms, growth exact, {shared} forks equal to whole runs, equal compute, arithmetic")


def finish(harness: Harness, plan: Plan) -> dict:
    return next(facts for facts in harness.run(plan) if facts is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of enwik8.xz and books.txt.xz")
    parser.add_argument("--phase", nargs="+", choices=["speed", *PHASES], default=list(PHASES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no arm that would end after this time")
    parser.add_argument("--at-once", type=int, default=2, help="arms that train at the same time")
    parser.add_argument(
        "--compile", action="store_true", help="compile all blocks: slower to begin (see --phase speed)"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models and texts, to try the whole")
    parser.add_argument("--check", action="store_true", help="check growth, forks and arithmetic, and stop")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    if args.check:
        check(args.data)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    study = Study(Harness(args.data, device, args.tiny, args.compile), args.out, args.seconds, args.at_once, args.tiny)
    try:
        for name in args.phase:
            if name == "speed":
                try:
                    speed(study)
                except Exception as error:  # only measures: the arms do not depend on it
                    print(f"speed: {type(error).__name__}: {error}", flush=True)
            else:
                PHASES[name](study)
        print("complete")
    except OutOfTime:
        print("to be continued: run the same command again")


if __name__ == "__main__":
    main()
