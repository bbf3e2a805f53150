"""The zero-shot results of the paper (paper.csv), to print beside ours: in percent, perplexities as they are."""

import csv
from pathlib import Path

COLUMNS = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
# model, Pile perplexity, LAMBADA perplexity, then the six accuracies and their mean as printed
HEAD, *PAPER = csv.reader(Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines())


def beside_paper(name: str, results: dict[str, dict[str, float]], printed: dict[str, str]) -> list[list[str]]:
    """Return rows of a table: ours first, then the paper's; `printed` is the measure that the paper has of each task.

    >>> beside_paper("mine", {"piqa": {"acc": 0.5}}, {"piqa": "acc"})[0]
    ['mine', '–', '–', '–', '–', '50.0', '–', '–', '–', '–']
    """
    scores = [100 * results[t][printed[t]] if t in results else None for t in COLUMNS]
    known = [s for s in scores if s is not None]
    mean = sum(known) / len(known) if len(known) == len(COLUMNS) else None
    perplexity = results.get("lambada_openai", {}).get("perplexity")
    ours = [name, "", "" if perplexity is None else f"{perplexity:.2f}"]
    ours += ["" if score is None else f"{score:.1f}" for score in (*scores, mean)]
    return [[cell or "–" for cell in row] for row in (ours, *PAPER)]
