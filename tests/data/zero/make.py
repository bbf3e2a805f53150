"""Makes the ZeRO-1 checkpoint folders beside this file with DeepSpeed itself; see README.md.

python make.py      # torch 2.13.0, deepspeed 0.19.8, numpy, safetensors
"""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
LAYERS, HIDDEN, VOCABULARY = 2, 16, 128
ZERO = {"stage": 1}
TOKENS = {"query": 12, "key": 12, "value": 12, "proj": 10, "mlp": 20}
# fp16: DeepSpeed saves shards without padding; bf16 with fp32 gradients is another class of it and keeps the padding.
FOLDERS = {"world1": (1, "fp16"), "world2": (2, "fp16"), "world3": (3, "fp16"), "world3_bf16": (3, "bf16")}


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


def parameter_tokens(name: str) -> nn.Module:
    module = nn.Module()
    module.key_param_tokens = normal(TOKENS[name], HIDDEN)
    module.value_param_tokens = normal(TOKENS[name], HIDDEN)
    return module


def official_names() -> nn.Module:
    """Containers whose state dict has the names of the official model; `sequential.1` and `.{layers + 2}` are empty."""
    embedding, final = nn.Module(), nn.Module()
    embedding.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN, _weight=normal(VOCABULARY, HIDDEN).data)
    final.norm = nn.LayerNorm(HIDDEN)
    blocks = []
    for _ in range(LAYERS):
        block = nn.Module()
        block.attention = nn.ModuleDict({name: parameter_tokens(name) for name in ("query", "key", "value", "proj")})
        block.mlp = parameter_tokens("mlp")
        blocks.append(block)
    model = nn.Module()
    model.sequential = nn.Sequential(embedding, nn.Identity(), *blocks, nn.Identity(), final)
    model.forward = lambda: sum((p.float() - 0.3).square().sum() for p in model.parameters())  # any loss will do
    return model


def train(rank: int, world: int, dtype: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # slow without fp16 units, but right
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(1234)
    model = official_names()
    norm = [p for name, p in model.named_parameters() if ".norm." in name]
    rest = [p for name, p in model.named_parameters() if ".norm." not in name]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": norm, "weight_decay": 0.0}]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": ZERO}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 12}
    else:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(engine())
        engine.step()
    # What the official trainer adds to the model file, random states included (NumPy's are foreign pickles).
    state = {"iteration": 2, "args": {"num_layers": LAYERS, "hidden_size": HIDDEN}, "rng_tracker_states": {}}
    state |= {"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state()}
    state |= {"np_rng_state": numpy.random.get_state()}
    engine.save_checkpoint(folder, client_state=state)
    live = {name: deepspeed.utils.safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}
    if rank == 0:
        if dtype == "fp16":  # DeepSpeed's own script does not read what its bf16 class writes
            tool = get_fp32_state_dict_from_zero_checkpoint(folder)
            assert tool.keys() == live.keys() and all(torch.equal(tool[name], live[name]) for name in live)
        assert not any(torch.equal(p.float(), live[name]) for name, p in model.named_parameters())
        save_file(live, HERE / f"expected_{Path(folder).name}.safetensors")


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "DS_ACCELERATOR": "cpu"}
    for name in sys.argv[1:] or FOLDERS:
        with tempfile.TemporaryDirectory() as scratch:
            torch.multiprocessing.spawn(train, (*FOLDERS[name], f"{scratch}/{name}"), nprocs=FOLDERS[name][0])
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(f"{scratch}/{name}", HERE / name, ignore=shutil.ignore_patterns("*.py"))
            (HERE / name / "global_step2" / "configs").mkdir()
            shutil.copyfile(HERE / "config.yml", HERE / name / "global_step2" / "configs" / "config.yml")
