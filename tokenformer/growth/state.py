"""What happens to an optimizer's state at a growth: old rows keep theirs, new rows begin at zero, new parameters fresh.

Unusual: the second moment of old rows is not lent to new ones. Their gradients scale with values that are still near
zero, so a borrowed one would keep them almost immobile (docs/growth.md has the figures).
"""

import torch
from torch import Tensor

from tokenformer.growth.recipes import Appended, Copied, Plan, Recipe

State = dict[str, dict[str, Tensor]]  # parameter → what an optimizer keeps for it: exp_avg, exp_avg_sq, step, momentum
SAFE_BETA2 = 0.98


def grow_state(plan: Plan, old: State) -> State:
    """The optimizer's state after the growth. New parameters have none: their optimizer begins them itself."""
    found = {}
    for name, recipe in plan.recipes.items():
        if recipe.old in old and (entry := grow_entry(recipe, old[recipe.old])) is not None:
            found[name] = entry
    return found


def grow_entry(recipe: Recipe, entry: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The state of one parameter. New rows have done nothing yet: their moments are 0; the step count is the
    parameter's. Of a widened parameter nothing is kept: moments of a divided weight are not those of the whole.
    """
    if isinstance(recipe, Copied):
        return {key: t.clone() for key, t in entry.items()}
    if not recipe.new_rows:
        return entry
    if not isinstance(recipe, Appended):
        return None
    rows = recipe.new_rows
    return {k: t if t.ndim == 0 else torch.cat([t, t.new_zeros(rows, *t.shape[1:])]) for k, t in entry.items()}


def warning(plan: Plan, beta2: float) -> str | None:
    """A sentence where AdamW's one step count would make the first updates of appended rows huge.

    Zero moments behind an old step count have no bias correction: the first update of an appended row is up to
    (1 − β1)/√(1 − β2) times the rate and grows for 1/(1 − β1) steps: 1.1 at β2 = 0.95, 6.6 at 0.999.
    """
    appended = list(plan.event["tau"])
    if not appended or beta2 <= SAFE_BETA2:
        return None
    return (
        f"rows appended to {', '.join(appended)} begin with zero moments behind an old step count: at beta2 = {beta2} "
        f"first updates are several times the rate; use beta2 <= {SAFE_BETA2}, grow by segments, or drop the state"
    )
