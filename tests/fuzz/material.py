"""What is damaged, and which command reads it: good files of every format, and a command that succeeds with them."""

import json
import lzma
import multiprocessing
import random
import shutil
from pathlib import Path

from tests.data.images import pictures
from tests.eval.rows import write_rows
from tests.fuzz import media
from tests.fuzz.media import Scenario

DATA = Path(__file__).parents[1] / "data"
CONFIG = """\
model: {layers: 2, dim: 16, heads: 2, qkv_tokens: 16, proj_tokens: [8, 4], ffn_tokens: 24, context: 32, vocab: 384}
data: {path: set/alice, split: [90, 10, 0], workers: 0}
steps: 2
batch: 4
optimizer: {kind: adamw, rate: 0.01, betas: [0.9, 0.95]}
train: {device: cpu, precision: fp32}
validation: {every: 1, samples: 2, generate: 4}
growth:
- {at: {step: 1}, ffn_tokens: 32}
"""
GENERATION = """\
{
  "text_gen_type": "input-file",
  "maximum_tokens": 8,
  "temperature": 0.0,
  "top_p": 0.0,
  "top_k": 0,
  "num_samples": 2,
  "sample_input_file": "prompts.txt",
}
"""
PROMPTS = ["The Rabbit", "Alice was", "“Curiouser!”"]
TRAIN = ["data.path=set/alice", "steps=1", "batch=4", "train.device=cpu", "data.workers=0", "validation.generate=0"]
TRAIN += ["data.tokenizer=tokenizer.json"]
SHAPE = ["model.layers=2", "model.dim=16", "model.heads=2", "model.context=32", "model.vocab=384"]
SHAPE += ["model.qkv_tokens=12", "model.proj_tokens=10", "model.ffn_tokens=20"]
SAY = ["--tokens", "6", "--logprobs", "--device", "cpu"]


def scenarios() -> dict[str, Scenario]:
    """By name."""
    found = media.scenarios()
    ask = ["--prompt", "The Rabbit", *SAY]
    kinds = {  # weights: (what is given, what must lie there, what is harmed, whether a manifest vouches)
        "folder": (["folder"], ["folder"], ["folder/*"], True),
        "hf": (["hf"], ["hf"], ["hf/*"], True),
        "hf-bare": (["hf-bare"], ["hf-bare"], ["hf-bare/*"], False),
        "run": (["run"], ["run"], ["run/*.yml", "run/checkpoints/last", "run/checkpoints/*/**/*"], True),
        "official": (["official"], ["official"], ["official/*"], True),
        "official-bare": (["golden"], ["golden"], ["golden/*"], False),
        "zero": (["zero/world2", "zero/config.yml"], ["zero"], ["zero/**/*"], False),
    }
    for kind, (given, needs, harmed, vouched) in kinds.items():

        def add(
            verb: str, words: list[str], more=(), output=True, kind=kind, needs=needs, harmed=harmed, vouched=vouched
        ):
            found[f"{kind}-{verb}"] = Scenario(words, [*needs, *more], harmed, vouched, output)

        add("info", ["info", *given])
        add("convert", ["convert", *given, "--to", "ours", "--out", "out"], output=False)
        if kind not in ("zero", "official-bare"):  # which have no tokenizer
            add("generate", ["generate", *given, *ask])
            add("eval", ["eval", *given, "--text", "text.txt", "--device", "cpu"], ["text.txt"])
        if kind in ("folder", "run", "hf"):
            add("grow", ["grow", *given, "--ffn-tokens", "40", "--no-verify", "--out", "out"], output=False)
            add("shrink", ["shrink", *given, "--ratio", "0.5", "--by", "newest", "--out", "out"], output=False)
            add("export", ["convert", *given, "--to", "hf", "--out", "out"], output=False)
    start = ["train", "config.yml", "start=folder", "growth=[]", "--out", "new"]
    start += [f"model.{key}" for key in ("layers=3", "qkv_tokens=[16,4]", "proj_tokens=16", "ffn_tokens=[24,8]")]
    tasks = ["eval", "long", "--tasks", "all", "--native", "--data-dir", "rows", "--device", "cpu"]
    runs = ["run/*.json*", "run/config.yml", "run/checkpoints/last", "run/checkpoints/*/**/*"]
    found |= {
        "folder-start": Scenario(start, ["config.yml", "folder", "set"], ["folder/*"], True, False),
        "run-resume": Scenario(["train", "run", "--resume"], ["run", "set"], runs, True, False),
        "run-plot": Scenario(
            ["plot", "run", "--out", "page.html"], ["run"], ["run/metrics.jsonl", "run/*.json"], False, False
        ),
        "run-plan": Scenario(["plan", "run", "--gpus", "2"], ["run"], ["run/config.yml"]),
        "set-verify": Scenario(["data", "verify", "set/alice"], ["set"], ["set/*"], True),
        "set-stats": Scenario(["data", "stats", "set/alice"], ["set"], ["set/*"]),
        "set-peek": Scenario(["data", "peek", "set/alice", "--document", "3"], ["set"], ["set/*"]),
        "set-split": Scenario(["data", "split", "set/alice", "--out", "parts"], ["set"], ["set/*"], False, False),
        "set-merge": Scenario(
            ["data", "merge", "set/alice", "more/alice", "--out", "two"], ["set", "more"], ["*/*"], False, False
        ),
        "set-eval": Scenario(
            ["eval", "folder", "--text", "set/alice", "--device", "cpu"], ["folder", "set"], ["set/*"]
        ),
        "set-train": Scenario(["train", "config.yml", "--out", "new"], ["config.yml", "set"], ["set/*"], False, False),
        "bare-set-train": Scenario(
            [
                "train",
                "config.yml",
                "data.path=bare/alice_text_document",
                "data.tokenizer=tokenizer.json",
                "--out",
                "new",
            ],
            ["config.yml", "bare", "tokenizer.json"],
            ["bare/*", "tokenizer.json"],
            False,
            False,
        ),
        "bare-set-official-order": Scenario(
            [
                "train",
                "config.yml",
                "data.path=bare/alice_text_document",
                "data.tokenizer=tokenizer.json",
                "--out",
                "new",
                "data.order=official",
            ],
            ["config.yml", "bare", "tokenizer.json"],
            ["bare/*"],
            False,
            False,
        ),
        "config-info": Scenario(["info", "config.yml"], ["config.yml"], ["config.yml"]),
        "config-plan": Scenario(["plan", "config.yml", "--gpus", "4"], ["config.yml"], ["config.yml"]),
        "config-slurm": Scenario(
            ["slurm", "config.yml", "--nodes", "1", "--gpus-per-node", "2", "--out", "job"],
            ["config.yml", "set"],
            ["config.yml"],
            False,
            False,
        ),
        "config-train": Scenario(
            ["train", "config.yml", "steps=2", "--out", "new"], ["config.yml", "set"], ["config.yml"], False, False
        ),
        "base-train": Scenario(
            ["train", "derived.yml", "steps=2", "--out", "new"],
            ["derived.yml", "config.yml", "set"],
            ["*.yml"],
            False,
            False,
        ),
        "official-yaml-info": Scenario(["info", "official.yml"], ["official.yml"], ["official.yml"]),
        "official-yaml-plan": Scenario(["plan", "official.yml", "--gpus", "4"], ["official.yml"], ["official.yml"]),
        "official-yaml-train": Scenario(
            ["train", "official.yml", *TRAIN, *SHAPE, "--out", "new"],
            ["official.yml", "set", "tokenizer.json"],
            ["official.yml"],
            False,
            False,
        ),
        "generation-file": Scenario(
            ["generate", "folder", "generation.yml", *SAY],
            ["folder", "generation.yml", "prompts.txt"],
            ["generation.yml", "prompts.txt"],
        ),
        "generate-lines": Scenario(
            ["generate", "folder", "--input-file", "prompts.jsonl", *SAY],
            ["folder", "prompts.jsonl"],
            ["prompts.jsonl"],
        ),
        "tokenizer-info": Scenario(["tokenizer", "info", "tokenizer.json"], ["tokenizer.json"], ["tokenizer.json"]),
        "tokenizer-generate": Scenario(
            ["generate", "folder", *ask, "--tokenizer", "tokenizer.json"],
            ["folder", "tokenizer.json"],
            ["tokenizer.json"],
        ),
        "tokenizer-train": Scenario(
            ["tokenizer", "train", "text.txt", "--vocab", "300", "--out", "new.json"],
            ["text.txt"],
            ["text.txt"],
            False,
            False,
        ),
        "tasks": Scenario(tasks, ["long", "rows"], ["rows/*"]),
        "image-predict": Scenario(
            ["predict", "vision", "pictures", "--device", "cpu"], ["vision", "pictures"], ["vision/*"], True
        ),
        "image-eval": Scenario(
            ["eval", "vision", "--images", "pictures", "--device", "cpu"], ["vision", "pictures"], ["vision/*"], True
        ),
        "compare": Scenario(
            ["compare", "config.yml", "--transformer", "growth=[]", "steps=2", "--out", "new"],
            ["config.yml", "set"],
            ["config.yml"],
            False,
            False,
        ),
        "prepare-tokenizer": Scenario(
            ["prepare", "text.txt", "--tokenizer", "bpe.json", "--out", "new", "--workers", "1"],
            ["text.txt", "bpe.json"],
            ["bpe.json"],
            False,
            False,
        ),
        "prepare": Scenario(
            ["prepare", "raw", "--tokenizer", "byte", "--out", "new", "--workers", "1"],
            ["raw"],
            ["raw/*"],
            False,
            False,
        ),
    }
    return found


def build(folder: Path) -> None:
    """All of it. What an earlier version wrote serves for what is read today: both must be read."""
    folder.mkdir(parents=True)
    for name in ("folder", "hf", "run", "set"):
        shutil.copytree(DATA / "before" / name, folder / name)
    shutil.copytree(
        DATA / "before" / "hf", folder / "hf-bare", ignore=shutil.ignore_patterns("manifest.json", "*.py", "*.md")
    )
    shutil.copytree(DATA / "golden" / "softmax", folder / "golden", ignore=shutil.ignore_patterns("golden*"))
    (folder / "zero").mkdir()
    shutil.copytree(DATA / "zero" / "world2", folder / "zero" / "world2")
    shutil.copy(DATA / "zero" / "config.yml", folder / "zero" / "config.yml")
    shutil.copytree(folder / "set", folder / "more")
    shutil.copytree(folder / "set", folder / "bare", ignore=shutil.ignore_patterns("*.json"))
    text = (DATA / "alice.txt").read_text(encoding="utf-8")[:3000]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    (folder / "config.yml").write_text(CONFIG)
    (folder / "derived.yml").write_text("base: config.yml\nseed: 3\noptimizer: {rate: 0.02}\n")
    official = (DATA / "golden" / "softmax" / "config.yml").read_text()
    (folder / "official.yml").write_text(official)
    (folder / "generation.yml").write_text(GENERATION)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in PROMPTS), encoding="utf-8")
    shutil.copy(DATA / "before" / "folder" / "tokenizer.json", folder / "tokenizer.json")
    (folder / "rows").mkdir()
    write_rows(folder / "rows")
    packed = folder / "rows" / "piqa_valid.jsonl"
    with lzma.open(f"{packed}.xz", "wb") as file:
        file.write(packed.read_bytes())
    packed.unlink()
    made = multiprocessing.get_context("fork").Process(target=_make, args=(folder, text))
    made.start()  # apart: what is forked later must have touched no tensor
    made.join()
    assert made.exitcode == 0
    (folder / "raw").mkdir()
    rows = "".join(json.dumps({"text": part, "id": i}) + "\n" for i, part in enumerate(text.split("\n\n")))
    (folder / "raw" / "a.jsonl").write_text(rows, encoding="utf-8")
    with lzma.open(folder / "raw" / "b.txt.xz", "wb") as file:
        file.write(text.encode())
    (folder / "raw" / "c.txt").write_text(text[:500], encoding="utf-8")
    shutil.copy(folder / "text.parquet", folder / "raw" / "d.parquet")


def _make(folder: Path, text: str) -> None:
    import pyarrow
    from pyarrow import parquet

    from tokenformer.config import ModelConfig
    from tokenformer.data.text.tokenizer import train_tokenizer
    from tokenformer.hub import save
    from tokenformer.models import build as build_model

    shape = {"layers": 2, "dim": 16, "heads": 2, "qkv_tokens": 12, "proj_tokens": 10, "ffn_tokens": 20, "vocab": 384}
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for name, format, context in (("official", "official", 32), ("long", "ours", 256)):
        model = build_model(ModelConfig(**shape, context=context), seed=1)
        save(model, folder / name, format=format, tokenizer_json=tokenizer)
    media.build(folder, tokenizer)
    parquet.write_table(pyarrow.table({"text": text.split("\n\n")}), folder / "text.parquet")
    for number in range(6):
        path = folder / "pictures" / "val" / pictures.CLASSES[pictures.label(number)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures.picture(number, 32, 32).save(path)
    (folder / "bpe.json").write_text(train_tokenizer([text], 300).to_json(), encoding="utf-8")


def harmed_files(root: Path, scenario: Scenario, chance: random.Random) -> list[Path]:
    """The files that a case may damage, in an order of its own."""
    found = {path for pattern in scenario.harmed for path in root.glob(pattern) if path.is_file()}
    return chance.sample(sorted(found), len(found))
