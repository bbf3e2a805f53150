"""Arrays of the loader on their way to the device."""

import numpy as np
import pytest
import torch

from tests.data.squares import Squares
from tokenformer.data.loader import Loader
from tokenformer.train.task import on_device, pinned


def test_a_view_of_a_tensor_goes_with_the_storage_of_the_tensor():
    """Its allocator then knows until when a copy under way needs the memory."""
    tensor = torch.arange(6).view(2, 3)
    there = on_device(tensor.numpy(), torch.device("cpu"))
    assert there.untyped_storage()._cdata == tensor.untyped_storage()._cdata and torch.equal(there, tensor)
    assert on_device(np.arange(3), torch.device("cpu")).tolist() == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [False, True])
def test_batches_are_pinned_where_there_is_a_gpu(processes):
    fields = next(iter(Loader(Squares(9, processes), batch=4, workers=1, allocate=pinned))).fields
    assert all(array.base.is_pinned() for array in fields.values())
    for array in fields.values():
        assert np.array_equal(on_device(array, torch.device("cuda")).cpu().numpy(), array)
