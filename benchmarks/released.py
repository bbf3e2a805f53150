"""Downloads the four released models, checks names and shapes, and runs a forward pass. For people who are online.

  python benchmarks/released.py [150M 450M 900M 1.5B]

Prints one JSON line a model. The loader refuses any tensor that is missing, too many, of another shape or not finite.
"""

import json
import sys
import time

import torch

import tokenformer
from tokenformer.config import load as load_config
from tokenformer.models import cost

PRESETS = {"150M": "lm/150m", "450M": "lm/450m", "900M": "lm/900m", "1.5B": "lm/1.5b"}


def main(names: list[str]) -> int:
    for name in names or PRESETS:
        start = time.time()
        model = tokenformer.load(f"Haiyang-W/TokenFormer-{name}")
        expected = load_config(PRESETS[name]).model.resolved()
        with torch.no_grad():
            logits = model(torch.tensor([[12092, 1533]])).logits  # "Hello world"
        line = {
            "name": "released",
            "model": name,
            "parameters": cost(model.config).parameters,
            "shape_is_the_preset": model.config == expected,
            "logits_finite": bool(logits.isfinite().all()),
            "most_likely_next": int(logits[0, -1].argmax()),
            "seconds": round(time.time() - start, 1),
        }
        print(json.dumps(line), flush=True)
        if not (line["shape_is_the_preset"] and line["logits_finite"]):
            return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except tokenformer.UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
