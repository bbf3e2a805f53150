"""Show a model: shapes, segments, parameters, FLOPs, memory.

tokenformer info lm/150m
tokenformer info my.yml model.layers=6 --context 1k,8k,32k
tokenformer info runs/demo
"""

import argparse

from tokenformer.cli.main import split_settings
from tokenformer.config import PROJECTIONS, Config, ModelConfig
from tokenformer.errors import UserError
from tokenformer.terminal import table


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", help="config files or presets (merged) and a.b=c overrides, or weights")
    parser.add_argument("--context", help="lengths to compare at, such as 1k,8k,32k (default: the model's)")


def run(args: argparse.Namespace) -> None:
    config, growing = model_config(args.source)
    if args.context and config.of != "language":
        raise UserError("--context is for language models: an image is as long as its size says, so leave it out")
    if config.of in ("pair", "caption"):
        for line in growing:
            print(line)
        return show_pair(config)
    lengths = [parse_length(text) for text in args.context.split(",")] if args.context else [config.length]
    show(config)
    for line in growing:
        print(line)
    compare(config, lengths)


def model_config(source: list[str]) -> tuple[ModelConfig, list[str]]:
    """Return the model of configs and overrides, or of weights; and lines about growth where a run begins smaller."""
    from tokenformer.growth.progressive import describe, resolve
    from tokenformer.hub.open import Opened, locate, means_weights, read_config

    names, overrides = split_settings(source)
    weights = [name for name in names if means_weights(name)]
    configs = [name for name in names if name not in weights]
    if configs or not weights:  # beside weights: their own config, as `convert` takes it
        plans = any(word.startswith("growth") for word in overrides)  # which also depend on how long it is trained
        config = read_config(*configs, overrides=overrides, training=plans)
        lines = [] if isinstance(config.growth, list) else describe(resolve(config)[0])
        return config.model, lines + ([] if config.train.precision != "fp8" else in_fp8(config))
    if overrides:
        raise UserError(f"{weights[0]} holds weights, which overrides cannot change: leave {overrides[0]} out")
    if len(weights) > 1:
        raise UserError(f"{weights[1]} is a second model: give one at a time")
    return Opened(weights[0], locate(weights[0], values=False)).config, []


def in_fp8(config: Config) -> list[str]:
    """Return what a training step has in fp8. Refuse what it cannot have."""
    from torch import device

    from tokenformer.growth.progressive import resolve
    from tokenformer.growth.stages import chain
    from tokenformer.models.cost import cost
    from tokenformer.train import fp8

    first, stages = resolve(config)
    fp8.check(first, chain(first.model, stages), device("cpu"))
    shapes = ", ".join(sorted(fp8.shapes([config.model])))
    if config.model.trunks:
        return [f"in training, products in fp8 of at most: {shapes}"]
    share = 2 / 3 * cost(config.model).product_share(config.model.length)  # gradients of weights are the third
    return [f"in training, products in fp8 of at most: {shapes}; {share:.0%} of a step's FLOPs, the rest is bf16"]


def parse_length(text: str) -> int:
    """
    >>> parse_length("8k")
    8192
    """
    number, factor = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
    if not number.isdigit() or int(number) == 0:
        raise UserError(f"--context holds '{text}': give lengths such as 512,1k,32k")
    return int(number) * factor


def show_pair(config: ModelConfig) -> None:
    from tokenformer.models import cost
    from tokenformer.models.cost import equal_transformer

    for name, trunk in config.trunks.items():
        print(f"\n{name}")
        show(trunk)
    if config.of == "caption":
        total, after = cost(config).parameters, config.trunks["image"].length
        return print(f"\na language model that reads images as {after} positions: {total:,} parameters")
    whole, rival = cost(config), cost(equal_transformer(config))
    print(f"\na pair of both, compared by {config.loss} in {config.embed} dimensions: {whole.parameters:,} parameters")
    rows = [("tokenformer", whole), ("transformer as large", rival)]
    table(
        ["model", "M parameters", "forward", "training"],
        [
            [name, f"{c.parameters / 1e6:,.1f}", f"{c.end_flops / 1e9:.3f}", f"{3 * c.end_flops / 1e9:.3f}"]
            for name, c in rows
        ],
        title="GFLOPs per pair",
    )


def show(config: ModelConfig) -> None:
    from tokenformer.models import cost

    total = cost(config)
    shape = f"{config.kind}, {config.layers} layers, dim {config.dim}, {config.heads} heads of {config.head_dim}"
    if config.kv_heads:
        shape += f" ({config.kv_heads} for keys and values)"
    rotated = f"{config.rotary_dims} of {config.head_dim} channels rotated"
    if config.of == "image":
        rows, columns = config.grid
        shape += f", {rows} × {columns} patches of {config.patch} × {config.patch} pixels, {config.classes:,} classes"
        print(f"{shape}, pool {config.pool}; attention is not causal")
        rotated = rotated if config.positions == "rotary" else "learned positions"
    else:
        pooled = f", pool {config.pool}" if config.of == "text" else ""
        pooled += "; attention is not causal" if not total.causal else ""
        untied = "" if config.tied else " (untied)"
        untied += f" and {config.added_vocab:,} ids that were added" if config.added_vocab else ""
        print(f"{shape}, vocabulary {config.vocab:,}{untied}, context {config.context:,}{pooled}")
        rotated = rotated if config.of == "language" or config.positions == "rotary" else "learned positions"
    print(f"theta {config.theta}, {rotated}" if config.kind == "tokenformer" else rotated)
    rows = [[name, _segments(config, name), f"{count:,}"] for name, count in total.projections.items()]
    norms = total.parameters - total.matmul_parameters - total.head_parameters * (1 if config.tied else 2)
    if config.of != "language":
        first = "patches" if config.of == "image" else "embedding"
        rows += [[f"{first}, positions, head, norms, biases", "", f"{norms:,}"]]
    else:
        rows += [["embedding", "", f"{total.head_parameters:,}"]]
        rows += [] if config.tied else [["output head", "", f"{total.head_parameters:,}"]]
        rows += [["norms", "", f"{norms:,}"]]
    rows += [["matmul, in blocks", "", f"{total.matmul_parameters:,}"]]
    table(["projection", "per layer", "parameters"], [*rows, ["all", "", f"{total.parameters:,}"]])
    gb = total.parameters / 1e9
    print(
        f"weights {2 * gb:.2f} GB in bf16, {4 * gb:.2f} GB in fp32; training state (fp32) {16 * gb:.2f} GB "
        "with AdamW, less with Muon"
    )
    if total.cache_values:
        print(f"key/value cache {total.cache_bytes():,} bytes per token in bf16")


def _segments(config: ModelConfig, name: str) -> str:
    if config.kind != "tokenformer":
        return f"{config.mlp_dim} hidden" if name == "ffn" else ""
    which = name if name in PROJECTIONS else "qkv"
    kinds = {tuple(config.segments(which, layer)) for layer in range(config.layers)}
    if len(kinds) > 1:
        counts = [sum(n for n, _ in segments) for segments in kinds]
        return f"{min(counts)}–{max(counts)} tokens, by layer"
    return " + ".join(f"{n} (τ {tau:.4g})" for n, tau in kinds.pop()) + " tokens"


def compare(config: ModelConfig, lengths: list[int]) -> None:
    """Print how the two parts of the cost grow with the context, beside a Transformer of equally many parameters."""
    from tokenformer.models.cost import cost, equal_transformer

    rival = equal_transformer(config)
    words = " ".join(f"model.{name}={getattr(rival, name)}" for name in ("kind", "dim", "heads", "ffn_dim"))
    if config.of == "image":
        pair = ((config.kind, cost(config)), (f"transformer, dim {rival.dim}", cost(rival)))
        flops = [(name, c.parameters / 1e6, c.sample_flops(config.length) / 1e9) for name, c in pair]
        rows = [[name, f"{size:,.1f}", f"{forward:.3f}", f"{3 * forward:.3f}"] for name, size, forward in flops]
        head = ["model", "M parameters", "forward", "training"]
        table(head, rows, title="GFLOPs per image (attention is not causal), beside a Transformer as large")
        return print(f"to train that Transformer, add {words}")
    rows = []
    for length in lengths:
        for name, c in ((config.kind, cost(config)), (f"transformer, dim {rival.dim}", cost(rival))):
            with_parameters, with_tokens = c.parameter_flops / 1e9, c.token_flops(length) / 1e9
            size, training = f"{c.parameters / 1e6:,.1f}", f"{c.training_flops(length) / 1e9:.3f}"
            memory = f"{c.cache_bytes() * length / 1e6:,.1f}"
            rows.append([f"{length:,}", name, size, f"{with_parameters:.3f}", f"{with_tokens:.3f}", training, memory])
    head = ["context", "model", "M parameters", "with parameters", "with tokens", "training", "MB cache"]
    table(head, rows, title="GFLOPs per token (forward; causal attention counted once), beside a Transformer as large")
    print(f"to train that Transformer, add {words}")
