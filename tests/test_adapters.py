"""Adapters in memory: detached, the model is its base bit for bit; attached ones add up; merged, they are plain."""

import itertools
from pathlib import Path

import pytest
import torch

import tokenformer
from tokenformer.adapters import added, base_of, digest, merged, remove
from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.errors import UserError
from tokenformer.hub.adapter_folder import AdapterFile, read_adapter, write_adapter
from tokenformer.infer import Engine
from tokenformer.models import build
from tokenformer.models.names import parse
from tokenformer.ops.pattention import THETAS

SHAPE = {"layers": 2, "dim": 32, "heads": 2, "vocab": 64, "context": 32, "qkv_tokens": [8, 12], "proj_tokens": 9}
UNEVEN = {1: LayerOverride(ffn_tokens=[16, 8, 4])}
IDS = torch.randint(64, (3, 10), generator=torch.Generator().manual_seed(0))


def make_base(**keys):
    model = build(ModelConfig(**{**SHAPE, "ffn_tokens": 24, "layer_overrides": UNEVEN, **keys}))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    return model


def make_adapter(folder: Path, model, seed: int, also: tuple[str, ...] = (), layers=(0, 1), **tokens: int) -> Path:
    """An adapter with random values: (rows of) ffn, query, … → tokens."""
    tensors, widths = {}, {"proj": "attention.proj", "ffn": "ffn"}
    parts = {w: [widths[w]] if w in widths else [f"attention.{p}" for p in ("query", "key", "value")] for w in tokens}
    draw = torch.Generator().manual_seed(seed)
    for layer, which in itertools.product(layers, tokens):
        for part in parts[which]:
            at = len(model.blocks[layer].get_submodule(part).segments)
            for half in ("key_tokens", "value_tokens"):
                name = f"blocks.{layer}.{part}.segments.{at}.{half}"
                tensors[name] = torch.randn(tokens[which], 32, generator=draw) * 0.3
    for name in also:
        tensors[name] = model.get_parameter(name).detach() + torch.randn(32, generator=draw) * 0.1
    write_adapter(folder, AdapterFile("base", digest(*base_of(model))), tensors, [{"what": "adapter", "seed": seed}])
    return folder


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    base = make_base()
    return {
        "a": make_adapter(tmp_path / "a", base, 1, qkv=5, ffn=7),
        "b": make_adapter(tmp_path / "b", base, 2, proj=3, ffn=4, layers=[1]),
        "c": make_adapter(tmp_path / "c", base, 3, qkv=6, also=("norm.weight", "norm.bias")),
    }


def logits(model, **how) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, **how).logits


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def by_hand(folders, weights: dict[str, float]) -> torch.Tensor:
    """The sum, on a plain model of all segments whose values are multiplied by the weights."""
    base, tensors = make_base(), {}
    state = {name: p.detach().clone() for name, p in base.named_parameters()}
    sizes = {(which, layer): list(s) for which in ("qkv", "proj", "ffn") for layer in (0, 1)
             for s in [base.config.segments(which, layer)]}  # fmt: skip
    for adapter, weight in weights.items():
        taken = {at: len(s) for at, s in sizes.items()}
        for text, tensor in read_adapter(folders[adapter]).tensors.items():
            if text in base.state_dict():
                state[text] = state[text] + weight * (tensor - base.state_dict()[text])
                continue
            name = parse(text, {})
            which = name.projection if name.projection in ("proj", "ffn") else "qkv"
            at = taken[which, name.layer]
            tensors[name._replace(segment=at).text] = tensor * (weight if name.role.kind == "value" else 1)
            if name.role.kind == "value" and name.projection in ("query", "proj", "ffn"):
                sizes[which, name.layer].append((len(tensor), len(tensor) ** 0.5))
    overrides = {
        layer: LayerOverride(**{f"{w}_tokens": [n for n, _ in sizes[w, layer]] for w in ("qkv", "proj", "ffn")})
        for layer in (0, 1)
    }
    plain = build(ModelConfig(**SHAPE, ffn_tokens=24, layer_overrides=overrides))
    plain.load_state_dict({**state, **tensors})
    return logits(plain)


def test_detached_is_the_base_bit_for_bit(folders):
    model, plain = make_base(), logits(make_base())
    for name, folder in folders.items():
        assert tokenformer.attach(model, folder, name) is model
    assert far(logits(model), plain) > 0.1
    with tokenformer.detached(model, "a", "b", "c"):
        assert torch.equal(logits(model), plain)
        assert torch.equal(logits(model, switches={}), plain)
    with tokenformer.detached(model):
        assert torch.equal(logits(model), plain)
    assert model.active == {"a": 1.0, "b": 1.0, "c": 1.0}
    tokenformer.active(model, {})
    assert torch.equal(logits(model), plain)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in make_base().named_parameters())


def test_attached_in_any_order_and_weight_is_the_sum(folders):
    weights = {"a": 0.5, "b": -2.0, "c": 1.5}
    wanted = by_hand(folders, weights)
    for order in itertools.permutations(folders):
        model = make_base()
        for name in order:
            tokenformer.attach(model, folders[name], name)
        tokenformer.active(model, weights)
        assert far(logits(model), wanted) < 1e-6, order
        with tokenformer.detached(model, "b"):
            assert far(logits(model), by_hand(folders, {"a": 0.5, "c": 1.5})) < 1e-6
    assert far(by_hand(folders, {"a": 0.5, "b": 2.0, "c": 1.5}), wanted) > 1e-2  # the sum depends on the weights


def test_each_row_of_a_batch_has_its_own_adapters(folders):
    model = tokenformer.attach(tokenformer.attach(make_base(), folders["a"], "a"), folders["b"], "b")
    rows = [{"a": 1.0}, {"b": 0.7}, {}]
    switches = {name: torch.tensor([row.get(name, 0.0) for row in rows]) for name in ("a", "b")}
    together = logits(model, switches=switches)
    for i, row in enumerate(rows):
        tokenformer.active(model, row)
        assert far(together[i : i + 1], model(IDS[i : i + 1]).logits) < 1e-6


def test_what_all_rows_share_cannot_be_chosen_for_each(folders):
    """An adapter with `also` moves the base for all samples: its switch counts as it is active, or is refused."""
    model = tokenformer.attach(make_base(), folders["c"], "c")
    wanted = logits(model)
    assert torch.equal(logits(model, switches={"c": torch.ones(3)}), wanted)
    for switches in ({"c": torch.tensor([0.0, 1.0, 1.0])}, {"c": torch.full((3,), 0.5)}, {}):
        with pytest.raises(UserError, match=r"'c' moves parameters of its base, so all samples .* \(now 1\)"):
            logits(model, switches=switches)
    tokenformer.active(model, {})
    assert torch.equal(logits(model, switches={}), logits(make_base()))


def test_what_moves_a_base_in_bf16_is_rounded_once(tmp_path):
    base = make_base().to(torch.bfloat16)
    folder = make_adapter(tmp_path / "norms", base, 3, also=("norm.weight", "norm.bias"))
    model = tokenformer.attach(make_base().to(torch.bfloat16), folder, "norms")
    for name, tensor in read_adapter(folder).tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(model.get_parameter(name), tensor.to(torch.bfloat16))


def test_of_two_that_move_one_parameter_each_counts_alone_too(tmp_path):
    base = make_base()
    folders = {name: make_adapter(tmp_path / name, base, i, also=("norm.weight",)) for i, name in enumerate("ab")}
    model = make_base()
    for name, folder in folders.items():
        tokenformer.attach(model, folder, name)
    for weights in ({"a": 1.0}, {"b": 1.0}, {"a": 1.0}, {}, {"b": 0.5, "a": 1.0}):
        tokenformer.active(model, weights)
        wanted = base.norm.weight + sum(
            w * (read_adapter(folders[n]).tensors["norm.weight"] - base.norm.weight) for n, w in weights.items()
        )
        assert torch.allclose(model.norm.weight, wanted, rtol=0, atol=1e-6)


def test_an_adapter_without_segments_counts_too(tmp_path):
    base, plain = make_base(), logits(make_base())
    folder = make_adapter(tmp_path / "norms", base, 3, also=("norm.weight", "norm.bias"))
    model = tokenformer.attach(make_base(), folder, "norms")
    with torch.no_grad():
        for name, tensor in read_adapter(folder).tensors.items():
            base.get_parameter(name).copy_(tensor)
    assert far(logits(model), logits(base)) < 1e-6 and far(plain, logits(base)) > 1e-2
    assert torch.equal(logits(merged(model)), logits(model))
    with pytest.raises(UserError, match="has a switch 'norms' already"):
        tokenformer.attach(model, folder, "norms")
    with tokenformer.detached(model, "norms"):
        assert torch.equal(logits(model), plain)
    assert Engine(model).generate([[1, 2]], 8) == Engine(base).generate([[1, 2]], 8)


@pytest.mark.parametrize("theta", THETAS)
def test_merged_is_attached(tmp_path, theta):
    model = make_base(theta=theta)
    tokenformer.attach(model, make_adapter(tmp_path / "a", model, 1, qkv=5, ffn=7), "a")
    base = make_base(theta=theta)
    tokenformer.attach(model, make_adapter(tmp_path / "b", base, 2, ffn=4, also=("norm.bias",), layers=[1]), "b")
    tokenformer.attach(model, make_adapter(tmp_path / "c", base, 3, proj=2), "left out")
    tokenformer.active(model, {"a": 0.5, "b": 1.5})
    plain = merged(model)
    assert not plain.config.switch_names() and plain.config.segments("ffn", 1)[-1] == (4, 2.0)
    assert far(logits(plain), logits(model)) < 1e-6
    tokenformer.save(plain, tmp_path / "plain")
    assert torch.equal(logits(tokenformer.load(tmp_path / "plain")), logits(plain))
    assert plain.history[-1] == {"what": "merge_adapters", "number": 0, "weights": {"a": 0.5, "b": 1.5}}


def test_what_a_switch_of_the_base_adds_counts_always_once_it_is_merged(tmp_path):
    model = tokenformer.grow(make_base(), vocab=make_base().config.vocab + 3, ffn_tokens=100, switch="draw")
    model.blocks[0].ffn.segments[-1].value_tokens.data.normal_()
    tokenformer.active(model, {"draw": 0.5})
    tokenformer.save(merged(model), tmp_path / "plain")
    again = tokenformer.load(tmp_path / "plain")
    assert not again.config.switch_names()
    assert logits(again).shape == logits(model).shape and far(logits(again), logits(model)) < 1e-6


def test_a_sum_of_adapters_is_an_adapter(folders, tmp_path):
    summed = added([(read_adapter(folders["a"]), 0.5), (read_adapter(folders["b"]), -2.0)])
    write_adapter(tmp_path / "sum", summed.about, summed.tensors, summed.history)
    again = added([(read_adapter(tmp_path / "sum"), 2.0), (read_adapter(folders["b"]), 4.0)])
    write_adapter(tmp_path / "again", again.about, again.tensors, again.history)
    model = tokenformer.attach(make_base(), tmp_path / "sum", "sum")
    assert far(logits(model), by_hand(folders, {"a": 0.5, "b": -2.0})) < 1e-6
    model = tokenformer.attach(make_base(), tmp_path / "again", "again")
    assert far(logits(model), by_hand(folders, {"a": 1.0})) < 1e-6
    for weighted in ([("c", 0.5)], [("a", 1.0), ("c", 1.0)]):
        with pytest.raises(UserError, match=r"also moves 'norm.bias' of its base, which a sum cannot hold"):
            added([(read_adapter(folders[name]), weight) for name, weight in weighted])
    alone = added([(read_adapter(folders["c"]), 1.0)])
    assert alone.tensors.keys() == read_adapter(folders["c"]).tensors.keys() and "norm.bias" in alone.tensors
    assert alone.history == [{"what": "adapter", "seed": 3}]


def test_another_base_is_refused_and_untouched(folders):
    model = make_base()
    with torch.no_grad():
        model.embedding.weight[0, 0] += 1e-6
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(UserError, match=r"is an adapter of base with digest .{12}, and these are other weights"):
        tokenformer.attach(model, folders["a"], "a")
    assert not model.active and all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert before.keys() == dict(model.named_parameters()).keys()


def test_names_and_weights_that_cannot_be(folders):
    model = tokenformer.attach(make_base(), folders["a"], "a")
    other = build(ModelConfig(layers=1, dim=8, heads=1, kind="llama"))
    for action, said in (
        (lambda: tokenformer.attach(model, folders["b"], "a"), "has a switch 'a' already"),
        (lambda: tokenformer.attach(model, folders["b"], ""), "needs a name"),
        (lambda: tokenformer.attach(model, folders["b"], 3), "needs a name, and '3' is none"),
        (lambda: tokenformer.attach(model, folders["b"], Path("b")), "needs a name, and 'b' is none"),
        (lambda: tokenformer.attach(model, folders["b"], ["b"]), "needs a name"),
        (lambda: tokenformer.attach(model, None, "b"), "None is no folder of an adapter"),
        (lambda: tokenformer.attach(torch.nn.Linear(2, 2), folders["b"], "b"), "a Linear is no model of tokenformer"),
        (lambda: tokenformer.active(torch.nn.Linear(2, 2), {}), "a Linear is no model of tokenformer"),
        (lambda: tokenformer.active(model, {3: 1.0}), "no adapter or switch '3': there are a"),
        (lambda: tokenformer.active(model, {"a": 10**400}), "the weight of 'a' is too large"),
        (lambda: tokenformer.active(model, {"a": 10**5000}), "the weight of 'a' is too large"),
        (lambda: tokenformer.active(model, {"a": 1e39}), "the weight of 'a' is 1e[+]39, too large for float32"),
        (lambda: tokenformer.active(model, {"b": 1.0}), "no adapter or switch 'b': there are a"),
        (lambda: tokenformer.active(model, {"a": float("nan")}), "the weight of 'a' is nan"),
        (lambda: tokenformer.active(model, {"a": "0.5"}), "the weight of 'a' is 0.5: give a finite number"),
        (lambda: tokenformer.active(model, "a"), "'a' gives no weights"),
        (lambda: remove(model, "b"), "the model has no adapter 'b': there are a"),
        (lambda: remove(make_base(), Path("b")), "the model has no adapter 'b': there are none"),
        (lambda: tokenformer.detached(model, "b").__enter__(), "no adapter or switch 'b': there are a"),
        (lambda: logits(model, switches={"b": torch.ones(3)}), "no adapter or switch 'b': there are a"),
        (lambda: logits(model, switches={"a": 0.5}), "needs one weight per sample: give a tensor of 3 numbers"),
        (lambda: logits(model, switches={"a": torch.ones(2)}), "needs one weight per sample"),
        (lambda: tokenformer.attach(other, folders["a"], "a"), r"of language \(llama\) has no adapters"),
    ):
        with pytest.raises(UserError, match=said):
            action()
    assert model.active == {"a": 1.0} and len(model.blocks[0].ffn.segments) == 2
    assert tokenformer.attach(model, folders["b"], "b").active == {"a": 1.0, "b": 1.0}


def test_what_would_not_be_finite_is_not_written(folders, tmp_path):
    """Neither into the model nor into a merged one or a sum."""
    model = tokenformer.attach(tokenformer.attach(make_base(), folders["c"], "c"), folders["a"], "a")
    before = {name: p.clone() for name, p in model.named_parameters()}
    big = make_base().to(torch.float16)
    tokenformer.attach(big, make_adapter(tmp_path / "big", big, 3, also=("norm.weight",)), "big")
    with pytest.raises(
        UserError, match=r"with these weights of adapters 'norm.weight' is not finite: give smaller ones"
    ):
        tokenformer.active(big, {"big": 1e7})
    assert big.active == {"big": 1.0} and torch.isfinite(logits(big)).all()
    with torch.no_grad():
        model.blocks[0].ffn.segments[1].value_tokens.mul_(100)
    tokenformer.active(model, {"a": 3e38})
    with pytest.raises(UserError, match=r"with weight 3e\+38 of a 'blocks.0.*' is not finite: give a smaller weight"):
        merged(model)
    with pytest.raises(UserError, match=r"with weight 1e\+39 of .* is not finite: give a smaller weight"):
        added([(read_adapter(folders["a"]), 1e39)])
    assert before.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_what_was_trained_into_a_moved_parameter_is_not_set_back(folders, cast):
    """Values that `active` did not write are refused before anything changes; a cast is no such change."""
    model = tokenformer.attach(make_base(), folders["c"], "c").to(cast)
    for kind in (cast, torch.float32):
        model.to(kind)
        with tokenformer.detached(model):
            pass
        tokenformer.active(model, {"c": 0.5})
    held = model.norm.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss_sum.backward()
    optimizer.step()
    trained, wanted = held.detach().clone(), logits(model)
    tokenformer.active(model, {"c": 0.5})  # which changes nothing
    for action in (
        lambda: tokenformer.active(model, {}),
        lambda: tokenformer.active(model, {"c": 0.6}),
        lambda: tokenformer.detached(model).__enter__(),
        lambda: remove(model, "c"),
        lambda: tokenformer.attach(model, folders["a"], "a"),
    ):
        with pytest.raises(UserError, match=r"'norm.(weight|bias)' was changed .* since adapter c moved it"):
            action()
        assert torch.equal(held, trained) and model.active == {"c": 0.5} and torch.equal(logits(model), wanted)
    assert far(logits(merged(model)), wanted) < 1e-6


def test_a_model_with_adapters_is_neither_saved_nor_grown_as_if_it_had_none(folders, tmp_path):
    model = tokenformer.attach(make_base(), folders["a"], "a")
    for action, said in (
        (lambda: tokenformer.save(model, tmp_path / "new"), r"adapters are attached \(a\): save"),
        (lambda: tokenformer.grow(model, proj_tokens=20), r"adapters are attached \(a\): merge"),
        (lambda: tokenformer.shrink(model, ratio=0.5, by="newest"), r"adapters are attached \(a\): merge"),
    ):
        with pytest.raises(UserError, match=said):
            action()
    assert not (tmp_path / "new").exists()
    assert tokenformer.grow(merged(model), proj_tokens=20).config.proj_tokens == [9, 11]
