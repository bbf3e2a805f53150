"""What happens to an optimizer's state at a growth: old rows keep theirs, new rows begin at zero, new parameters fresh.

Unusual: the second moment of old rows is not lent to new ones. Their gradients scale with values that are still near
zero, so a borrowed one would keep them almost immobile (docs/growth.md has the figures).
"""

from tokenformer.growth.plan import Plan

SAFE_BETA2 = 0.98


def warning(plan: Plan, beta2: float) -> str | None:
    """A sentence where AdamW's one step count would make the first updates of appended rows huge.

    Zero moments behind an old step count have no bias correction: the first update of an appended row is up to
    (1 − β1)/√(1 − β2) times the rate and grows for 1/(1 − β1) steps: 1.1 at β2 = 0.95, 6.6 at 0.999.
    """
    appended = [which for which, rule in plan.event["rule"].items() if rule != "segment"]
    if not appended or beta2 <= SAFE_BETA2:
        return None
    return (
        f"rows appended to {', '.join(appended)} begin with zero moments behind an old step count: at beta2 = {beta2} "
        f"first updates are several times the rate; use beta2 <= {SAFE_BETA2}, grow by segments, or drop the state"
    )
