"""What other people's tools do to a model, each against a plain control. Run as a program it prints one JSON object,
case → the largest relative difference: on the reference, or (TRITON_INTERPRET=1 TOKENFORMER_PATTENTION=triton) on the
kernels in Triton's interpreter.
"""

import copy
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import cpu_offload, disk_offload, load_checkpoint_and_dispatch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import tokenformer
from tokenformer import models
from tokenformer.adapters import base_of, digest
from tokenformer.adapters import merged as merged_adapters
from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.hub.adapter_folder import AdapterFile, write_adapter
from tokenformer.hub.hf import TokenFormerForCausalLM
from tokenformer.infer import Engine
from tokenformer.models.layers import Pattention, Segment
from tokenformer.ops.pattention import backend

SHAPE = {"layers": 1, "dim": 32, "heads": 2, "vocab": 64, "context": 16}
TINY = ModelConfig(**SHAPE, qkv_tokens=[16, 8], proj_tokens=24, ffn_tokens=[24, 40], tied=False)
IDS = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))
LABELS = IDS.roll(-1, 1)
PARTS = ("attention.query", "attention.key", "attention.value", "attention.proj", "ffn")


def model(**keys) -> nn.Module:
    """Twice the initial weights: with these every hook that is left out shows (see `hooks`); more of it makes the sums

    of the kernels differ by more than the bound, and shows nothing else.
    """
    made = models.build(ModelConfig(**{**TINY.__dict__, **keys}), seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)
    return made


def far(found, wanted) -> float:
    pairs = [(found, wanted)] if isinstance(found, Tensor) else list(zip(found, wanted, strict=True))
    errors = [((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item() for a, b in pairs]
    return max(e if e == e else float("inf") for e in errors)


def step(net: nn.Module) -> list[Tensor]:
    """The loss and all gradients, in order of names."""
    net.zero_grad()
    loss = net(IDS, labels=LABELS).loss_sum
    loss.backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
    return [loss.detach(), *(g for g in grads if g is not None)]


def offload() -> dict[str, float]:
    found = {}
    for tied in (True, False):
        net = model(tied=tied).eval()
        wrapped = TokenFormerForCausalLM.from_native(copy.deepcopy(net)).eval()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            want, word = net(IDS).logits, "tied" if tied else "untied"
            away = cpu_offload(copy.deepcopy(net), torch.device("cpu"))
            found[f"cpu_offload, {word}"] = far(away(IDS).logits, want)
            away = disk_offload(copy.deepcopy(net), f"{folder}/{word}", torch.device("cpu"))
            found[f"disk_offload, {word}"] = far(away(IDS).logits, want)
            wrapped.save_pretrained(f"{folder}/hf")
            places = {"model.embedding": "disk", "model.blocks.0": "disk", "model.norm": "cpu"}
            places |= {} if tied else {"model.head": "disk"}
            dispatched = AutoModelForCausalLM.from_pretrained(f"{folder}/hf", device_map=places, offload_folder=folder)
            out = dispatched(input_ids=IDS, labels=IDS)
            plain = wrapped(input_ids=IDS, labels=IDS)
            found[f"device_map, {word}"] = far([out.logits, out.loss], [plain.logits, plain.loss])
            try:
                Engine(dispatched.model)
                found[f"engine, {word}"] = 1.0
            except UserError as error:
                found[f"engine, {word}"] = float("offloaded" not in str(error))
            torch.save(net.state_dict(), f"{folder}/state.bin")
            empty = load_checkpoint_and_dispatch(
                model(tied=tied).eval(), f"{folder}/state.bin", {"": "disk"}, offload_folder=f"{folder}/{word}2"
            )
            found[f"load_checkpoint_and_dispatch, {word}"] = far(empty(IDS).logits, want)
    return found


def lora() -> dict[str, float]:
    """Low-rank changes of keys and values: against a model that holds the sums."""
    torch.manual_seed(0)
    net = TokenFormerForCausalLM.from_native(model())
    plain = copy.deepcopy(net)
    config = LoraConfig(r=2, target_parameters=["value_tokens", "ffn.segments.1.key_tokens"], init_lora_weights=False)
    tuned = get_peft_model(copy.deepcopy(net), config)
    merged = copy.deepcopy(tuned).merge_and_unload().train()
    changed = far(merged(input_ids=IDS, labels=IDS).loss, plain.train()(input_ids=IDS, labels=IDS).loss)
    found = {"LoRA moves nothing": float(changed < 1e-2)}  # it is 0.03: a LoRA left out would be far beyond any bound
    found["LoRA, merged"] = far(tuned.train()(input_ids=IDS, labels=IDS).loss, merged(input_ids=IDS, labels=IDS).loss)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = tuned(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found["LoRA does not learn"] = float(losses[-1] > losses[0])
    tuned.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        tuned.save_pretrained(folder)
        again = PeftModel.from_pretrained(copy.deepcopy(net), folder).eval()
        want = tuned(input_ids=IDS).logits
        found["LoRA, reloaded"] = far(again(input_ids=IDS).logits, want)
        found["LoRA, merged after training"] = far(tuned.merge_and_unload()(input_ids=IDS).logits, want)
    tied = TokenFormerForCausalLM.from_native(model(tied=True)).eval()
    tuned = get_peft_model(tied, LoraConfig(r=2, target_modules=["embedding"], init_lora_weights=False)).eval()
    with torch.no_grad():
        want = tuned(input_ids=IDS, labels=IDS)
        merged = tuned.merge_and_unload()(input_ids=IDS, labels=IDS)
    found["LoRA on a tied embedding, merged"] = far([merged.logits, merged.loss], [want.logits, want.loss])
    prompts = get_peft_model(
        net, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=32, num_attention_heads=2)
    )
    front = torch.cat([prompts.get_prompt(2), net.get_input_embeddings()(IDS)], 1)
    labels = torch.cat([torch.full((2, 3), -100), IDS], 1)
    want = net(inputs_embeds=front, labels=labels).loss
    found["prompt tuning"] = far(prompts(input_ids=IDS, labels=IDS).loss, want)
    for name, more in {"IA3": IA3Config(target_modules=["query"], feedforward_modules=[])}.items():
        try:
            get_peft_model(copy.deepcopy(net), more)
            found[f"{name} is taken in silence"] = 1.0
        except ValueError as error:
            found[f"{name} is taken in silence"] = float("not supported" not in str(error))
    return found


def adapters() -> dict[str, float]:
    """LoRA with an adapter of ours attached, which it changes too: against a model that holds the sums."""
    torch.manual_seed(0)
    net, base = TokenFormerForCausalLM.from_native(model()), model()
    tensors = {
        f"blocks.0.{part}.segments.{len(base.blocks[0].get_submodule(part).segments)}.{half}": torch.randn(6, 32) * 0.3
        for part in PARTS
        for half in ("key_tokens", "value_tokens")
    }
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(f"{folder}/ours", AdapterFile("base", digest(*base_of(base))), tensors, [])
        net.load_adapter(f"{folder}/ours", "ours")
    plain = net.model(IDS).logits
    config = LoraConfig(r=2, target_parameters=["value_tokens", "key_tokens"], init_lora_weights=False)
    tuned = get_peft_model(copy.deepcopy(net), config).train()
    merged = copy.deepcopy(tuned).merge_and_unload()
    whole = merged_adapters(merged.model)  # a plain model: all segments count always
    out = tuned(input_ids=IDS, labels=IDS, skip_logits=False)
    wanted = [merged(input_ids=IDS, labels=IDS).loss, whole(IDS).logits]
    found = {"LoRA and ours, merged": far([out.loss, out.logits], wanted)}
    found["LoRA moves nothing of ours"] = float(far(whole(IDS).logits, plain) < 1e-2)
    with tokenformer.detached(tuned.base_model.model.model), torch.no_grad():
        found["ours detached"] = far(tuned(input_ids=IDS).logits, without(merged.model))
    out.loss.backward()
    learns = {name: p.grad for name, p in tuned.named_parameters() if p.requires_grad}
    found["LoRA of ours that gets no gradient"] = float(sum(g is None or not g.any() for g in learns.values()))
    found["LoRA that is missing"] = abs(len(learns) - 2 * len(list(merged.model.blocks.parameters())))
    try:
        Engine(tuned.base_model.model.model)
        found["the engine took a model with LoRA"] = 1.0
    except UserError as error:
        found["the engine took a model with LoRA"] = float("carries a hook or an adapter" not in str(error))
    made = Engine(merged.eval().model).generate(IDS[:, :4], 5)
    wrong = [row.ids for row in made] != merged.model.generate(IDS[:, :4], 5)[:, 4:].tolist()
    found["the engine, merged"] = float(wrong)
    return found


def without(net: nn.Module) -> Tensor:
    with tokenformer.detached(net):
        return net(IDS).logits


def hooks() -> dict[str, float]:
    found = {"scales that show nothing": 0.0}
    factor = torch.tensor([1.0, 2.0]).repeat(16)  # not the same for all channels: proj ignores the scale of its input
    for part in PARTS:
        net, control = model(), model()
        layer = net.blocks[0].get_submodule(part)
        layer.register_forward_hook(lambda module, inputs, output: factor * output)
        with torch.no_grad():
            for segment in control.blocks[0].get_submodule(part).segments:
                segment.value_tokens.mul_(factor)
        shows = far(control(IDS).logits, model()(IDS).logits)
        found["scales that show nothing"] += shows < 0.1  # it is 0.4 and more: a hook left out is beyond any bound
        wanted = step(control)  # gradients of its values are other ones: left out
        names = [f"blocks.0.{part}" in name and "value" in name for name, _ in net.named_parameters()]
        got = step(net)
        kept = [i for i, mine in enumerate([False, *names]) if not mine]
        found[f"a scale on {part}"] = far([got[i] for i in kept], [wanted[i] for i in kept])
    net, seen = model(), []
    for name, module in net.named_modules():
        if isinstance(module, Pattention | Segment):
            module.register_forward_hook(lambda module, inputs, output, name=name: seen.append(name))
    wanted = step(model())
    found["hooks on all projections and segments"] = far(step(net), wanted)
    places = {name for name, module in net.named_modules() if isinstance(module, Pattention | Segment)}
    found["hooks that did not fire"] = float(len(places - set(seen)))
    net = model()
    net.blocks[0].attention_norm.register_forward_hook(lambda module, inputs, output: seen.append("a norm"))
    net.blocks[0].attention.register_forward_hook(lambda module, inputs, output: seen.append("attention"))
    found["hooks on a norm and on attention"] = far(step(net), wanted)
    found["hooks that did not fire"] += 2 - len({"a norm", "attention"} & set(seen))
    try:
        Engine(net)
        found["the engine took a model with hooks"] = 1.0
    except UserError as error:
        found["the engine took a model with hooks"] = float("carries a hook" not in str(error))
    return found


def shard() -> dict[str, float]:
    """FSDP2 by Pattention or Segment, then by the model."""
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        net, mesh = model(), init_device_mesh("cpu", (1,))
        for module in net.modules():
            if isinstance(module, Pattention):
                fully_shard(module, mesh=mesh)
        fully_shard(net, mesh=mesh)
        found = {"FSDP2 by Pattention": far(step(net), step(model()))}
        net = model()  # some projections, and a segment of another
        for part in ("attention.query.segments.1", "ffn.segments.0", "attention.proj"):
            fully_shard(net.blocks[0].get_submodule(part), mesh=mesh)
        fully_shard(net, mesh=mesh)
        found["FSDP2 by Segment"] = far(step(net), step(model()))
        dist.destroy_process_group()
    return found


def trainer() -> dict[str, float]:
    """Trainer with label smoothing and label_names: the loss of the first step, against the formula by hand."""
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    net = TokenFormerForCausalLM.from_native(model())
    with torch.no_grad():
        logits, targets = net(input_ids=IDS).logits[:, :-1].log_softmax(-1), IDS[:, 1:]
        plain = -logits.gather(-1, targets[..., None]).mean()
        smooth = 0.9 * plain - 0.1 * logits.mean()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, wanted, more in (
            ("label smoothing", smooth, {"label_smoothing_factor": 0.1}),
            ("label_names", plain, {"label_names": ["labels"]}),
            ("two label_names", plain, {"label_names": ["labels", "input_ids"]}),
        ):
            arguments = TrainingArguments(
                folder, max_steps=1, per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=0.0,
                use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **more,
            )  # fmt: skip
            coach = Trainer(copy.deepcopy(net), arguments, train_dataset=rows, eval_dataset=rows)
            found[f"{name}, evaluated"] = abs(coach.evaluate()["eval_loss"] - wanted.item()) / wanted.item()
            given = arguments.label_names or ["labels"]
            handed = coach.predict(rows).label_ids
            equal = all((torch.as_tensor(one) == IDS).all() for one in (handed if len(given) > 1 else [handed]))
            found[f"{name}, predicted"] = 0.0 if equal else float("inf")
            found[f"{name}, trained"] = abs(coach.train().training_loss - wanted.item()) / wanted.item()
    return found


def main() -> None:
    cases: list[Callable[[], dict[str, float]]] = [offload, lora, adapters, hooks, shard, trainer]
    path = backend(torch.zeros(1, requires_grad=True))
    assert path == os.environ["TOKENFORMER_PATTENTION"], path
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = {name: error for case in cases for name, error in case().items()}
    sentences = [str(w.message) for w in said if "one by one" in str(w.message)]
    print(json.dumps({"far": found, "said": len(sentences)}), file=out)


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # Trainer prints
    main()
