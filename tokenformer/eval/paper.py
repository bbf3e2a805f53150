"""The zero-shot results of the paper, to print beside ours (in percent; perplexities as they are)."""

COLUMNS = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")

# model: Pile perplexity, LAMBADA perplexity, then the six accuracies and their mean as printed
PAPER: dict[str, tuple[float | None, ...]] = {
    "Pythia-160M": (29.64, 37.25, 35.4, 30.3, 62.3, 43.6, 23.6, 51.3, 40.1),
    "TokenFormer-150M": (10.45, 16.38, 45.0, 35.5, 64.9, 47.3, 24.9, 50.4, 44.7),
    "Pythia-410M": (9.95, 10.84, 51.4, 40.6, 66.9, 52.1, 24.6, 53.8, 48.2),
    "TokenFormer-450M": (8.28, 7.69, 57.3, 47.5, 69.5, 56.2, 26.7, 54.6, 52.0),
    "Pythia-1B": (7.82, 7.92, 56.1, 47.2, 70.7, 57.0, 27.1, 53.5, 51.9),
    "TokenFormer-900M": (7.38, 5.46, 64.0, 55.3, 72.4, 59.9, 30.6, 56.4, 56.4),
    "Pythia-1.3B": (7.51, 6.08, 61.7, 52.1, 71.0, 60.5, 28.5, 57.2, 55.2),
    "GPT-Neo-1.3B": (None, 7.50, 57.2, 48.9, 71.1, 56.2, 25.9, 54.9, 52.4),
    "OPT-1.3B": (None, 6.64, 58.0, 53.7, 72.4, 56.7, 29.6, 59.5, 55.0),
    "GPT-Neo-2.7B": (None, 5.63, 62.2, 55.8, 71.1, 61.1, 30.2, 57.6, 56.5),
    "OPT-2.7B": (None, 5.12, 63.6, 60.6, 74.8, 60.8, 31.3, 61.0, 58.7),
    "Pythia-2.8B": (None, 5.04, 64.7, 59.3, 74.0, 64.1, 32.9, 59.7, 59.1),
    "TokenFormer-1.5B": (6.91, 5.24, 64.7, 60.0, 74.8, 64.8, 32.0, 59.7, 59.3),
}
HEAD = ("model", "Pile ppl", "LAMBADA ppl", "LAMBADA", "HellaSwag", "PIQA", "ARC-E", "ARC-C", "WinoGrande", "mean")


def beside_paper(name: str, results: dict[str, dict[str, float]], printed: dict[str, str]) -> list[list[str]]:
    """Return rows of a table: ours first, then the paper's; `printed` is the measure that the paper has of each task.

    >>> beside_paper("mine", {"piqa": {"acc": 0.5}}, {"piqa": "acc"})[0]
    ['mine', '–', '–', '–', '–', '50.0', '–', '–', '–', '–']
    """
    scores = [100 * results[t][printed[t]] if t in results else None for t in COLUMNS]
    known = [s for s in scores if s is not None]
    mean = sum(known) / len(known) if len(known) == len(COLUMNS) else None
    ours = [None, results.get("lambada_openai", {}).get("perplexity"), *scores, mean]
    rows = [(name, ours), *((model, list(numbers)) for model, numbers in PAPER.items())]
    return [[model, *(_cell(v, i < 2) for i, v in enumerate(numbers))] for model, numbers in rows]


def _cell(value: float | None, perplexity: bool) -> str:
    return "–" if value is None else f"{value:.2f}" if perplexity else f"{value:.1f}"
