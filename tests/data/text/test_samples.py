"""Samples: the official order exactly, the permutation, the parts of a set, blends."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.data.text.writing import write_set
from tokenformer.data.permutation import EpochOrder, permute, round_keys
from tokenformer.data.source import Blend
from tokenformer.data.text.indexed import Indexed
from tokenformer.data.text.official_order import OfficialOrder
from tokenformer.data.text.parts import bounds, part_edges
from tokenformer.data.text.samples import Windows

GOLDEN = Path(__file__).parents[1] / "golden" / "indexed"
ORDER = json.loads((GOLDEN / "sample_order.json").read_text())


def tokens(order: OfficialOrder | Windows, index: int) -> list[int]:
    [pieces] = order.pieces(np.array([index]))
    return [int(t) for start, stop in pieces for t in order.source.span(start, stop)]


def test_the_official_split():
    assert bounds(21, [969, 30, 1]) == ORDER["split_index"]


@pytest.mark.parametrize("name", ["uint16", "int32"])
@pytest.mark.parametrize("case", ORDER["cases"], ids=lambda c: f"{len(c['documents'])} documents, seed {c['seed']}")
def test_official_order_is_reproduced_exactly(tmp_path, name, case):
    documents = case["documents"]
    order = OfficialOrder(
        Indexed(GOLDEN / name),
        documents[0],
        documents[-1] + 1,
        case["seq_length"],
        case["num_samples"],
        case["seed"],
        tmp_path,
    )
    assert order.epochs == case["num_epochs"]
    assert order.documents_shuffled.tolist() == case["doc_idx"]
    rows, offsets = order.locate(np.arange(len(case["sample_idx"])))
    assert [list(pair) for pair in zip(rows.tolist(), offsets.tolist(), strict=True)] == case["sample_idx"]
    assert order.shuffle.tolist() == case["shuffle_idx"]
    assert order.count == case["dataset_len"]
    assert [tokens(order, i) for i in range(4)] == case["first_samples"]


def official_loop(sizes: list[int], context: int, samples: int) -> list[list[int]]:
    """Sample starts found by walking token by token."""
    places = [(d, o) for d, size in enumerate(sizes) for o in range(size)]
    return [[0, 0]] + [list(places[i * context]) for i in range(1, samples + 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.integers(1, 7), st.integers(0, 40))
def test_official_sample_starts_agree_with_walking_the_tokens(tmp_path_factory, sizes, context, samples):
    folder = tmp_path_factory.mktemp("walk")
    write_set(folder / "w", [[list(range(n))] for n in sizes])
    order = OfficialOrder(Indexed(folder / "w"), 0, len(sizes), context, samples, 5, folder)
    shuffled = [sizes[d] for d in order.documents_shuffled]
    rows, offsets = order.locate(np.arange(len(order.shuffle) + 1))
    assert [list(p) for p in zip(rows.tolist(), offsets.tolist(), strict=True)] == official_loop(
        shuffled, context, len(order.shuffle)
    )
    assert len(order.shuffle) >= samples
    for position in range(order.count):
        sample, numbers = tokens(order, position), order.documents(order.pieces(np.array([position]))[0]).tolist()
        assert len(sample) == len(numbers) == context + 1
        pairs = itertools.pairwise(zip(sample, numbers, strict=True))
        assert all(b == a + 1 or n > m for (a, m), (b, n) in pairs)


def test_official_index_is_built_once_by_many_processes(tmp_path):
    code = (
        "from pathlib import Path; import sys\n"
        "from tokenformer.data.text.indexed import Indexed\n"
        "from tokenformer.data.text.official_order import OfficialOrder\n"
        f"order = OfficialOrder(Indexed({str(GOLDEN / 'uint16')!r}), 0, 21, 16, 60, 1234, Path(sys.argv[1]))\n"
        "print(order.count, order.shuffle[:3].tolist())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert {run.communicate()[0] for run in runs} == {"93 [6, 52, 36]\n"}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_permutation_is_the_one_that_runs_were_begun_with():
    assert permute(np.arange(8), 8, round_keys("x", 1, 0)).tolist() == [2, 1, 3, 0, 6, 5, 7, 4]
    far = [411414126099, 569800727270, 403412980374, 468282427445, 239865466032]
    assert permute(np.arange(5) * 10**11, 10**12 + 7, round_keys("x", 1, 0)).tolist() == far


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 5))
def test_permutation_is_one_to_one(n, seed):
    assert sorted(permute(np.arange(n), n, round_keys("x", seed)).tolist()) == list(range(n))


def test_permutation_of_large_ranges_stays_inside_and_any_part_can_be_asked_for():
    n, keys = 10**12 + 7, round_keys("big", 1)
    index = np.arange(n - 100_000, n)
    values = permute(index, n, keys)
    assert values.min() >= 0 and values.max() < n and len(np.unique(values)) == len(values)
    assert permute(index[::-7], n, keys).tolist() == values[::-7].tolist()


def test_permutations_are_spread_evenly_and_differ_by_key():
    n, trials = 10, 2000
    counts = np.zeros((n, n))
    for trial in range(trials):
        counts[np.arange(n), permute(np.arange(n), n, round_keys("even", trial))] += 1
    chi2 = ((counts - trials / n) ** 2 / (trials / n)).sum()
    assert chi2 < 81 + 6 * (2 * 81) ** 0.5  # 81 degrees of freedom, six deviations
    shifts = permute(np.arange(100_000), 100_000, round_keys("a", 0)) - np.arange(100_000)
    assert len(np.unique(shifts)) > 50_000  # not a rotation


def stream(folder: Path, tokens: int, documents: int = 1) -> Indexed:
    edges = np.linspace(0, tokens, documents + 1).astype(int)
    write_set(folder / "s", [[list(range(a, b))] for a, b in itertools.pairwise(edges.tolist())], np.int32)
    return Indexed(folder / "s")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 3))
def test_every_token_but_the_first_is_a_target_once_an_epoch(tmp_path_factory, length, context, epoch):
    source = stream(tmp_path_factory.mktemp("once"), length)
    order = Windows(source, 0, length, context)
    places = np.arange(epoch * order.count, (epoch + 1) * order.count)
    targets = [t for i in EpochOrder(order.count, "x", 3)(places)[0].tolist() for t in tokens(order, i)[1:]]
    assert sorted(targets) == list(range(1, 1 + order.count * context))
    assert order.count == (length - 1) // context


def test_parts_are_whole_documents(tmp_path):
    assert part_edges(stream(tmp_path, 1000, 50), [80, 10, 10]) == ([0, 800, 900, 1000], "")


def test_a_part_without_a_document_is_cut_by_tokens_and_says_so(tmp_path):
    edges, note = part_edges(stream(tmp_path, 1000, 2), [969, 30, 1])
    assert edges == [0, 969, 999, 1000] and note.startswith("validation and test are cut by tokens")
    edges, note = part_edges(stream(tmp_path, 1000, 25), [969, 30, 1])
    assert (
        edges == [0, 960, 999, 1000] and note == "test is cut by tokens, since 25 documents cannot be shared out whole"
    )
    assert part_edges(stream(tmp_path, 1000, 1), [1]) == ([0, 1000, 1000, 1000], "")


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.lists(st.sampled_from([0, 1e-4, 0.5, 1, 90]), min_size=1, max_size=3))
@example(4, 1, [1, 0, 1])
@example(3, 1, [0, 1, 1])
@example(100, 1, [90, 0, 10])
@example(3, 1, [1e-4, 1, 1])
@example(5, 1, [0, 1, 1])
def test_parts_share_no_token_and_leave_none_out(tmp_path_factory, tokens, documents, shares):
    assume(any(shares))
    edges, _ = part_edges(stream(tmp_path_factory.mktemp("parts"), tokens, documents), shares)
    assert edges[0] == 0 and edges[-1] == tokens and edges == sorted(edges)
    for share, start, stop in zip([*shares, 0, 0], edges, edges[1:], strict=False):
        assert share > 0 or start == stop
        assert share * tokens < sum(shares) or start < stop  # whoever is owed a token has one


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 500))
def test_blend_proportions_hold_within_one_sample_at_every_point(weights, length):
    turns, before = Blend(weights).turns(np.arange(length))
    share = np.array(weights) / sum(weights)
    counts = np.cumsum(turns[:, None] == np.arange(len(weights)), axis=0)
    assert np.abs(counts - np.arange(1, length + 1)[:, None] * share).max() < 1
    for number in range(len(weights)):  # each set gives its samples in order, none left out
        assert before[turns == number].tolist() == list(range(int((turns == number).sum())))


def test_a_set_of_the_smallest_weight_has_its_turn():
    assert Blend([1, 1e-7]).counts.tolist() == [99_999, 1]


def test_blend_of_awkward_weights_is_rounded_to_a_hundred_thousandth():
    weights = np.array([0.123456789, 7.7, 1e-9])
    blend = Blend(weights.tolist())
    assert blend.period == 100_000
    assert np.abs(blend.counts / blend.period - weights / weights.sum()).max() < 2e-5
    far = 10**9 + 12_345
    turns, before = blend.turns(np.arange(far, far + 200_000))
    first = int(before[turns == 0][0])
    assert abs(first - far * blend.counts[0] / blend.period) < 1
    assert before[turns == 0].tolist() == list(range(first, first + int((turns == 0).sum())))
