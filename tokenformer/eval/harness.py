"""EleutherAI's lm-evaluation-harness with our models (`--model tokenformer`), from its own command line:

python -m tokenformer.eval.harness --model tokenformer --model_args pretrained=my-folder --tasks piqa [--data-dir DIR]

Unusual: several GPUs (torchrun) share the requests inside the model; the harness knows of one. With --data-dir tasks of
the same names are made for local files, and nothing is fetched. The harness's own models (--model hf) can be used too.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenformer.errors import UserError
from tokenformer.eval.perplexity import windows
from tokenformer.eval.ranks import leave, local_device, rank, spread
from tokenformer.eval.tasks import TASKS, check_pairs, read_rows, task_file
from tokenformer.hub.open import open_model
from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling
from tokenformer.infer.scoring import score
from tokenformer.infer.text import continue_ids

try:
    import lm_eval.models  # registers the harness's own, which it otherwise does only where there is no other
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry, register_model
except ImportError as error:
    raise UserError(
        f"the harness is not installed ({error}): pip install 'tokenformer[eval]', or score natively from --data-dir"
    ) from None

# what lm_eval's own task files say of each task, for rows in our files' fields
_TEXTS = json.loads(Path(__file__).with_name("local_tasks.json").read_text(encoding="utf-8"))


def offline() -> None:
    """Fetch nothing from here on: neither processes that we start, nor libraries that are imported already."""
    import datasets
    import huggingface_hub

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
    datasets.disable_progress_bars()


@contextlib.contextmanager
def _as_user_error() -> Iterator[None]:
    """Refuse unknown tasks, and data that cannot be fetched or read, in a sentence."""
    import datasets

    try:
        yield
    except ValueError as error:
        name = str(error).removeprefix("Tasks not found: ")
        if name == str(error):
            raise
        raise UserError(f"the harness knows no task '{name}': see `lm-eval ls tasks`") from None
    except ConnectionError as error:
        raise UserError(
            f"the data of a task cannot be fetched ({error}): go online, or give local files with --data-dir"
        ) from None
    except datasets.exceptions.DatasetGenerationError as error:
        why = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"the data of a task cannot be read ({why}): get them anew") from None


@register_model("tokenformer")
class HarnessModel(TemplateLM):
    """A model of ours for the harness. `pretrained` is whatever `tokenformer.load` takes."""

    def __init__(
        self,
        pretrained: Any = None,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 16384,
        max_batch_size: int | None = None,
        trust_remote_code: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        if others or pretrained is None:
            what = f"knows no '{next(iter(others))}'" if others else "needs pretrained=MODEL"
            names = "pretrained, tokenizer, device, dtype, batch_size, max_length, batch_tokens"
            raise UserError(f"--model_args of tokenformer {what}: give some of {names}")
        if isinstance(pretrained, str | Path):
            opened = open_model(pretrained, tokenizer=tokenizer, device=local_device(device), dtype=dtype)
            pretrained, tokenizer = opened.language, opened.tokenizer
        self.ours, self.words = pretrained, tokenizer
        self.engine = Engine(pretrained, vocab=tokenizer.vocab_size)
        self.max_length = min(int(max_length or pretrained.config.context), pretrained.config.context)
        self.batch_tokens = int(batch_tokens)
        self.batch = int(str(batch_size)) if str(batch_size).isdigit() else 32
        self.whose: list[str] = []  # task and row of each request, for what must be refused

    @property
    def eot_token_id(self) -> int:
        return self.words.end_of_document

    @property
    def tokenizer_name(self) -> str:
        return self.words.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.words.encode(string)

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list:
        self.whose = [f"{r.task_name}, row {(r.doc_id or 0) + 1}," for r in requests]
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **kwargs: Any) -> list:
        pairs = [(before, after) for _, before, after in requests]
        check_pairs(pairs, self.whose, self.max_length)
        return [tuple(s) for s in self._score(pairs, quiet=disable_tqdm)]

    def _score(self, pairs: list, quiet: bool) -> list:
        from tokenformer.terminal import progress

        with contextlib.ExitStack() as stack:
            show = stack.enter_context(progress("scoring", len(pairs))) if rank() == 0 and not quiet else lambda n: None

            def work(some: Sequence) -> list:
                return score(self.engine.packed, some, context=self.max_length, tokens=self.batch_tokens, advance=show)

            return spread(pairs, work)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows that share one token; each token is a target once."""
        pairs, owner = [], []
        for i, request in enumerate(requests):
            ids = [self.prefix_token_id, *self.tok_encode(request.args[0])]
            for w in windows(len(ids) - 1, self.max_length, self.max_length):
                pairs.append((ids[w.start : w.first + 1], ids[w.first + 1 : w.stop + 1]))
                owner.append(i)
        totals = [0.0] * len(requests)
        for i, scored in zip(owner, self._score(pairs, disable_tqdm), strict=True):
            totals[i] += scored.logprob
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Write texts up to a stop string; requests of equal settings go together, sorted by length."""
        groups: dict[str, list[int]] = {}
        ids = [self.tok_encode(r.args[0]) or [self.eot_token_id] for r in requests]
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        out = [""] * len(requests)
        for settings, members in groups.items():
            keys = json.loads(settings)
            until = keys.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            n = int(keys.get("max_gen_toks") or keys.get("max_new_tokens") or 256)
            sampling = _sampling(keys)
            if n >= self.max_length:
                raise UserError(f"max_gen_toks is {n}, but the model's context is {self.max_length}: ask for fewer")
            members.sort(key=lambda i: len(ids[i]))

            def work(some: Sequence[int], stops=stops, n=n, sampling=sampling) -> list[str]:
                texts: list[str] = []
                for at in range(0, len(some), self.batch):
                    part = some[at : at + self.batch]
                    cut = [ids[i][-(self.max_length - n) :] for i in part]
                    none = [""] * len(part)
                    results = continue_ids(self.engine, self.words, none, cut, n, sampling, list(part), stops)
                    texts += [r.text for r in results]
                return texts

            for i, text in zip(members, spread(members, work), strict=True):
                out[i] = text
        return out


def _sampling(keys: dict[str, Any]) -> Sampling:
    """Translate the harness's sampling keys; greedy unless do_sample is set (or a temperature alone is given)."""
    temperature = float(keys.get("temperature") or 0.0)
    if not keys.get("do_sample", temperature > 0):
        return Sampling()
    top_p = float(keys.get("top_p") or 0.0)
    return Sampling(temperature or 1.0, int(keys.get("top_k") or 0), top_p, float(keys.get("min_p") or 0.0))


@contextlib.contextmanager
def local_tasks(names: Sequence[str], data_dir: str | Path) -> Iterator[Path]:
    """Yield a folder with the harness's task files (YAML) for local rows, all of which are checked before."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            read_rows(name, data_dir)
            measures = [
                {
                    "metric": measure,
                    "aggregation": "perplexity" if measure == "perplexity" else "mean",
                    "higher_is_better": measure != "perplexity",
                }
                for measure in TASKS[name].measures
            ]
            config = {
                "task": name,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(task_file(name, data_dir).resolve())}},
                "test_split": "test",
                "output_type": "multiple_choice" if "doc_to_choice" in _TEXTS[name] else "loglikelihood",
                **_TEXTS[name],
                "metric_list": measures,
                "metadata": {"version": 1.0},
            }
            (Path(folder) / f"{name}.yaml").write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
        yield Path(folder)


def run_harness(
    model: Any, names: Sequence[str], *, data_dir: str | Path | None = None, limit: int | None = None, **keys: Any
) -> dict[str, Any]:
    """Run tasks of the harness by name, from the hub or from local files; return its results and samples."""
    from lm_eval.tasks import TaskManager

    with contextlib.ExitStack() as stack:
        if data_dir is None:
            manager = TaskManager()
            unknown = [name for name in names if not manager.match_tasks([name])]
            if unknown:
                raise UserError(f"the harness knows no task '{unknown[0]}': see `lm-eval ls tasks`")
        else:
            offline()
            folder = stack.enter_context(local_tasks(names, data_dir))
            manager = TaskManager(include_path=str(folder), include_defaults=False)
        stack.enter_context(_as_user_error())
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # what it says about its work
        return lm_eval.simple_evaluate(model=model, tasks=list(names), task_manager=manager, limit=limit, **keys) or {}


def metrics(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the measures by plain names: acc, acc_norm, perplexity and their standard errors."""
    out: dict[str, dict[str, float]] = {}
    for task, measured in results["results"].items():
        plain = {name.removesuffix(",none"): value for name, value in measured.items() if name.endswith(",none")}
        out[task] = {name: value for name, value in plain.items() if isinstance(value, int | float)}
        if task in results.get("n-samples", {}):
            out[task]["rows"] = results["n-samples"][task]["effective"]
    return out


def _prepare(args: argparse.Namespace, data_dir: str | None, stack: contextlib.ExitStack) -> None:
    """Check what the harness was asked for before it begins; set up local tasks, and a device where none is named."""
    import torch
    from lm_eval.config.evaluate_config import EvaluatorConfig

    try:
        given = EvaluatorConfig.load_yaml_config(args.config) if args.config else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--config {args.config} cannot be read ({' '.join(str(error).split())}): check it") from None
    tasks, model = args.tasks or given.get("tasks") or [], args.model or given.get("model") or "hf"
    names = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks) if name.strip()]
    if not names:
        raise UserError("there is nothing to measure: give --tasks")
    args.tasks = names
    if model not in model_registry:
        raise UserError(f"the harness knows no model '{model}': give tokenformer, hf or another of its own")
    if data_dir is not None:
        offline()
        args.include_path = str(stack.enter_context(local_tasks(names, data_dir)))
    if args.device is None and "device" not in given:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if model.startswith("hf") or model == "huggingface":
        with contextlib.suppress(ImportError):
            import tokenformer.hub.hf  # noqa: F401 (an exported folder of ours is known to it)


def main() -> int:
    """Run the harness's own command line; --data-dir is ours."""
    from lm_eval.__main__ import HarnessCLI, setup_logging

    setup_logging()
    try:
        with contextlib.ExitStack() as stack:
            if rank() != 0:  # all have the same results, and one prints them
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            ours.add_argument("--data-dir", nargs="?", const="")
            own, sys.argv[1:] = ours.parse_known_args()
            if own.data_dir == "":
                raise UserError("--data-dir names no folder: say where the files of the tasks are")
            cli = HarnessCLI()
            args = cli.parse_args()
            if args.command == "run":
                _prepare(args, own.data_dir, stack)
            with _as_user_error():
                cli.execute(args)
    except UserError as error:
        print(f"tokenformer: {error}", file=sys.stderr)
        return 2
    finally:
        leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
