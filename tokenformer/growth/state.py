"""What happens to an optimizer's state at a growth: old rows keep theirs, new rows begin at zero, new parameters have
none yet.

Unusual: new rows do not copy the second moment of old ones. Their gradients scale with values that are still near zero,
so with a copied second moment they would hardly move (docs/growth.md has the figures).
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tokenformer.growth.plan import Plan, Recipe
from tokenformer.strict import need

State = dict[str, dict[str, Tensor]]  # parameter → what an optimizer keeps for it: exp_avg, exp_avg_sq, step, momentum
SAFE_BETA2 = 0.98


def grow_state(plan: Plan, old: State) -> State:
    """The optimizer's state after the growth. New parameters have none: the optimizer begins it at its first step."""
    return {name: grow_entry(recipe, old[recipe.old]) for name, recipe in plan.recipes.items() if recipe.old in old}


def grow_entry(recipe: Recipe, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of one parameter: new rows get zero moments; the step count stays the parameter's."""
    rows = recipe.new_rows
    if not rows:
        return entry
    shaped = {key: t for key, t in entry.items() if isinstance(t, Tensor) and t.ndim}
    return entry | {key: torch.cat([t, t.new_zeros(rows, *t.shape[1:])]) for key, t in shaped.items()}


def warn_of_beta2(recipes: Mapping[str, Recipe], beta2: float) -> str | None:
    """Return a warning where AdamW's one step count per parameter would make the first updates of appended rows huge.

    Zero moments with an old step count get no bias correction: the updates of an appended row begin at up to
    (1 − β1)/√(1 − β2) times the rate, and after 10 to 20 steps they peak at 1.1 times at β2 = 0.95, 6.6 at 0.999.
    """
    appended = sum(r.old is not None and r.new_rows > 0 for r in recipes.values())
    if not appended or beta2 <= SAFE_BETA2:
        return None
    return (
        f"rows appended to {appended} parameters begin with zero moments at an old step count: at beta2 = {beta2} "
        f"their first updates are several times the rate; use beta2 <= {SAFE_BETA2}, grow by segments or drop the state"
    )


def check_optimizer(optimizer: torch.optim.Optimizer, old: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that does not train this model, or whose state has no rows to keep."""
    what, own = type(optimizer).__name__, {id(p) for p in old.values()}
    need(
        any(id(p) in own for group in optimizer.param_groups for p in group["params"]),
        f"the {what} holds none of the model's parameters: give the one that trains it",
    )
    for parameter in old.values():
        for key, kept in optimizer.state.get(parameter, {}).items():
            alike = isinstance(kept, Tensor) and (kept.ndim == 0 or kept.shape == parameter.shape)
            need(
                alike or isinstance(kept, int | float | None),
                f"{what} keeps '{key}', which has no rows like its parameter, so it cannot get more of them: "
                "grow without optimizer=, and make a new one",
            )


def carry_optimizer(
    optimizer: torch.optim.Optimizer,
    old: Mapping[str, nn.Parameter],
    new: Mapping[str, nn.Parameter],
    recipes: Mapping[str, Recipe],
) -> None:
    """Make a torch optimizer train the grown model, in place: parameter groups and the state of old rows stay.

    A new parameter joins the group of the old one that it is like, or the first group where that one is in none.
    """
    names = {id(p): name for name, p in old.items()}
    groups = {names[id(p)]: g for g in optimizer.param_groups for p in g["params"] if id(p) in names}
    state = {name: optimizer.state.pop(p) for name, p in old.items() if p in optimizer.state}
    for group in optimizer.param_groups:
        others = [i for i, p in enumerate(group["params"]) if id(p) not in names]  # of another model
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][i] for i in others]
    for name in (name for name in new if name in recipes):  # in the order of a new optimizer of the grown model
        recipe = recipes[name]
        group = groups.get(recipe.source)
        if group is None and recipe.old is not None:
            continue  # the optimizer did not train it
        group = group or optimizer.param_groups[0]
        group["params"].append(new[name])
        if "param_names" in group:
            group["param_names"].append(name)
        if recipe.old in state:
            optimizer.state[new[name]] = grow_entry(recipe, state[recipe.old])
    for beta2 in {group["betas"][1] for group in optimizer.param_groups if "betas" in group}:
        if state and (message := warn_of_beta2(recipes, beta2)):
            warnings.warn(message, stacklevel=3)
