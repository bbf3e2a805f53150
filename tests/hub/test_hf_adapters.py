"""An exported model takes adapters of ours by transformers' own methods, alone and beside those of peft."""

import copy
from pathlib import Path

import pytest
import torch

import tokenformer
from tests.hub.test_images import X, trained
from tests.test_adapters import IDS, far, make_adapter, make_base
from tokenformer import UserError
from tokenformer.adapters import base_of, digest, merged
from tokenformer.growth.merge import merge_segments

pytest.importorskip("transformers", minversion="5.17")

from transformers import AutoModelForCausalLM, AutoModelForImageClassification, Trainer, TrainingArguments

import tokenformer.hub.hf

GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones(3, 4)}


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """An exported base, and adapters of it; c moves a norm of the base, too."""
    base = make_base()
    tokenformer.save(base, tmp_path / "base", format="hf")
    made = {
        "a": make_adapter(tmp_path / "a", base, 1, qkv=5, ffn=7),
        "b": make_adapter(tmp_path / "b", base, 2, proj=3, ffn=4, layers=[1]),
        "c": make_adapter(tmp_path / "c", base, 3, qkv=6, also=("norm.weight", "norm.bias")),
    }
    return {**made, "base": tmp_path / "base"}


def load(folders):
    return AutoModelForCausalLM.from_pretrained(folders["base"]).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def native(folders, **weights: float):
    model = make_base()
    for name in weights:
        tokenformer.attach(model, folders[name], name)
    tokenformer.active(model, weights)
    return model


def test_the_methods_of_transformers_attach_switch_and_delete(folders):
    model = load(folders)
    plain, ids = logits(model), IDS[:, :4]
    with pytest.raises(ValueError, match="No adapter loaded"):
        model.set_adapter("a")
    for name in "abc":
        model.load_adapter(folders[name], adapter_name=name)
        assert model.active_adapters() == [name]  # the newest alone, as with peft's
        assert torch.equal(logits(model), native(folders, **{name: 1.0})(IDS).logits)
    model.set_adapter(["a", "c"])
    both = native(folders, a=1.0, c=1.0)
    assert model.active_adapters() == ["a", "c"] and torch.equal(logits(model), both(IDS).logits)
    assert torch.equal(model.generate(ids, **GREEDY), both.generate(ids, 5))
    tokenformer.active(model.model, {"a": 0.5, "b": -2.0})
    weighted = logits(model)
    for _ in range(2):
        model.disable_adapters()
        assert model.active_adapters() == [] and torch.equal(logits(model), plain)
    assert not torch.equal(model.generate(ids, **GREEDY), both.generate(ids, 5))
    model.enable_adapters()
    assert torch.equal(logits(model), weighted) and far(weighted, native(folders, a=0.5, b=-2.0)(IDS).logits) < 1e-6
    model.set_adapter("c")
    model.delete_adapter(["a", "c"])
    assert model.active_adapters() == [] and torch.equal(logits(model), plain)
    model.set_adapter("b")
    assert torch.equal(logits(model), native(folders, b=1.0)(IDS).logits)
    model.load_adapter(folders["a"])
    assert model.active_adapters() == ["default"] and torch.equal(logits(model), native(folders, a=1.0)(IDS).logits)


def test_a_model_is_saved_only_as_what_it_says(folders, tmp_path):
    """Not with half of an adapter, and after `delete_adapter` as the base, bit for bit."""
    model = load(folders)
    model.load_adapter(folders["c"], adapter_name="c")
    with pytest.raises(UserError, match=r"adapters are attached \(c\), which lie in folders of their own: save the ba"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    tokenformer.save(merged(model.model), tmp_path / "merged", format="hf")
    assert far(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(model)) < 1e-6
    model.delete_adapter("c")
    model.save_pretrained(tmp_path / "new")
    again = tokenformer.load(tmp_path / "new")
    assert digest(*base_of(again)) == digest(*base_of(make_base())) and again.config == make_base().config


def test_what_cannot_be_is_a_sentence_and_changes_nothing(folders, tmp_path):
    model = load(folders)
    model.load_adapter(folders["a"], adapter_name="a")
    cast = load(folders).to(torch.bfloat16)
    before = logits(model)
    for action, said in (
        (lambda: model.load_adapter(folders["b"], adapter_name="a"), "has a switch 'a' already"),
        (lambda: model.load_adapter(folders["base"], adapter_name="b"), "holds no adapter"),
        (lambda: model.load_adapter(tmp_path / "nothing" / "x", adapter_name="b"), "nothing at"),
        (lambda: model.load_adapter(folders["b"], adapter_name="b", is_trainable=True), "knows no is_trainable"),
        (lambda: model.set_adapter(["a", "b"]), "no adapter or switch 'b': there are a"),
        (lambda: cast.load_adapter(folders["a"]), "before that is cast to another type"),
    ):
        with pytest.raises(UserError, match=said):
            action()
    with pytest.raises(ValueError, match="No adapter loaded"):
        model.delete_adapter(["a", "b"])
    assert model.active_adapters() == ["a"] and torch.equal(logits(model), before)


def lora(**keys):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.LoraConfig(r=2, target_parameters=["value_tokens", "key_tokens"], init_lora_weights=False, **keys)


@pytest.mark.parametrize("first", ["ours", "peft's"])
def test_beside_adapters_of_peft_each_counts_when_it_is_named(folders, first, tmp_path):
    model = load(folders)
    plain = logits(model)
    if first == "ours":
        model.load_adapter(folders["c"], adapter_name="c")
    model.add_adapter(lora(), "low")
    if first == "peft's":
        model.load_adapter(folders["c"], adapter_name="c")
    else:
        with pytest.raises(UserError, match="has an adapter 'c' already"):
            model.add_adapter(lora(), "c")
    for name, other in (("c", "low"), ("low", "c")):
        with pytest.raises((UserError, ValueError), match="already"):
            model.load_adapter(folders["a"], adapter_name=name)
        model.set_adapter(name)
        assert name in model.active_adapters()
        model.disable_adapters()
        assert torch.equal(logits(model), plain), other
        model.enable_adapters()
    model.set_adapter("c")
    ours = logits(model)
    assert torch.equal(ours, native(folders, c=1.0)(IDS).logits)
    model.set_adapter("low")
    theirs = logits(model)
    model.set_adapter(["low", "c"])
    assert model.active_adapters() == ["low", "c"]
    both = logits(model)
    assert min(far(ours, plain), far(theirs, plain), far(both, ours), far(both, theirs)) > 1e-2
    control = load(folders)
    if first == "ours":  # its segments had names that the low-rank changes were made for
        control.load_adapter(folders["c"], adapter_name="c")
    control.add_adapter(lora(), "low")
    for module in control.modules():
        if hasattr(module, "merge") and hasattr(module, "lora_A"):
            module.merge()
    if first == "ours":
        control.set_adapter(["low", "c"])
        assert far(logits(control), both) < 1e-6
    else:
        assert far(logits(control), theirs) < 1e-6
    model.save_pretrained(tmp_path / "low")  # what peft added alone, as of every model of transformers
    assert (tmp_path / "low" / "adapter_config.json").is_file() and not (tmp_path / "low" / "config.json").exists()
    assert model.active_adapters() == ["low", "c"] and torch.equal(logits(model), both)
    again = load(folders)
    if first == "ours":
        again.load_adapter(folders["c"], adapter_name="c")
    again.load_adapter(tmp_path / "low", adapter_name="low")
    assert again.active_adapters() == ["low"]
    if first == "peft's":
        again.load_adapter(folders["c"], adapter_name="c")
    again.set_adapter(["low", "c"])
    assert torch.equal(logits(again), both)
    again.delete_adapter("low")
    again.set_adapter("c")
    assert torch.equal(logits(again), ours)
    again.delete_adapter("c")
    assert torch.equal(logits(again), plain)


def test_what_reads_a_models_own_parameters_refuses_one_that_peft_changed(folders, tmp_path):
    model = load(folders)
    model.load_adapter(folders["a"], adapter_name="a")
    model.delete_adapter("a")
    model.add_adapter(lora(), "low")
    for action in (
        lambda: tokenformer.save(model.model, tmp_path / "new"),
        lambda: tokenformer.save(model.model, tmp_path / "new", format="hf"),
        lambda: tokenformer.grow(model.model, proj_tokens=20),
        lambda: tokenformer.shrink(model.model, ratio=0.5, by="newest"),
        lambda: tokenformer.slice(model.model, segments=1),
        lambda: merge_segments(model.model, IDS),
        lambda: merged(model.model),
    ):
        with pytest.raises(UserError, match=r"'blocks.0.*' (has an adapter of peft|is not the .* own, .*): merge"):
            action()
    assert not (tmp_path / "new").exists()


def test_transformers_trains_a_lora_on_top_of_our_adapter(folders, tmp_path):
    model = load(folders)
    model.load_adapter(folders["a"], adapter_name="a")
    model.add_adapter(lora(), "low")
    model.set_adapter(["low", "a"])
    frozen = {n: p.clone() for n, p in model.named_parameters() if "lora" not in n}
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    how = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 2, "learning_rate": 1e-2}
    coach = Trainer(model, TrainingArguments(str(tmp_path / "run"), max_steps=2, **how), train_dataset=rows)
    before = coach.evaluate(rows)["eval_loss"]
    coach.train()
    assert coach.evaluate(rows)["eval_loss"] < before
    assert (tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def test_an_image_model_takes_adapters_too(tmp_path):
    base = trained()
    tokenformer.save(base, tmp_path / "base", format="hf")
    make_adapter(tmp_path / "a", base, 1, ffn=7)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "base").eval()
    plain = model(X).logits
    model.load_adapter(tmp_path / "a", adapter_name="a")
    wanted = tokenformer.attach(copy.deepcopy(base), tmp_path / "a", "a")(X)
    assert torch.equal(model(X).logits, wanted) and not torch.equal(wanted, plain)
    with pytest.raises(UserError, match="adapters are attached"):
        model.save_pretrained(tmp_path / "new")
    model.disable_adapters()
    assert torch.equal(model(X).logits, plain)
