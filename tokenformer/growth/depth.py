"""Where new blocks go. Their proj and ffn values are zero, so each is the identity: exact, and alive from step two."""

from collections.abc import Sequence

from tokenformer.errors import UserError
from tokenformer.strict import need

Places = list[tuple[int, bool]]  # for each layer of the grown model: (old layer it comes from or is like, is it new)


def places(old: int, layers: int | None, positions: str | Sequence[int] = "even") -> Places:
    """Which old block each block of the grown model is, or which one a new block is shaped like (the one before it).

    `positions`: `even` (spread over the depth, the last at the end), `end`, or the new blocks' own layer numbers.

    >>> places(2, 4)
    [(0, False), (0, True), (1, False), (1, True)]
    >>> places(2, 3, positions=[0])
    [(0, True), (0, False), (1, False)]
    """
    layers = old if layers is None else layers
    added = layers - old
    need(added >= 0, f"layers is {layers}, but the model has {old} already: give more")
    if positions == "even":
        new = {(i + 1) * layers // added - 1 for i in range(added)}
    elif positions == "end":
        new = set(range(old, layers))
    elif isinstance(positions, str):
        raise UserError(f"positions is '{positions}': give even, end, or the layer numbers of the new blocks")
    else:
        new = set(positions)
        fits = len(new) == len(positions) == added and all(0 <= p < layers for p in new)
        need(fits, f"positions is {list(positions)}: give {added} different numbers from 0 to {layers - 1}")
    found, came = [], 0
    for layer in range(layers):
        found.append((max(came - 1, 0), True) if layer in new else (came, False))
        came += layer not in new
    return found
