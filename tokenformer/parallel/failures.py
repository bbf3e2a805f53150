"""How much of a long run's GPU hours is useful when GPUs fail: by the well-known formula, and by a simulation.

Failures come at random (exponential times), each ends the job: it restarts and repeats what it did since its last
checkpoint. The formula is Daly's (2006), the first guess of the best interval Young's (1974).
"""

import math
import random
import re
from typing import NamedTuple

from tokenformer.errors import UserError


class Outage(NamedTuple):
    """What goes wrong how often in a job, and what it costs; all in seconds."""

    between: float  # mean time between two failures of the job
    save: float  # that training stands still per checkpoint
    restart: float  # from a failure until training continues


def mean_hours(text: str) -> float:
    """Return the mean hours between failures of one GPU, from failures per hours.

    >>> mean_hours("1/1000h"), mean_hours("2/50000h")
    (1000.0, 25000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)h", text)
    if not found or not float(found[1]) or not float(found[2]):
        raise UserError(f"--failures is '{text}': give failures per hours of one GPU, such as 1/50000h")
    return float(found[2]) / float(found[1])


def useful(outage: Outage, interval: float) -> float:
    """Return the share of the time that is useful with `interval` seconds of training between two checkpoints.

    A piece of work and its checkpoint take M · e^(R/M) · (e^((interval + save)/M) − 1) on average.

    >>> round(useful(Outage(between=1e9, save=10, restart=300), 990), 3)  # hardly any failure: saving alone
    0.99
    """
    between, save, restart = outage
    if (interval + save + restart) / between > 500:
        return 0.0  # it practically never gets there
    return interval / (between * math.exp(restart / between) * math.expm1((interval + save) / between))


def best_interval(outage: Outage) -> float:
    """Return the seconds between two checkpoints that leave most of the time useful.

    >>> outage = Outage(between=3600, save=30, restart=300)
    >>> best = best_interval(outage)
    >>> 0.9 < best / math.sqrt(2 * 30 * 3600) < 1.1, useful(outage, best) >= useful(outage, 1.05 * best)
    (True, True)
    """
    young = math.sqrt(2 * outage.save * outage.between)
    low, high = young / 20, young * 20
    for _ in range(200):  # the share rises, then falls
        third = (high - low) / 3
        if useful(outage, low + third) < useful(outage, high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


def simulate(outage: Outage, interval: float, pieces: int = 20_000, seed: int = 0) -> float:
    """Return the useful share of a simulated run of so many pieces of work, each followed by its checkpoint."""
    draw = random.Random(seed)
    rate = 1 / outage.between
    taken, fails = 0.0, draw.expovariate(rate)  # the time until the next failure
    need = interval + outage.save
    for _ in range(pieces):
        while fails < need:
            taken, fails, need = taken + fails, draw.expovariate(rate), outage.restart + interval + outage.save
            if taken > 1000 * pieces * (interval + outage.save):
                return 0.0  # it gets nowhere
        taken, fails, need = taken + need, fails - need, interval + outage.save
    return pieces * interval / taken


def describe(gpus: int, hours: float, save: float, restart: float) -> str:
    """Return the sentence of `plan --failures`."""
    outage = Outage(hours * 3600 / gpus, save, restart)
    interval = best_interval(outage)
    share, seen = useful(outage, interval), simulate(outage, interval)
    return (
        f"failures: one in {outage.between / 3600:.2f} h with {gpus} GPUs; a checkpoint every {interval:.0f} s (which "
        f"costs {save:g} s; a restart {restart:g} s) leaves {share:.1%} of the GPU hours useful ({seen:.1%} simulated)"
    )
