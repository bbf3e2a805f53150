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
from tokenformer.hub.adapter_folder import AdapterFile, write_adapter

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
    model.set_adapter({"b": 0.5})
    assert model.model.active == {"b": 0.5} and torch.equal(logits(model), native(folders, b=0.5)(IDS).logits)
    model.delete_adapter("b")
    assert model.active_adapters() == []
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
        (lambda: model.set_adapter({"a": "0.5"}), "the weight of 'a' is 0.5: give a finite number"),
        (lambda: model.load_adapter(folders["b"], adapter_name=3), "adapter_name is 3, which is no name"),
        (lambda: model.delete_adapter(["a", "b"]), "the model has no adapter 'b': there are a"),
        (lambda: model.delete_adapter("zzz"), "the model has no adapter 'zzz': there are a"),
        (lambda: cast.load_adapter(folders["a"]), "before that is cast to another type"),
    ):
        with pytest.raises(UserError, match=said):
            action()
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


def test_what_counted_before_disable_counts_after_enable(folders):
    """Also one of peft that was off stays off; once ours are deleted, `set_adapter` turns it on."""
    model = load(folders)
    model.add_adapter(lora(), "low")
    low = logits(model)
    model.load_adapter(folders["a"], adapter_name="a")
    alone = logits(model)
    for named in ("a", ["low", "a"], "low", []):
        model.set_adapter(named)
        before = logits(model)
        model.disable_adapters()
        model.disable_adapters()
        model.enable_adapters()
        assert torch.equal(logits(model), before), named
    model.set_adapter({"a": 1.0, "low": 1})
    with pytest.raises(UserError, match=r"the weight of 'low' is 0.5, but one of peft counts as it is: give 1"):
        model.set_adapter({"a": 1.0, "low": 0.5})
    assert model.active_adapters() == ["low", "a"]
    model.set_adapter("a")
    assert torch.equal(logits(model), alone)
    model.delete_adapter("a")
    model.set_adapter("low")
    assert torch.equal(logits(model), low)
    model.disable_adapters()
    model.set_adapter("low")
    assert torch.equal(logits(model), low)


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_a_lora_that_was_merged_into_what_an_adapter_moves_is_not_lost(folders, tmp_path, merge):
    peft = pytest.importorskip("peft")
    model, name = load(folders), "blocks.0.ffn.segments.0.value_tokens"
    make_moving(tmp_path / "moving", name)
    model.load_adapter(tmp_path / "moving", adapter_name="moving")
    wrapped = peft.get_peft_model(model, lora()).eval()
    with torch.no_grad():
        both = wrapped(input_ids=IDS).logits
    getattr(wrapped, merge)()
    assert far(logits(model), both) < 1e-5
    both = logits(model)
    model.set_adapter("moving")  # which changes nothing
    assert torch.equal(logits(model), both)
    for action in (
        model.disable_adapters,
        lambda: model.delete_adapter("moving"),
        lambda: tokenformer.active(model.model, {"moving": 0.5}),
        lambda: tokenformer.detached(model.model).__enter__(),
        lambda: model.load_adapter(folders["a"], adapter_name="a"),
    ):
        with pytest.raises(UserError, match=f"'{name}' was changed .* since adapter moving moved it"):
            action()
        assert torch.equal(logits(model), both) and model.active_adapters() == ["moving"]
    if merge == "merge_and_unload":
        assert far(merged(model.model)(IDS).logits, both) < 1e-6


def make_moving(folder: Path, name: str) -> None:
    """An adapter of the base's that moves one tensor."""
    base = make_base()
    tensor = base.get_parameter(name).detach()
    write_adapter(folder, AdapterFile("base", digest(*base_of(base))), {name: tensor + 0.1 * tensor.cos()}, [])


def test_an_embedding_that_was_resized_is_not_set_back(folders, tmp_path):
    model = load(folders)
    make_moving(tmp_path / "moving", "embedding.weight")
    model.load_adapter(tmp_path / "moving", adapter_name="moving")
    model.resize_token_embeddings(IDS.max().item() + 20)
    before = logits(model)
    for action in (model.disable_adapters, lambda: model.delete_adapter("moving")):
        with pytest.raises(UserError, match=r"'embedding.weight' was changed"):
            action()
        assert torch.equal(logits(model), before) and model.active_adapters() == ["moving"]


def test_what_peft_computes_with_a_copy_of_is_not_moved(folders, tmp_path):
    """`modules_to_save` and an adapter of ours that reaches the same module, whichever comes first."""
    peft = pytest.importorskip("peft")
    saved, said = {"modules_to_save": ["norm"]}, r"'norm.(weight|bias)' is an adapter's, but peft"
    model = load(folders)
    model.add_adapter(lora(**saved), "low")
    model.save_pretrained(tmp_path / "low")
    before = logits(model)
    with pytest.raises(UserError, match=said):
        model.load_adapter(folders["c"], adapter_name="c")
    assert torch.equal(logits(model), before) and model.active_adapters() == ["low"]
    model.load_adapter(folders["a"], adapter_name="a")  # which reaches no norm

    model = load(folders)
    model.load_adapter(folders["c"], adapter_name="c")
    before = logits(model)
    for action in (
        lambda: model.add_adapter(lora(**saved), "low"),
        lambda: model.add_adapter(lora(modules_to_save=["attention"]), "low"),
        lambda: model.load_adapter(tmp_path / "low", adapter_name="low"),
    ):
        with pytest.raises(UserError, match=r"modules_to_save names '.*', so peft would compute with a copy of"):
            action()
        assert torch.equal(logits(model), before) and model.active_adapters() == ["c"]
    wrapped = peft.get_peft_model(model, lora(**saved)).eval()
    with torch.no_grad():
        both = wrapped(input_ids=IDS).logits
    with pytest.raises(UserError, match=said):
        model.disable_adapters()
    assert torch.equal(wrapped(input_ids=IDS).logits, both)


def test_a_mistyped_path_is_not_asked_for_on_the_hub(folders, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(tokenformer.hub.hf.base, "find_adapter_config_file", lambda name, **_: asked.append(name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "A" / "tales").mkdir(parents=True)
    model = load(folders)
    for name in ("A/tale", "nope", "./nope", "../B/x", str(tmp_path / "x"), "A/b/c"):
        with pytest.raises(UserError, match="there is nothing at"):
            model.load_adapter(name)
    assert asked == []


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
