"""Translates official YAML (a GPT-NeoX dialect) to our keys, and refuses what would make it another model.

Unusual: `-` and `_` mean the same there, several files merge, and a key that nobody knows is refused by its name.
"""

import dataclasses
import difflib
from pathlib import Path
from typing import NamedTuple

from tokenformer import config as native
from tokenformer.errors import UserError
from tokenformer.hub.official_recipe import recipe

# official key → ours
MODEL = {
    "num_layers": "layers",
    "hidden_size": "dim",
    "num_attention_heads": "heads",
    "qkv_slot_num": "qkv_tokens",
    "proj_slot_num": "proj_tokens",
    "ffn_slot_num": "ffn_tokens",
    "seq_length": "context",
    "norm_activation_type": "theta",
    "rotary_pct": "rotary_fraction",
    "rotary_emb_base": "rotary_base",
    "layernorm_epsilon": "norm_eps",
    "padded_vocab_size": "vocab",
}
REQUIRED = tuple(MODEL)[:6]
# Keys that change the function, and the one value that a TokenFormer of the released kind has.
FIXED = {
    "pos_emb": "rotary",
    "norm": "layernorm_nonparam",
    "final_norm": "layernorm",
    "no_weight_tying": False,
    "gpt_j_residual": False,
    "gpt_j_tied": False,
    "use_bias_in_attn_linear": False,
    "use_bias_in_norms": True,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "init_method": "normal",
    "output_layer_init_method": "wang_init",
    "apply_query_key_layer_scaling": False,
    "use_mup": False,
    "use_qk_layernorm": False,
    "sliding_window_width": None,
    "num_kv_heads": None,
    "rotary_save_freqs_buffer": False,
    "moe_num_experts": 1,
    "train_impl": "normal",
}
GENERATION = set(
    """
    text_gen_type temperature top_p top_k maximum_tokens prompt_end sample_input_file sample_output_file num_samples
    recompute return_logits min_p repetition_penalty
    """.split()
)  # the last two are ours
# Keys that say how to train, log or launch, and change nothing about the model.
IRRELEVANT = set(
    """
    pipe_parallel_size model_parallel_size max_position_embeddings output_layer_parallelism
    scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion bias_gelu_fusion bias_dropout_fusion
    rope_fusion layernorm_fusion rmsnorm_fusion attention_softmax_in_fp32 make_vocab_size_divisible_by optimizer
    min_lr zero_optimization train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size data_impl
    num_workers checkpoint_activations checkpoint_num_layers partition_activations synchronize_each_layer
    gradient_clipping weight_decay fp16 bf16 fp32_allreduce precision train_iters lr_decay_iters lr_decay_fraction
    distributed_backend lr_decay_style warmup checkpoint_factor checkpoint_scale extra_save_iters eval_interval
    eval_iters log_interval steps_per_print wall_clock_breakdown keep_last_n_checkpoints save load log_dir eval_ckpt
    pretrain_partial_init finetune iteration do_train do_valid do_test no_load_optim no_load_rng no_save_optim
    no_save_rng checkpoint_validation_with_forward_pass adlr_autoresume adlr_autoresume_interval tokenizer_type
    vocab_file merge_file launcher deepspeed deepspeed_slurm deepspeed_mpi no_ssh_check hostfile include exclude
    num_nodes num_gpus master_addr master_port user_script data_path train_data_paths valid_data_paths
    test_data_paths train_data_weights valid_data_weights test_data_weights weight_by_num_documents split
    mmap_warmup shuffle seed tensorboard_dir use_wandb wandb_group wandb_team wandb_host wandb_project
    wandb_run_name wandb_init_all_ranks git_hash gas log_grad_norm log_gradient_noise_scale log_optimizer_states
    log_param_norm log_grad_pct_zeros log_interval_time dynamic_loss_scale loss_scale loss_scale_window
    initial_loss_scale_power hysteresis min_scale char_level_ppl short_seq_prob eval_results_prefix eval_tasks
    dump_state onnx_safe allow_chopped architectures torch_dtype dtype transformers_version use_cache bos_token_id
    eos_token_id
    """.split()
)
KNOWN = {*MODEL, *FIXED, *GENERATION, *IRRELEVANT, "attention_config"}
SECTIONS = {field.name for field in dataclasses.fields(native.Config)}


def is_official(raw: dict) -> bool:
    """Tell whether a mapping is official: its keys are flat, without our sections (`seed` is in both)."""
    return "model" not in raw and any(_plain(name) in KNOWN and name not in SECTIONS for name in raw)


def _plain(name: object) -> str:
    return str(name).replace("-", "_")


def _read_plain(name: str | Path) -> dict:
    return {_plain(key): value for key, value in native.read(name).items()}


def translate(raw: dict, where: str) -> tuple[dict, str]:
    """Return our raw mapping, and a line about what was ignored."""
    raw = {_plain(name): value for name, value in raw.items()}
    if not any(name in raw for name in REQUIRED):
        what = "generation settings" if GENERATION & set(raw) else "settings"
        raise UserError(f"{where} has {what} but no model: give a model config beside it, such as 150M_eval.yml")
    _refuse_unknown(raw, where)
    for name, value in raw.items():
        if name in FIXED and value != FIXED[name]:
            raise UserError(f"{where}: {name} is {value!r}, but only {FIXED[name]!r} is a TokenFormer as released")
    for name in REQUIRED:
        if name not in raw:
            raise UserError(f"{where}: the official key '{name}' is missing: add it, or the config file that has it")
    _check_attention(raw, where)
    if raw.get("norm_activation_type") == "l1_norm_gelu":
        raise UserError(f"{where}: norm_activation_type l1_norm_gelu does not exist officially: write a config of ours")
    model = {"kind": "tokenformer", **{ours: raw[name] for name, ours in MODEL.items() if name in raw}}
    ignored = sorted(set(raw) & IRRELEVANT)
    return {"model": model}, f"{where}: {len(ignored)} official keys that do not change the model were ignored"


def _refuse_unknown(raw: dict, where: str) -> None:
    for name in raw:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, sorted(KNOWN), n=1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise UserError(
                f"{where}: the official key '{name}' is not one that we know{hint}, and it may change the model or "
                "its texts: remove it if it does not"
            )


def _check_attention(raw: dict, where: str) -> None:
    """Refuse layers that are no TokenFormer: `[[["tokenformer"], 12]]` or `["tokenformer", …]` is expected."""
    names, stack = set(), [raw.get("attention_config", ["tokenformer"])]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, str):
            names.add(item)
    if names != {"tokenformer"}:
        raise UserError(
            f"{where}: attention_config names {', '.join(sorted(names)) or 'nothing'}, not tokenformer alone"
        )


def translate_all(raws: dict, training: bool) -> tuple[dict, list[str]]:
    """Return our raw mapping from files, ours or official, later ones laid over earlier ones, and notes for the user.

    With `training`, what official files say about training is translated too, or refused.
    """
    ours: dict = {}
    official: dict = {}
    sources = []
    for name, raw in raws.items():
        if is_official(raw) or not SECTIONS & raw.keys():
            official.update({_plain(key): value for key, value in raw.items()})
            sources.append(Path(name).name)
        else:
            ours = native.merge(ours, raw)
    where = " + ".join(sources)
    translated, note = translate(official, where)
    if not training:
        return native.merge(translated, ours), [note]
    sections, notes = recipe(official, where)
    return native.merge(translated | sections, ours), notes


def launch_of(*names: str | Path) -> tuple[int | None, int | None]:
    """Return the nodes, and the GPUs per node, that official files ask for (`num_nodes`, `num_gpus`)."""
    raw = {key: value for name in names for key, value in _read_plain(name).items()}
    return raw.get("num_nodes"), raw.get("num_gpus")


class Generation(NamedTuple):
    """What official files say about generation: its settings, the paths of weights and tokenizer, whether a model."""

    settings: dict
    weights: str | None
    vocab_file: str | None
    has_model: bool


def read_generation(*names: str | Path) -> Generation:
    """Read official files, later ones laid over earlier ones; `eval_ckpt` is preferred to `load`."""
    raw: dict = {}
    for name in names:
        read = _read_plain(name)
        if not SECTIONS & read.keys() - KNOWN:  # not a config of ours
            _refuse_unknown(read, Path(name).name)
        raw.update(read)
    settings = {name: value for name, value in raw.items() if name in GENERATION}
    return Generation(
        settings,
        raw.get("eval_ckpt") or raw.get("load"),
        raw.get("vocab_file"),
        any(name in raw for name in (*REQUIRED, "model")),
    )


def to_official(config: native.ModelConfig) -> dict:
    """Return the official keys of a model that the official format can hold."""
    keys = {name: getattr(config, ours) for name, ours in MODEL.items()}
    fixed = {name: FIXED[name] for name in tuple(FIXED)[:5]}
    return {**keys, "max_position_embeddings": config.context, "hidden_dropout": 0, "attention_dropout": 0,
            **fixed, "use_bias_in_attn_linear": False, "attention_config": [[["tokenformer"], config.layers]],
            "init_method": "normal", "output_layer_init_method": "wang_init"}  # fmt: skip
