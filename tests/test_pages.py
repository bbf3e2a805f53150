"""Every command and snippet of README.md and docs/ runs here, in the order of its page, with few steps, small models.

In a page, ```bash is for commands, ```text for what the last of them prints (compared in form: numbers may differ, and
"…" stands for left out words), ```python for snippets, ```yaml for parts of a config. Other blocks are free text.
What cannot run here is in `ELSEWHERE`, and is checked down to its arguments and config keys.
"""

import glob
import gzip
import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.train.another import Match, Pair
from tokenformer import config as native
from tokenformer import hub
from tokenformer.cli.main import build_parser, main
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.eval import harness
from tokenformer.hub.open import read_config
from tokenformer.models import LanguageModel

sys.path += [str(Path(__file__).parent / "eval"), str(Path(__file__).parents[1] / "docs")]

import make_pages
import picture
import site_pages as site
from rows import write_rows

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
ELSEWHERE = {  # part of a command → why it cannot run here
    "Haiyang-W/": "network",
    "tokenformer pull": "network",
    "--model tokenformer": "network",
    "torchrun": "several GPUs",
    "eval vit": "ImageNet, which may not be handed on",
    "imagenet/val --class": "the same",
    "cifar-10-batches-bin": "CIFAR, which may not be handed on",
    "$SLURM": "a cluster",
    "--interactive": "somebody who types",
    "150M_": "official files",
    "tokenformer serve": "it runs until it is ended; tests/serve starts it",
}
SHORT = (
    "steps=4 batch=2 micro_batch=2 log.every=1 validation.every=2 validation.samples=2 validation.generate=2".split()
)
TINY = "layers=1 dim=32 heads=2 qkv_tokens=18 proj_tokens=18 ffn_tokens=36 context=32".split()
SMALL = {"layers": 1, "dim": 32, "heads": 4, "qkv_tokens": 8, "proj_tokens": 8, "ffn_tokens": 16, "context": 512}


def blocks(page: str) -> list[tuple[str, str]]:
    """Return (language, text) of every fenced block of a page."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", PAGES[page].read_text(encoding="utf-8"), flags=re.M | re.S)
    return [
        (language, "".join(line.removeprefix(indent) for line in text.splitlines(True)))
        for indent, language, text in found
    ]


def commands(block: str) -> list[str]:
    lines = [re.split(r"\s+#", line)[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def kept_for_elsewhere(command: str) -> bool:
    return any(part in command for part in ELSEWHERE)


def words_of(command: str) -> list[str]:
    """Return the words after `tokenformer`, as the shell would give them."""
    command = re.sub(r"^(\w+=\S+ )*torchrun .*?-m (?=tokenformer)", "", command)
    found = [
        expanded
        for word in shlex.split(command)
        for expanded in ((sorted(glob.glob(word)) or [word]) if "*" in word and "=" not in word else [word])
    ]
    assert found[0] == "tokenformer", command
    return found[1:]


def shortened(words: list[str]) -> list[str]:
    """Return a command with fewer steps or questions and, where a large preset is named, with a small model."""
    if words[0] == "eval" and "--tasks" in words:
        return [*words, "--limit", "1"]
    if words[0] not in ("train", "compare") or "--resume" in words or "--keys" in words:
        return words
    words = [word.replace("image_size=384", "image_size=96") for word in words]
    short = [s if "progressive" not in " ".join(words) else s.replace("steps=4", "steps=30") for s in SHORT]
    preset = next((word for word in words if re.match(r"(lm|grow|vision)/", word)), "")
    if preset and not any(Path(word).is_dir() for word in words):  # else the model is that of the weights in the folder
        short += [f"model.{t}" for t in TINY if preset != "lm/3m" or not t.startswith("context")]
    return [*words, *short]


def form(line: str) -> str:
    return re.sub(r"\d[\d,.]*(e[+-]?\d+)?", "#", " ".join(line.split()))


def check_form(expected: str, printed: str) -> None:
    """Fail if a line that the page shows is not printed, or of a table a row of such a name and as many numbers."""
    lines = {form(line) for line in printed.splitlines()}
    rows = {tuple(line.split()[:4]) for line in lines}
    for line in map(form, expected.splitlines()):
        start, row = line.removesuffix("…"), tuple(line.split()[:4])
        found = any(other.startswith(start) for other in lines) if start != line else line in lines
        assert found or (row in rows and "#" in row), f"the page shows\n{line}\nbut this was printed:\n{printed}"


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    """A folder with everything that the pages name: texts, sets, a model, a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "photos").symlink_to(ROOT / "examples" / "icons")
    (tmp_path / "my.yml").write_text("base: lm/3m\n", encoding="utf-8")
    text = (ROOT / "examples/demo/tinyshakespeare.txt").read_text(encoding="utf-8")[:6000]
    for name in (
        "books.txt",
        "book.txt",
        "held-out.txt",
        "sample.txt",
        "in.txt",
        "books/a.txt",
        "books/b.txt",
        "corpus/a.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text[:200] if name == "in.txt" else text, encoding="utf-8")
    hub.save(small(), "my-folder", tokenizer_json=ByteTokenizer().to_json())
    (tmp_path / "zero-shot").mkdir()
    write_rows(tmp_path / "zero-shot")
    return tmp_path


def small() -> LanguageModel:
    return LanguageModel(native.ModelConfig(**SMALL, vocab=384))


def prepared(path: str, tokenizer: str = "byte") -> None:
    folder, _, name = path.rpartition("/")
    assert main(["prepare", "books.txt", "--tokenizer", tokenizer, "--out", folder, "--name", name]) == 0


def before_evaluation() -> None:
    hub.save(small(), "my-hf-folder", format="hf", tokenizer_json=ByteTokenizer().to_json())
    prepared("prepared/wiki")
    trained("prepared/wiki")


def before_finetune() -> None:
    Path("runs").mkdir()
    Path("runs/tokenizer.json").write_text(ByteTokenizer().to_json())
    prepared("data/before", tokenizer="runs/tokenizer.json")
    trained("data/before")


def trained(path: str) -> None:
    settings = [f"data.path={path}", "model.vocab=384", "steps=1", "batch=2", "data.split=[80,20,0]"]
    assert main(["train", "lm/3m", *settings, *(f"model.{t}" for t in TINY), "--out", "runs/mine"]) == 0


def before_data() -> None:
    for name in "abcd":
        with gzip.open(f"books/{name}.txt.gz", "wt") as file:
            file.write(Path("books.txt").read_text())


def before_training() -> None:
    from tests.train.test_another_model import CONFIG

    Path("pair.yml").write_text(CONFIG)


def before_growth() -> None:
    prepared("data/books")
    Path("grow").mkdir()
    larger = {**SMALL, "qkv_tokens": 24, "proj_tokens": 24, "ffn_tokens": 48}
    Path("grow/354m").write_text(json.dumps({"model": larger}))  # a file of this name is found before the preset


def before_images() -> None:
    assert main(shortened(["train", "examples/icons/icons.yml", "--out", "runs/imagenet"])) == 0


def before_adapters() -> None:
    prepared("prepared/books")
    hub.save(small(), "base", tokenizer_json=ByteTokenizer().to_json())
    words = ["train", "base", "data.path=prepared/books", "adapter.qkv_tokens=2", "--out", "runs/poems"]
    assert main(shortened(words)) == 0 and main(["adapter", "add", "runs/poems", "--out", "poems"]) == 0
    (lines,) = (text for language, text in blocks("adapters.md") if language == "json")
    Path("in.jsonl").write_text(lines)


def before_pull() -> None:
    prepared("data/books")
    trained("data/books")


BEFORE = {  # what a page takes for granted
    "adapters.md": before_adapters,
    "data.md": before_data,
    "evaluation.md": before_evaluation,
    "finetune.md": before_finetune,
    "growth.md": before_growth,
    "images.md": before_images,
    "pull.md": before_pull,
    "training.md": before_training,
}


def run_page(page: str, capsys, monkeypatch, shorten=shortened) -> None:
    names: dict = {"torch": torch, "ids": torch.zeros(1, 16, dtype=torch.long), "Match": Match, "Pair": Pair}
    printed = ""
    for language, text in blocks(page):
        if language == "bash":
            for command in commands(text):
                if command.startswith(("make ", "pip ", "source ", "export ")) or kept_for_elsewhere(command):
                    continue
                capsys.readouterr()
                if command.startswith("python -m tokenformer.eval.harness"):
                    monkeypatch.setattr(sys, "argv", [*shlex.split(command)[2:], "--limit", "1"])
                    code = harness.main()
                elif command.startswith("python -m tokenformer_jax"):
                    pytest.importorskip("jax", reason="JAX is not installed: pip install 'tokenformer[jax]'")
                    from tokenformer_jax.__main__ import main as twin

                    words = shorten(shlex.split(command)[3:])  # on one device, however many JAX sees
                    code = twin([*words, *(["parallel.replicate=1"] if words[0] != "generate" else [])])
                else:
                    code = main(shorten(words_of(command)))
                out, err = capsys.readouterr()
                printed = out + err
                assert code == 0, f"{command}\n{printed}"
        elif language == "text":
            check_form(text, printed)
        elif language == "python":
            exec(compile(text, f"{page}: {text[:40]!r}", "exec"), names)
        elif language == "yaml":
            shown = native.parse_yaml(text, page)
            whole = "of" in shown.get("model", {})
            native.build(native.Config, shown if whole else native.merge({"model": SMALL}, shown))


@pytest.mark.parametrize("page", [name for name in PAGES if any(kind for kind, _ in blocks(name))])
def test_what_a_page_shows_runs(page, place, capsys, monkeypatch):
    BEFORE.get(page, lambda: None)()
    run_page(page, capsys, monkeypatch)


@pytest.mark.slow
def test_the_tutorial_runs_whole(place, capsys, monkeypatch):
    run_page("tutorial.md", capsys, monkeypatch, shorten=list)


def test_what_cannot_run_here_is_understood(place, capsys):
    """Its options are parsed and its config is built, and every entry of the list is needed."""
    found = [c for page in PAGES for kind, text in blocks(page) if kind == "bash" for c in commands(text)]
    needed = set()
    for command in filter(kept_for_elsewhere, found):
        needed |= {part for part in ELSEWHERE if part in command}
        if "eval.harness" in command:  # lm-evaluation-harness reads its own arguments; tests/eval runs it
            continue
        args, left = build_parser().parse_known_args(words_of(command.replace("$SLURM_ARRAY_TASK_ID", "1")))
        assert left == [], command
        if hasattr(args, "settings"):
            settings = [word for word in args.settings if "=" in word]
            read_config(args.config, overrides=settings, training=True)
    assert needed == set(ELSEWHERE)


def test_targets_and_extras_are_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.M))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        assert {*re.findall(r"`make ([\w-]+)`", text), *re.findall(r"^make ([\w-]+)", text, flags=re.M)} <= targets, (
            page
        )
        named = re.findall(r"pip install (?:-e )?'(?:tokenformer|\.)\[([\w,]+)\]'", text)
        assert {extra for names in named for extra in names.split(",")} <= set(extras), page


def test_made_pages_are_up_to_date():
    """Every key and every command is on its page. Argparse wraps lines in other places in other versions of Python."""
    for page, made in (("config.md", make_pages.config_page()), ("commands.md", make_pages.commands_page())):
        same = PAGES[page].read_text(encoding="utf-8").split() == made.split()
        assert same, f"docs/{page} is not what the code says: run python docs/make_pages.py"


def test_links_and_anchors_lead_somewhere():
    """Of all pages of the site; of those in README.md and docs/, each links to README.md and is linked from there."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in site.pages()}
    wrong = []
    for page, text in texts.items():
        for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", text):
            target = Path(os.path.normpath(page.parent / name)) if name else page
            if not (ROOT / target).exists():
                wrong.append(f"{page}: {name}")
            elif anchor and anchor[1:] not in map(slug, re.findall(r"^#+ (.*)", texts[target], flags=re.M)):
                wrong.append(f"{page}: {name}{anchor}")
    assert wrong == []
    for page in (page for page in texts if page.parent.name == "docs"):
        assert f"](docs/{page.name})" in texts[Path("README.md")], f"README.md does not link to {page}"
        assert "](../README.md" in texts[page], f"{page} does not link to README.md"
    nav = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in texts if str(page) not in nav] == []


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_the_tree_names_what_is_there():
    tree = PAGES["map.md"].read_text(encoding="utf-8").split("```\ntokenformer/")[1].split("```")[0]
    names = [f"tokenformer/{name}" for name in re.findall(r"^  (\w[\w./]*)", tree, flags=re.M)]
    names += re.findall(r"^(\w[\w./]*)", tree, flags=re.M)
    assert len(names) > 15
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_picture_is_what_its_script_draws():
    assert (ROOT / "docs/picture.svg").read_text(encoding="utf-8") == picture.draw()


def test_readme_stays_short():
    assert len(PAGES["README.md"].read_text(encoding="utf-8").splitlines()) < 170
