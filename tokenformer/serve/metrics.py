"""Counts and times of requests, in the text format of Prometheus."""

from collections import Counter
from collections.abc import Mapping, Sequence

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Histogram:
    """How many values were at most so large.

    >>> times = Histogram([0.1, 1])
    >>> times.add(0.5)
    >>> times.lines("t")
    ['t_bucket{le="0.1"} 0', 't_bucket{le="1"} 1', 't_bucket{le="+Inf"} 1', 't_sum 0.5', 't_count 1']
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        total, out = 0, []
        for bound, count in zip([*self.bounds, "+Inf"], self.counts, strict=True):
            total += count
            out.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*out, f"{name}_sum {self.sum:.9g}", f"{name}_count {total}"]


class Metrics:
    """What the server tells about itself beside the counts of its engine."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, values: Mapping[str, tuple[str, str, float]]) -> str:
        """Return all metrics; `values`: name → kind, what it is, and the number now."""
        out = []
        for name, (kind, about, value) in values.items():
            out += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", f"{name} {value:.12g}"]
        name = "tokenformer_requests_total"
        out += [f"# HELP {name} Answered HTTP requests.", f"# TYPE {name} counter"]
        out += [f'{name}{{path="{path}",status="{status}"}} {n}' for (path, status), n in sorted(self.requests.items())]
        for name, about, histogram in (
            ("tokenformer_first_token_seconds", "From a request to the first piece of its answer.", self.first_token),
            ("tokenformer_request_seconds", "From a request to the end of its answer.", self.whole),
        ):
            out += [f"# HELP {name} {about}", f"# TYPE {name} histogram", *histogram.lines(name)]
        return "\n".join(out) + "\n"
