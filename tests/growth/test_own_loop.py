"""Growth in a user's own loop: a torch optimizer goes on, and any module with Pattention layers grows."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from growing import config
from torch import nn

from tokenformer import Pattention, UserError, grow
from tokenformer.models import build

TEXT = torch.tensor(list((Path(__file__).parents[2] / "LICENSE").read_bytes()))
BIGGER = {"qkv_tokens": 48, "proj_tokens": 40, "ffn_tokens": 96}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.9, 0.95)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True, betas=(0.9, 0.95)),
}


def losses(model, optimizer, steps, start=0) -> list[float]:
    found = []
    for step in range(start, start + steps):
        first = torch.randint(len(TEXT) - 33, (8,), generator=torch.Generator().manual_seed(step))
        ids = torch.stack([TEXT[i : i + 33] for i in first])
        output = model(ids[:, :-1], labels=ids[:, 1:])
        optimizer.zero_grad()
        (output.loss_sum / output.count).backward()
        optimizer.step()
        found.append(output.loss_sum.item() / output.count.item())
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rule", ["segment", "zero_key"])
def test_a_torch_optimizer_goes_on_and_the_loss_does_not_jump(kind, rule):
    model = build(config(layers=1, vocab=256))
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses(model, optimizer, 60)
    plain, other = copy.deepcopy(model), OPTIMIZERS[kind](model.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.param_groups[0]["params"] = list(plain.parameters())
    other.state = type(other.state)(dict, zip(plain.parameters(), other.state.values(), strict=True))
    bigger = grow(model, **BIGGER, new_tokens=rule, optimizer=optimizer)
    trained, untouched = losses(bigger, optimizer, 8, start=60), losses(plain, other, 8, start=60)
    assert trained[0] == pytest.approx(untouched[0], abs=1e-4)
    assert trained == pytest.approx(untouched, abs=0.1) and trained[-1] != untouched[-1]
    new = bigger.blocks[0].ffn.segments[-1]
    assert new.value_tokens.abs().min() > 0 and new.key_tokens[-1].abs().max() > 0  # what is new has learned


def test_state_groups_and_schedulers_are_kept():
    model = build(config(layers=2, vocab=256))
    names, parameters = zip(*model.named_parameters(), strict=True)
    tokens = [i for i, name in enumerate(names) if name.endswith("_tokens")]
    rest = [i for i in range(len(names)) if i not in tokens]
    groups = [{"params": [parameters[i] for i in part], "weight_decay": d} for part, d in ((rest, 0.0), (tokens, 0.1))]
    other = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*groups, {"params": [other]}], lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses(model, optimizer, 3)
    scheduler.step()
    before = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    bigger = grow(model, ffn_tokens=96, qkv_tokens=30, layers=3, new_tokens={"qkv": "zero_key"}, optimizer=optimizer)
    after = dict(bigger.named_parameters())
    first, second, third = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert third == {id(other)} and first == {id(after[name]) for name in after if not name.endswith("_tokens")}
    assert second == {id(after[name]) for name in after if name.endswith("_tokens")}
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3] * 3
    assert [group["weight_decay"] for group in optimizer.param_groups[:2]] == [0.0, 0.1]
    for name, entry in before.items():
        for key, tensor in entry.items():
            kept = optimizer.state[after[name]][key]
            assert torch.equal(kept if tensor.ndim == 0 else kept[: len(tensor)], tensor)
            assert tensor.ndim == 0 or not kept[len(tensor) :].any()
    assert not [name for name, p in after.items() if name not in before and p in optimizer.state]
    assert not set(optimizer.state) - {*bigger.parameters(), other}
    losses(bigger, optimizer, 2)
    scheduler.step()
    assert optimizer.param_groups[1]["lr"] == 5e-4


def test_what_cannot_be_carried_is_refused_before_anything_is_touched():
    model = build(config(layers=1, vocab=256))
    adafactor = torch.optim.Adafactor(model.parameters())
    losses(model, adafactor, 1)
    with pytest.raises(UserError, match="Adafactor keeps 'row_var'"):
        grow(model, **BIGGER, optimizer=adafactor)
    assert {id(p) for p in model.parameters()} == {id(p) for p in adafactor.param_groups[0]["params"]}
    with pytest.raises(UserError, match="none of the model's parameters"):
        grow(model, **BIGGER, optimizer=torch.optim.SGD(build(config(layers=1)).parameters()))


def test_appended_rows_under_a_large_beta2_are_said():
    model = build(config(layers=1, vocab=256))
    optimizer = torch.optim.AdamW(model.parameters())
    losses(model, optimizer, 1)
    with pytest.warns(UserWarning, match="0.999 their first updates are several times the rate"):
        bigger = grow(model, ffn_tokens=60, new_tokens="zero_key", optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grow(bigger, ffn_tokens=80, optimizer=optimizer)


class Own(nn.Module):
    """Somebody's model, in which Pattention stands where Linear did."""

    def __init__(self, theta="l2_norm_gelu") -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.mlp = nn.Sequential(
            Pattention(16, 16, 24, theta=theta), nn.GELU(), Pattention(16, 4, [10, 6], theta=theta)
        )

    def forward(self, x):
        return self.mlp(self.stem(x))


@pytest.mark.parametrize(
    ("theta", "rule"), [("l2_norm_gelu", "segment"), ("softmax", "segment"), ("gelu_l2_norm", "zero_key")]
)
def test_a_module_of_ones_own_grows_exactly_and_goes_on_with_its_optimizer(theta, rule):
    torch.manual_seed(0)
    model, x, y = Own(theta).double(), torch.randn(64, 8).double(), torch.randn(64, 4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def train(module, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (module(x) - y).square().mean().backward()
            optimizer.step()
        return (module(x) - y).square().mean().item()

    before = train(model, 50)
    bigger = grow(model, tokens=32, new_tokens=rule, optimizer=optimizer)
    assert type(bigger) is Own and bigger is not model
    assert torch.allclose(bigger(x), model(x), rtol=0, atol=1e-12)
    assert [len(s.key_tokens) for s in bigger.mlp[2].segments] == ([10, 6, 16] if rule == "segment" else [10, 22])
    kept = [p.detach().clone() for p in model.parameters()]
    assert train(bigger, 1) < before + 1e-3 and train(bigger, 30) < before
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))  # the old one stays as it is
    new = bigger.mlp[0].segments[-1]
    assert new.key_tokens.grad is not None
    # a new optimizer of the grown module takes over this one's state by its order
    ids = [id(p) for p in optimizer.param_groups[0]["params"]]
    assert ids == [id(p) for p in bigger.parameters()]


def test_layers_may_be_named_and_grow_in_place():
    torch.manual_seed(0)
    model, x = Own(), torch.randn(5, 8)
    before, same = model(x), grow(copy.deepcopy(model), tokens={"mlp.0": 40}, seed=3)
    bigger = grow(model, tokens={"mlp.0": 40}, seed=3, share=True)
    assert bigger is model and len(model.mlp[2].segments) == 2 and len(model.mlp[0].segments) == 2
    assert torch.allclose(model(x), before, atol=1e-6)
    assert torch.equal(model.mlp[0].segments[1].key_tokens, same.mlp[0].segments[1].key_tokens)
    layer = grow(Pattention(4, 4, 8), tokens=16)  # a layer by itself
    assert [len(s.key_tokens) for s in layer.segments] == [8, 8]


@pytest.mark.parametrize(
    ("make", "how", "sentence"),
    [
        (Own, {"tokens": 8}, "has 24 already"),
        (Own, {"ffn_tokens": 64}, "tokens=N"),
        (Own, {"tokens": 64, "ffn_tokens": 64}, "belong to our models"),
        (Own, {"tokens": {"mlp.1": 64}}, "Pattention layers are mlp.0, mlp.2"),
        (Own, {"tokens": 64.5}, "whole number"),
        (Own, {"tokens": 64, "new_tokens": "zero"}, "dead"),
        (lambda: Own("softmax"), {"tokens": 64, "new_tokens": "zero_key"}, "softmax"),
        (lambda: nn.Linear(2, 2), {"tokens": 64}, "no Pattention layers"),
        (lambda: build(config()), {"tokens": 64}, "module of your own"),
        (lambda: nn.Sequential(build(config())), {"tokens": 64}, "its '0': grow that one"),
        (lambda: torch.compile(build(config()), backend="eager"), {"ffn_tokens": 64}, "its '_orig_mod'"),
        (lambda: nn.DataParallel(build(config())), {"ffn_tokens": 64}, "its 'module': grow that one"),
        (lambda: build(config()).requires_grad_(False), {"ffn_tokens": 64, "new_tokens": "zero_key"}, "is frozen"),
        (lambda: Own().requires_grad_(False), {"tokens": 64, "new_tokens": "zero_value"}, "is frozen"),
    ],
)
def test_what_cannot_grow_is_refused_with_a_sentence(make, how, sentence):
    with pytest.raises(UserError, match=sentence):
        grow(make(), **how)


def twice() -> nn.Module:
    """A model whose second block is its first."""
    model = build(config(layers=2))
    model.blocks[1] = model.blocks[0]
    return model


def tied() -> nn.Module:
    """Two layers with the same keys."""
    layers = nn.Sequential(Pattention(8, 8, 16), Pattention(8, 8, 16))
    layers[1].segments[0].key_tokens = layers[0].segments[0].key_tokens
    return layers


def offloaded() -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(build(config()), torch.device("cpu"))


def with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    from tokenformer.hub.hf import TokenFormerForCausalLM

    model = TokenFormerForCausalLM.from_native(build(config()))
    return peft.get_peft_model(model, peft.LoraConfig(target_parameters=["value_tokens"])).base_model.model.model


@pytest.mark.parametrize(
    ("make", "how", "sentence"),
    [
        (with_lora, {"ffn_tokens": 64}, "base_layer.key_tokens' has an adapter of peft: merge it"),
        (twice, {"ffn_tokens": 64}, "'blocks.1.attention.query.* is also 'blocks.0.attention.query.*, so neither can"),
        (tied, {"tokens": 32}, "'1.segments.0.key_tokens' is also '0.segments.0.key_tokens', so neither can grow"),
        (lambda: build(config()).to("meta"), {"ffn_tokens": 64}, "is on the meta device or offloaded, .*: load it"),
        (offloaded, {"ffn_tokens": 64}, "'embedding.weight' is on the meta device or offloaded, .*: load it"),
    ],
)
def test_parameters_without_values_or_of_two_layers_are_refused(make, how, sentence):
    with pytest.raises(UserError, match=sentence):
        grow(make(), **how)


def test_a_layer_that_a_module_uses_twice_grows_once():
    layer, x = Pattention(8, 8, 16).double(), torch.randn(5, 8).double()
    model = nn.Sequential(layer, nn.GELU(), layer)
    bigger = grow(model, tokens=32, new_tokens="zero_key")
    assert bigger[0] is bigger[2] and len(bigger[0].segments[0].key_tokens) == 32
    assert torch.allclose(bigger(x), model(x), rtol=0, atol=1e-12)


def test_what_accelerate_prepared_says_that_the_grown_model_must_be_prepared(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = build(config(layers=1, vocab=256))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95)))
    losses(model, optimizer, 2)
    with pytest.warns(UserWarning, match=r"goes on saving the old model: call accelerator.free_memory\(\), then"):
        bigger = grow(model, **BIGGER, optimizer=optimizer)
    accelerator.free_memory()
    bigger, optimizer = accelerator.prepare(bigger, optimizer)
    before = losses(bigger, optimizer, 2)
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        for parameter in bigger.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path / "state")
    assert losses(bigger, optimizer, 1, start=1)[0] < before[1]
    module, held = accelerator.prepare(Own(), optimizer)[0], len(accelerator._models)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grow(module, tokens=32, share=True) is module and accelerator._models[held - 1] is module  # in place
    accelerator.free_memory()


def test_a_frozen_model_grows_by_segments_that_learn():
    bigger = grow(build(config(layers=1)).requires_grad_(False), ffn_tokens=60)
    assert {name for name, p in bigger.named_parameters() if p.requires_grad} == {
        f"blocks.0.ffn.segments.1.{half}_tokens" for half in ("key", "value")
    }
