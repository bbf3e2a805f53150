"""What a block keeps for backward when it is checkpointed, compiled or not."""

import pytest
import torch

from tokenformer.config import ModelConfig
from tokenformer.config_train import TrainConfig
from tokenformer.models import LanguageModel
from tokenformer.train.compile import wrap

SHAPE = ModelConfig(layers=3, dim=16, heads=2, vocab=32, context=8, qkv_tokens=24, proj_tokens=24, ffn_tokens=40)
IDS = torch.arange(16).reshape(2, 8)


def kept(checkpointing: str, backend: str) -> tuple[int, list[torch.Tensor]]:
    """Bytes that wait for backward, parameters aside, and the gradients."""
    torch.compiler.reset()
    model = LanguageModel(SHAPE, seed=1)
    for block in model.blocks:
        wrap(block, TrainConfig(activation_checkpointing=checkpointing), backend)
    seen = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss = model(IDS, labels=IDS).loss_sum
    assert loss is not None
    loss.backward()
    return sum(seen.values()), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_a_block_that_is_computed_again_keeps_its_inputs_alone_compiled_or_not(backend):
    everything, wanted = kept("none", backend)
    few, found = kept("full", backend)
    assert few == kept("full", "none")[0] < everything / 4
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
