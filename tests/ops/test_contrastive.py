"""Losses of pairs against a plain reference: values and gradients, by chunks, on one process and on 2 and 4 ranks."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.parallel.conftest import forkserver
from tokenformer.ops.contrastive import gathered, sigmoid_loss, softmax_loss
from tokenformer.ops.retrieval import recalls

PAIRS, WIDTH = 12, 5
CASES = [("softmax", 1 << 26), ("softmax", 30), ("sigmoid", 1 << 26), ("sigmoid", 14)]  # and how many scores at once


def inputs() -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    image, text = (torch.randn(PAIRS, WIDTH, generator=random, dtype=torch.float64) for _ in range(2))
    return F.normalize(image), F.normalize(text), torch.tensor(1.3).double(), torch.tensor(-2.1).double()


def reference(loss: str) -> list[torch.Tensor]:
    """The loss over all pairs at once, as the papers write it, and its gradients by autograd."""
    image, text, scale, bias = (tensor.requires_grad_() for tensor in inputs())
    scores = scale.exp() * image @ text.T
    if loss == "softmax":
        total = -(scores.log_softmax(1).diagonal().sum() + scores.log_softmax(0).diagonal().sum()) / 2
    else:
        z = 2 * torch.eye(PAIRS, dtype=torch.float64) - 1
        total = torch.log1p(torch.exp(-z * (scores + bias))).sum()
    used = [image, text, scale, *([bias] if loss == "sigmoid" else [])]
    return [total.detach(), *torch.autograd.grad(total, used)]


def ours(loss: str, scores: int, rank: int = 0, world: int = 1, group=None) -> list[torch.Tensor]:
    image, text, scale, bias = inputs()
    rows = slice(rank * PAIRS // world, (rank + 1) * PAIRS // world)
    if loss == "softmax":
        found = softmax_loss(image[rows], text[rows], scale, group, scores)
    else:
        found = sigmoid_loss(image[rows], text[rows], scale, bias, group, scores)
    if group is None:
        return [part for part in found if part is not None]
    sums = [part.clone() for part in (found.total, found.scale, found.bias) if part is not None]
    for part in sums:
        dist.all_reduce(part, group=group)
    total, *numbers = sums
    return [total, gathered(found.image, group), gathered(found.text, group), *numbers]


def rank_of_four(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, wait = dist.FileStore(f"{folder}/store", 4), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=wait)
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]  # of the second one, ranks are not numbers in it
    groups = {2: halves[rank // 2], 4: dist.group.WORLD}
    found = {(world, case): ours(*case, rank % world, world, groups[world]) for world in groups for case in CASES}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def check(found: list[torch.Tensor], loss: str) -> None:
    for one, other in zip(found, reference(loss), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_one_process_computes_the_reference(case):
    check(ours(*case), case[0])


@pytest.mark.multi
def test_two_and_four_ranks_compute_the_reference(tmp_path):
    ranks = [forkserver().Process(target=rank_of_four, args=(rank, str(tmp_path))) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * 4
    for rank in range(4):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found) == 2 * len(CASES)
        for (_, (loss, _)), parts in found.items():
            check(parts, loss)


def plain_recalls(scores: list[list[float]], owners: list[int]) -> dict[str, float]:
    """The same by counting, without tensors: a wrong one with an equal score comes first."""
    found: dict[str, float] = {}
    for k in (1, 5, 10):
        hits = []
        for image, row in enumerate(scores):
            right = [row[t] for t, owner in enumerate(owners) if owner == image]
            if right:
                hits.append(sum(s >= max(right) for t, s in enumerate(row) if owners[t] != image) < k)
        found[f"image_to_text_r{k}"] = sum(hits) / len(hits)
        hits = []
        for text, owner in enumerate(owners):
            column = [row[text] for row in scores]
            hits.append(sum(s >= column[owner] for image, s in enumerate(column) if image != owner) < k)
        found[f"text_to_image_r{k}"] = sum(hits) / len(hits)
    return found


def test_recall_counts_all_captions_and_ties_against_the_model():
    owners = [0, 0, 1, 2, 2, 2, 4]  # image 3 has no caption
    random = torch.Generator().manual_seed(1)
    for levels in (2, 3, 100):  # few levels make many ties
        scores = torch.randint(levels, (5, len(owners)), generator=random).float()
        assert recalls(scores, torch.tensor(owners)) == pytest.approx(plain_recalls(scores.tolist(), owners))
    alike = recalls(torch.ones(20, 20), torch.arange(20))
    assert set(alike.values()) == {0.0}  # a model for which all are alike has found nothing
    broken = recalls(torch.full((20, 20), torch.nan), torch.arange(20))
    assert set(broken.values()) == {0.0}  # nor has one whose weights are not numbers
    second = torch.tensor([[0.2, 0.9, 0.1, 0.1], [0.1, 0.1, 0.8, 0.9]])  # the second caption of each is the likeliest
    assert recalls(second, torch.tensor([0, 0, 1, 1]))["image_to_text_r1"] == 1.0
