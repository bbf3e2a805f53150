"""The six zero-shot tasks of the paper on local files, scored without the harness and with its results.

Files are JSON lines (also .xz) with the fields that docs/evaluation.md lists.
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer.data.compressed import DAMAGE, decompress
from tokenformer.data.text.tokenizer import Tokenizer
from tokenformer.errors import UserError
from tokenformer.eval.ranks import spread
from tokenformer.infer.packed import Packed
from tokenformer.infer.scoring import Scored, score
from tokenformer.parsing import parse_json


@dataclass(frozen=True)
class Question:
    """Pairs of context and continuation, which of them is right, and the lengths that acc_norm divides by."""

    pairs: list[tuple[str, str]]
    gold: int
    lengths: list[int]


def _lambada(row: dict[str, Any]) -> Question:
    before, _, word = row["text"].rpartition(" ")
    return Question([(before, " " + word)], 0, [len(word)])


def _hellaswag(row: dict[str, Any]) -> Question:
    return _choices(row["query"], row["choices"], row["gold"])


def _piqa(row: dict[str, Any]) -> Question:
    return _choices(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"])


def _arc(row: dict[str, Any]) -> Question:
    return _choices(f"Question: {row['question']}\nAnswer:", row["choices"], row["gold"])


def _winogrande(row: dict[str, Any]) -> Question:
    """Ask after which of two beginnings the same ending is likelier."""
    before, _, after = row["sentence"].partition("_")
    if row["sentence"].count("_") != 1:
        raise ValueError("its sentence needs one _")
    options = [before + row["option1"], before + row["option2"]]
    pairs = [(option, " " + after.strip()) for option in options]
    return Question(pairs, int(row["answer"]) - 1, [len(option) for option in options])


def _choices(context: str, choices: list[str], gold: int) -> Question:
    return Question([(context, " " + choice) for choice in choices], int(gold), [len(choice) for choice in choices])


@dataclass(frozen=True)
class Task:
    """Which file, how a row becomes a question, its measures, and the one that the paper prints."""

    file: str
    ask: Callable[[dict[str, Any]], Question]
    measures: tuple[str, ...]
    printed: str
    fields: tuple[str, ...]


LONGEST, LINES = 1 << 22, 10**6  # bytes of a row, rows: a small file may unpack to very much
_CHOICE = ("acc", "acc_norm")
TASKS = {
    "lambada_openai": Task("lambada_openai_test", _lambada, ("perplexity", "acc"), "acc", ("text",)),
    "hellaswag": Task("hellaswag_val", _hellaswag, _CHOICE, "acc_norm", ("query", "choices", "gold")),
    "piqa": Task("piqa_valid", _piqa, _CHOICE, "acc", ("goal", "sol1", "sol2", "label")),
    "arc_easy": Task("arc_easy_test", _arc, _CHOICE, "acc", ("question", "choices", "gold")),
    "arc_challenge": Task("arc_challenge_test", _arc, _CHOICE, "acc_norm", ("question", "choices", "gold")),
    "winogrande": Task("winogrande_xl_dev", _winogrande, ("acc",), "acc", ("sentence", "option1", "option2", "answer")),
}


def task_file(name: str, folder: str | Path) -> Path:
    """Return the file of a task's rows: .jsonl or .jsonl.xz."""
    if name not in TASKS:
        raise UserError(f"'{name}' has no local form: with --data-dir tasks are {', '.join(TASKS)}")
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder {folder}: say with --data-dir where the files of the tasks are")
    for ending in (".jsonl", ".jsonl.xz"):
        path = Path(folder) / (TASKS[name].file + ending)
        if path.is_file():
            return path
    raise UserError(f"{folder} has no {TASKS[name].file}.jsonl or .jsonl.xz for the task {name}: put it there")


def read_rows(name: str, folder: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a task's file; one that cannot be asked is refused by its line."""
    path = task_file(name, folder)
    rows = []
    size = number = 0
    try:
        with open(path, "rb") as raw:
            file = decompress(raw, ".xz") if path.suffix == ".xz" else raw
            while line := file.readline(LONGEST):
                number, size = number + 1, size + len(line)
                where = f"{path}, line {number}"
                if len(line) == LONGEST or size > 64 * LONGEST or number > LINES:
                    raise UserError(f"{where}, is beyond the bytes or lines that a task may have: get it anew")
                if limit is not None and len(rows) >= limit:
                    break
                if not line.isspace():
                    rows.append(parse_json(line.decode(), where))
                    _check_row(TASKS[name], rows[-1], where)
    except (*DAMAGE, ValueError, OSError) as error:
        raise UserError(f"{path} is not JSON lines ({error}): get it anew") from None
    if not rows:
        raise UserError(f"{path} has no rows: get it anew")
    return rows


def _check_row(task: Task, row: Any, where: str) -> None:
    missing = [field for field in task.fields if not isinstance(row, dict) or row.get(field) is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}: see docs/evaluation.md")
    try:
        question = task.ask(row)
        if not all(isinstance(part, str) for pair in question.pairs for part in pair):
            raise ValueError("it has something else than text")
        if not 0 <= question.gold < len(question.pairs):
            raise ValueError(f"its right answer is none of the {len(question.pairs)} choices")
        if "acc_norm" in task.measures and not all(question.lengths):
            raise ValueError("a choice is empty")
    except (ValueError, TypeError, AttributeError, OverflowError, KeyError) as error:
        raise UserError(f"{where} cannot be asked ({error}): mend it, see docs/evaluation.md") from None


def check_pairs(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], whose: Sequence[str], context: int) -> None:
    """Refuse a continuation that the context cannot hold before anything is scored; `whose` names task and row.

    lm_eval's own model asserts the same; a cut continuation would be nobody's answer.
    """
    for (_, after), where in zip(pairs, whose, strict=True):
        if not 0 < len(after) <= context:
            raise UserError(
                f"{where} has a continuation of {len(after):,} tokens, but must have 1 to {context:,} (the context): "
                "leave the task out of --tasks, or take a model of a longer context"
            )


def encode_pair(tokenizer: Tokenizer, before: str, after: str) -> tuple[list[int], list[int]]:
    """Return the ids of a context and of what follows it, encoded as one text and then cut apart.

    >>> from tokenformer.data.text.tokenizer import load_tokenizer
    >>> encode_pair(load_tokenizer("byte"), "a ", "b")
    ([98], [33, 99])
    """
    stripped = before.rstrip()
    after, before = before[len(stripped) :] + after, stripped
    if not before:
        return [tokenizer.end_of_document], tokenizer.encode(after)
    ids = tokenizer.encode(before)
    return ids, tokenizer.encode(before + after)[len(ids) :]


def measure(task: Task, questions: Sequence[Question], results: Sequence[Sequence[Scored]]) -> dict[str, float]:
    """Return the measures of a task, and their standard errors."""
    counts = {name: [] for name in task.measures}
    for question, scored in zip(questions, results, strict=True):
        chances = [s.logprob for s in scored]
        if task.ask is _lambada:
            counts["perplexity"].append(chances[0])
            counts["acc"].append(float(scored[0].greedy))
            continue
        counts["acc"].append(float(_best(chances) == question.gold))
        if "acc_norm" in counts:
            each = [c / n for c, n in zip(chances, question.lengths, strict=True)]
            counts["acc_norm"].append(float(_best(each) == question.gold))
    out: dict[str, float] = {}
    for name, values in counts.items():
        mean = sum(values) / len(values)
        out[name] = math.exp(-mean) if name == "perplexity" else mean
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            out[f"{name}_stderr"] = perplexity_error(values) if name == "perplexity" else error
    return out | {"rows": len(questions)}


def perplexity_error(chances: Sequence[float]) -> float:
    """Return the standard error of e to the mean loss as the harness does: by 100,000 bootstrap samples of the rows.

    Unusual: seeded by a list, numpy draws the numbers of Python's generator, which the harness uses with these seeds.
    """
    values, n = np.array(chances), len(chances)
    draws = (np.random.RandomState([seed]).random_sample((1000, n)) * n for seed in range(100))
    return float(np.concatenate([np.exp(-values[draw.astype(int)].mean(1)) for draw in draws]).std(ddof=1))


def _best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)  # the first of equals, as the harness


def run_tasks(
    packed: Packed,
    tokenizer: Tokenizer,
    names: Sequence[str],
    folder: str | Path,
    *,
    limit: int | None = None,
    context: int | None = None,
    tokens: int = 16384,
    advance: Callable[[float], object] = lambda count: None,
) -> dict[str, dict[str, float]]:
    """Return the measures of each task on the files of a folder."""
    rows = {name: read_rows(name, folder, limit) for name in names}  # all files are checked before any is scored
    questions = {name: [TASKS[name].ask(row) for row in rows[name]] for name in names}
    encoded = {}
    for name in names:
        encoded[name] = [encode_pair(tokenizer, *pair) for question in questions[name] for pair in question.pairs]
        whose = [f"{name}, row {i}," for i, question in enumerate(questions[name], 1) for _ in question.pairs]
        check_pairs(encoded[name], whose, context or packed.config.context)
    work = functools.partial(score, packed, context=context, tokens=tokens, advance=advance)
    out = {}
    for name in names:
        scored = spread(encoded[name], work)
        each, at = [], 0
        for question in questions[name]:
            each.append(scored[at : at + len(question.pairs)])
            at += len(question.pairs)
        out[name] = measure(TASKS[name], questions[name], each)
    return out
