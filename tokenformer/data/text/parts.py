"""Train, validation and test: where the three parts of a set begin and end."""

from collections.abc import Sequence

from tokenformer.data.text.indexed import Indexed

PARTS = ("train", "validation", "test")


def bounds(total: int, shares: Sequence[float]) -> list[int]:
    """Return where the parts of `total` things begin and end, rounded as GPT-NeoX does. A part of share 0 stays empty.

    >>> bounds(21, [969, 30, 1]), bounds(3, [0, 1, 1])
    ([0, 20, 21, 21], [0, 0, 1, 3])
    """
    shares = [*shares, 0.0, 0.0][:3]
    places = [0]
    for share in shares:
        places.append(places[-1] + round(share / sum(shares) * total))
    over = places[-1] - total  # GPT-NeoX moves all places by it: below 0, or into a first part of no share
    return [0, *(max(0, place - over) if any(shares[:i]) else 0 for i, place in enumerate(places[1:], 1))]


def part_edges(source: Indexed, shares: Sequence[float]) -> tuple[list[int], str]:
    """Return where the parts begin and end in the stream, and a sentence if not all of them are whole documents.

    A part that would get no document is cut from its neighbours by tokens.
    """
    shares = [*shares, 0.0, 0.0][:3]
    places, total = bounds(source.documents, shares), len(source.tokens)
    edges = [source.document_start(p) for p in places]
    wanted = [i for i in range(3) if shares[i] > 0]
    starved = {i for i in wanted if places[i + 1] <= places[i]}
    if not starved:
        return edges, ""
    cuts = bounds(total, shares)
    for i in (1, 2):  # a cut lies between the two parts beside it; parts of no share have no width
        beside = {*[p for p in wanted if p < i][-1:], *[p for p in wanted if p >= i][:1]}
        edges[i] = cuts[i] if starved & beside else edges[i]
    if any(edges[i + 1] <= edges[i] for i in wanted):
        edges = cuts
    names = f"{' and '.join(PARTS[i] for i in sorted(starved))} {'is' if len(starved) == 1 else 'are'}"
    count = "one document" if source.documents == 1 else f"{source.documents:,} documents"
    return edges, f"{names} cut by tokens, since {count} cannot be shared out whole"
