"""A training step and decoding of TokenFormer-150M by the JAX twin, beside PyTorch, on one GPU in one run.

  python benchmarks/jax_step.py [--cells jax:step:16 reference:step:16 …] [--repeats 10] [--out FILE]
  python benchmarks/jax_step.py --check    # toy sizes on the CPU, to see that it runs

A cell is who:what:samples. Who: `jax` (attention by cuDNN, through `jax.nn.dot_product_attention`), `reference` (our
PyTorch reference; its blocks are compiled in a step) or `kernels` (ours). What: `step` (forward, backward, AdamW; bf16,
random ids, context 2048) or `decode` (bf16, greedy, prompt 128, 256 new tokens, prefill included). JAX's step also
clips and checks that all is finite. Each cell runs in a process of its own. Prints JSON lines; `ratio` is of the speed
of `reference`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenformer.config import Config, load

CELLS = [f"{who}:step:16" for who in ("reference", "kernels", "jax")]
CELLS += [f"{who}:decode:{batch}" for batch in (1, 32) for who in ("reference", "kernels", "jax")]
PEAK = 989e12
PROMPT, NEW = 128, 256
TOY = "layers=2 dim=32 heads=2 qkv_tokens=32 proj_tokens=32 ffn_tokens=64 vocab=256 context=32".split()


def recipe(samples: int, check: bool) -> Config:
    keys = [f"batch={samples}", "optimizer.kind=adamw", "parallel.replicate=1", "optimizer.rate=1e-4"]
    return load("lm/150m", overrides=[*keys, *(f"model.{key}" for key in TOY if check)])


def jax_work(what: str, c: Config, prompt: int, new: int) -> tuple[Callable[[], Any], Callable[[Any], Any], dict]:
    """Return what is timed, what waits for its result, and where it ran."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tokenformer_jax.generate import generator
    from tokenformer_jax.mesh import make_mesh, put
    from tokenformer_jax.model import How, check
    from tokenformer_jax.step import fresh, train_step
    from tokenformer_jax.values import initial_params

    model, mesh = check(c.model), make_mesh(c.parallel)
    params = initial_params(model, seed=0)
    ids = np.random.default_rng(0).integers(0, model.vocab, (1, c.batch or 1, model.context), np.int32)
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if what == "decode":
        write, held = generator(model, How(jnp.bfloat16)), jax.device_put(params)
        return lambda: write(held, ids[0, :, :prompt], new), lambda made: made, about
    state = {name: put(fresh(name, array.shape, c.optimizer), mesh, name) for name, array in params.items()}
    held, rate = [put(params, mesh), state], jnp.float32(c.optimizer.rate)
    batch = {"ids": jnp.asarray(ids), "labels": jnp.asarray(ids)}
    step = train_step(c, model, How(jnp.bfloat16, "none", mesh), set(), {})

    def work() -> Any:
        *held[:], numbers = step(*held, batch, rate)
        return numbers

    return work, jax.block_until_ready, about


def torch_work(
    who: str, what: str, c: Config, prompt: int, new: int
) -> tuple[Callable[[], Any], Callable[[Any], Any], dict]:
    import torch

    from tokenformer.infer import Engine
    from tokenformer.models import LanguageModel
    from tokenformer.ops import pattention as ops

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    ops.CHOICE = "triton" if who == "kernels" and on_gpu else "reference"
    model = LanguageModel(c.model, seed=0).to(device)
    ids = torch.randint(c.model.vocab, (c.batch or 1, c.model.context), device=device)
    about = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}

    def wait(made: Any) -> Any:
        torch.cuda.synchronize() if on_gpu else None
        return made

    if what == "decode":
        engine = Engine(model.eval().bfloat16(), backend="triton" if ops.CHOICE == "triton" else "torch")
        return lambda: engine.generate(ids[:, :prompt].tolist(), new), wait, about
    model.compute_dtype = torch.bfloat16
    for block in model.blocks if on_gpu else ():
        block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.optimizer.rate, fused=on_gpu)

    def work() -> Any:
        out = model(ids, labels=ids)
        (out.loss_sum / out.count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out.loss_sum.detach() / out.count

    return work, wait, about


def measure(cell: str, repeats: int, check: bool) -> dict[str, Any]:
    who, what, samples = cell.split(":")
    c = recipe(int(samples), check)
    prompt, new = (4, 8) if check else (PROMPT, NEW)
    work, wait, about = jax_work(what, c, prompt, new) if who == "jax" else torch_work(who, what, c, prompt, new)
    for _ in range(2 if what == "decode" else 4):
        made = wait(work())
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(repeats):
            made = work()
        wait(made)
        times.append((time.perf_counter() - begun) / repeats)
    taken = sorted(times)[1]
    tokens = int(samples) * (new if what == "decode" else c.model.context)
    found = {"name": what, "model": cell, "value": round(tokens / taken), "unit": "tokens/s"}
    found |= {"milliseconds": round(taken * 1000, 2), "spread": round((max(times) - min(times)) / taken, 4), **about}
    if what == "step":
        from tokenformer.models.cost import cost

        flops = 3 * cost(c.model).parameter_flops + 6 * c.model.layers * c.model.dim * c.model.context
        found["mfu"] = None if check else round(tokens / taken * flops / PEAK, 4)
        found["loss"] = float(made[0] if who == "jax" else made)
    return found


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or asked.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="toy sizes on the CPU, in this process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.repeats, False)))
        return
    if args.check:
        quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": quick}
        args.cells = list(dict.fromkeys(f"{cell.rpartition(':')[0]}:2" for cell in args.cells))
    elif shutil.which("nvidia-smi") is None:
        parser.error("this is measured on a GPU, and there is none here; --check runs toy sizes")
    lines: list[dict[str, Any]] = []
    for cell in args.cells:
        _, what, samples = cell.split(":")
        if args.check:
            lines.append(measure(cell, 1, True))
        else:
            command = [sys.executable, __file__, "--one", cell, "--repeats", str(args.repeats)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{cell} failed with code {done.returncode}", file=sys.stderr)
                continue
            lines.append(json.loads(done.stdout.splitlines()[-1]))
        rival = next((x for x in lines if x["model"] == f"reference:{what}:{samples}"), None)
        if rival:
            ratio = round(lines[-1]["value"] / rival["value"], 3)
            lines[-1] |= {"rival": rival["model"], "rival_value": rival["value"], "ratio": ratio}
        lines[-1]["commit"] = commit()
        print(json.dumps(lines[-1]), flush=True)
        if args.out:
            args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
