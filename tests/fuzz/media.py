"""Images, pairs, adapters and a server: good files of these, and the commands that read them (see `material.py`)."""

import csv
import json
import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

from tests.data.images import pictures
from tests.fuzz import asking

SHAPE = {"layers": 1, "dim": 16, "heads": 2, "qkv_tokens": 8, "proj_tokens": 8, "ffn_tokens": 12}
CPU = ["--device", "cpu"]
RUN = {"steps": 2, "batch": 4, "train": {"device": "cpu", "precision": "fp32"}, "validation": {"samples": 2}}
ASKED = "requests.jsonl"
TEXTS = ["an ant", "a bee", "a cat on a mat, “Ah!”"]
PROGRESSIVE = """\
model: {layers: 2, dim: 16, heads: 2, qkv_tokens: 32, proj_tokens: 16, ffn_tokens: 48, context: 32, vocab: 384}
data: {path: set/alice, split: [90, 10, 0], workers: 0}
steps: 4
batch: 4
optimizer: {kind: adamw, rate: 0.01}
schedule: {count: compute}
train: {device: cpu, precision: fp32}
growth: {progressive: {from: 0.5, at: [0.25]}}
"""


class Scenario(NamedTuple):
    words: list[str]  # of the command line; SERVER becomes the address of a server of the case's folder
    needs: list[str]  # what of the material is copied
    harmed: list[str]  # patterns of files that are damaged
    vouched: bool = False  # a manifest lies there: what is read must be what was written
    output: bool = True  # whether what is printed can be compared
    served: bool = False  # whether there is a server
    elsewhere: bool = False  # what vouches for the result is not harmed: success gives the good result always
    requests: str = ""  # a file of what a server is asked; it must listen at PORT


def scenarios() -> dict[str, Scenario]:
    """By name."""
    texts, whole = ["--texts", "texts.txt"], ["data.images.hold_back=2"]
    fetch = ["pull", "SERVER/served", "--out"]
    serve = ["serve", "chat", "--adapter", "adapter", "--port", "PORT", "--rows", "2", *CPU]
    found = {
        "pull": Scenario([*fetch, "out"], ["served"], ["served/*"], True, False, True),
        "pull-adapter": Scenario(
            ["pull", "SERVER/adapter", "--out", "out"], ["adapter"], ["adapter/*"], True, False, True
        ),
        "pull-renew": Scenario(
            [*fetch, "new", "--force", "--have", "long"],
            ["served", "new", "long"],
            ["new/*", "long/*"],
            False,
            False,
            True,
            True,
        ),
        "adapter-generate": Scenario(
            ["generate", "long", "--adapter", "adapter", "--prompt", "The Rabbit", "--tokens", "5", "--logprobs", *CPU],
            ["long", "adapter"],
            ["adapter/*"],
            True,
        ),
        "adapter-list": Scenario(["adapter", "list", "adapter"], ["adapter"], ["adapter/*"], True),
        "adapter-merge": Scenario(
            ["adapter", "merge", "long", "adapter=0.5", "--out", "out"], ["long", "adapter"], ["*/*"], True, False
        ),
        "adapter-add": Scenario(
            ["adapter", "add", "adapter=0.5", "adapter", "--out", "out"], ["adapter"], ["adapter/*"], True, False
        ),
        "adapter-of-a-run": Scenario(
            ["adapter", "add", "adapted", "--out", "out"],
            ["adapted"],
            ["adapted/*.yml", "adapted/checkpoints/last", "adapted/checkpoints/*/**/*"],
            False,
            False,
        ),
        "adapter-resume": Scenario(
            ["train", "adapted", "--resume", "steps=3"],
            ["adapted", "long", "set"],
            ["adapted/*.yml", "adapted/*.json*", "adapted/checkpoints/last", "adapted/checkpoints/*/**/*", "long/*"],
            False,
            False,
        ),
        "image-hf": Scenario(["predict", "vision-hf", "shown", *CPU], ["vision-hf", "shown"], ["vision-hf/*"], True),
        "images-predict": Scenario(["predict", "vision", "shown", *CPU], ["vision", "shown"], ["shown/*"]),
        "images-check": Scenario(["data", "images", "photos", "--check"], ["photos"], ["photos/**/*"], False, False),
        "images-labels": Scenario(
            ["eval", "vision", "--images", "shown", "--labels", "labels.txt", "--class-index", "index.json", *CPU],
            ["vision", "shown", "labels.txt", "index.json"],
            ["labels.txt", "index.json"],
        ),
        "images-train": Scenario(
            ["train", "classify.yml", "steps=2", "--out", "new"],
            ["classify.yml", "photos"],
            ["*.yml", "photos/**/*"],
            False,
            False,
        ),
        "serve": Scenario(serve, ["chat", "adapter", ASKED], ["chat/*", "adapter/*"], True, requests=ASKED),
        "serve-requests": Scenario(serve, ["chat", "adapter", ASKED], [ASKED], requests=ASKED),
        "slurm-again": Scenario(
            ["slurm", "pairs.yml", "--nodes", "1", "--gpus-per-node", "2", "--out", "job", "--time", "10:00"],
            ["pairs.yml", "job.sbatch"],
            ["job.sbatch"],
            False,
            False,
        ),
        "wide-generate": Scenario(
            ["generate", "wide", "--prompt", "The Rabbit", "--tokens", "5", "--logprobs", *CPU],
            ["wide"],
            ["wide/*"],
            True,
        ),
        "wide-grow": Scenario(
            ["grow", "wide", "--vocab", "420", "--switch", "draw", "--out", "out"], ["wide"], ["wide/*"], True, False
        ),
        "wide-export": Scenario(["convert", "wide", "--to", "hf", "--out", "out"], ["wide"], ["wide/*"], True, False),
        "pair-hf": Scenario(
            ["match", "pair-hf", "shown", *texts, "--json", *CPU],
            ["pair-hf", "shown", "texts.txt"],
            ["pair-hf/*"],
            True,
        ),
        "pair-resume": Scenario(
            ["train", "paired", "--resume", "steps=3"],
            ["paired", "pairs-csv"],
            ["paired/*.yml", "paired/*.json*", "paired/checkpoints/last", "paired/checkpoints/*/**/*"],
            False,
            False,
        ),
        "pair-info": Scenario(["info", "pair"], ["pair"], ["pair/*"], True),
        "pair-export": Scenario(["convert", "pair", "--to", "hf", "--out", "out"], ["pair"], ["pair/*"], True, False),
        "pair-embed": Scenario(
            ["embed", "pair", "shown", "--out", "out.safetensors", *CPU], ["pair", "shown"], ["pair/*"], True, False
        ),
        "pair-texts": Scenario(
            ["embed", "pair", *texts, "--out", "out.safetensors", *CPU],
            ["pair", "texts.txt"],
            ["texts.txt"],
            False,
            False,
        ),
        "pair-match": Scenario(
            ["match", "pair", "shown", *texts, "--json", "--sheet", "sheet.png", *CPU],
            ["pair", "shown", "texts.txt"],
            ["pair/*", "shown/*"],
        ),
        "pair-zero-shot": Scenario(
            ["eval", "pair", "--images", "photos", "--templates", "templates.txt", *CPU],
            ["pair", "photos", "templates.txt"],
            ["templates.txt", "photos/**/*"],
        ),
        "pairs-train": Scenario(
            ["train", "pairs.yml", "steps=2", "--out", "new", *whole],
            ["pairs.yml", "pairs-csv"],
            ["*.yml", "pairs-csv/*"],
            False,
            False,
        ),
        "progressive": Scenario(
            ["train", "progressive.yml", "steps=4", "--out", "new"],
            ["progressive.yml", "set"],
            ["progressive.yml"],
            False,
            False,
        ),
        "progressive-plan": Scenario(
            ["plan", "progressive.yml", "--gpus", "2"], ["progressive.yml"], ["progressive.yml"]
        ),
    }
    for form in ("csv", "jsonl", "tar", "parquet"):
        found[f"pairs-{form}"] = Scenario(
            ["eval", "pair", "--pairs", f"pairs-{form}", *CPU], ["pair", f"pairs-{form}"], [f"pairs-{form}/*"]
        )
    for form, model in (("tar", "vision"), ("parquet", "vision"), ("cifar", "ten"), ("mnist", "ten")):
        found[f"images-{form}"] = Scenario(
            ["eval", model, "--images", f"images-{form}", *CPU], [model, f"images-{form}"], [f"images-{form}/*"]
        )
    return found


def build(folder: Path, tokenizer: str) -> None:
    """All of it, beside what `material.build` makes. In a process of its own: tensors are touched."""
    from tokenformer import grow
    from tokenformer.cli.main import main
    from tokenformer.config import ModelConfig
    from tokenformer.hub import load, save
    from tokenformer.models import build as build_model

    model = build_model(ModelConfig(**SHAPE, of="image", image_size=32, patch=8, classes=3), seed=1)
    model.images = {"classes": pictures.CLASSES, "mean": [0.5] * 3, "std": [0.25] * 3}
    save(model, folder / "vision")
    save(model, folder / "vision-hf", format="hf")
    save(build_model(ModelConfig(**SHAPE, of="image", image_size=32, patch=8, classes=10), seed=1), folder / "ten")
    trunks = {
        "image": ModelConfig(**SHAPE, of="image", image_size=16, patch=8, classes=0),
        "text": ModelConfig(**SHAPE, of="text", context=16, vocab=384, pool="end"),
    }
    model = build_model(ModelConfig(of="pair", embed=8, trunks=trunks), seed=1)
    model.images = {"mean": [0.5] * 3, "std": [0.25] * 3, "size": 16, "crop_pct": 1.0, "interpolation": "bicubic"}
    save(model, folder / "pair", tokenizer_json=tokenizer)
    _images(folder)
    _configs(folder, trunks)
    model = load(folder / "long")
    save(model, folder / "new", tokenizer_json=tokenizer)
    save(grow(model, ffn_tokens=28), folder / "served", tokenizer_json=tokenizer)
    here = ["data.path=" + str(folder / "set" / "alice"), "data.workers=0", "data.split=[90,10,0]"]
    words = [f"start={folder / 'long'}", *here, "steps=2", "batch=2", "adapter.ffn_tokens=3", "train.device=cpu"]
    (folder / "adapter.yml").write_text("train: {precision: fp32}\nvalidation: {samples: 2, generate: 0}\n")
    assert main(["train", str(folder / "adapter.yml"), *words, "--out", str(folder / "adapted")]) == 0
    assert main(["adapter", "add", str(folder / "adapted"), "--out", str(folder / "adapter")]) == 0
    save(grow(model, vocab=400, ffn_tokens=28, switch="draw"), folder / "wide", tokenizer_json=tokenizer)
    save(load(folder / "pair"), folder / "pair-hf", format="hf", tokenizer_json=tokenizer)
    pairs = ["train", str(folder / "pairs.yml"), f"data.path={folder / 'pairs-csv'}", "data.images.hold_back=1"]
    assert main([*pairs, "--out", str(folder / "paired")]) == 0
    for run in ("adapted", "paired"):
        said = folder / run / "config.yml"
        said.write_text(said.read_text().replace(f"{folder}/", "").replace("steps: 2", "steps: 3"))
    _served(folder)


def _served(folder: Path) -> None:
    """A folder with a chat template, what a server of it is asked, and a job script to write anew."""
    from tokenformer.cli.main import main
    from tokenformer.files import write_manifest

    shutil.copytree(folder / "long", folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(asking.TEMPLATE)
    (folder / "chat" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    write_manifest(folder / "chat")
    (folder / ASKED).write_text("\n".join(json.dumps(request) for request in asking.REQUESTS))
    job = ["slurm", str(folder / "pairs.yml"), "--nodes", "1", "--gpus-per-node", "2", "--out", str(folder / "job")]
    assert main(job) == 0
    with open(folder / "job.sbatch", "a") as script:
        script.write("echo mine\n")


def _images(folder: Path) -> None:
    pictures.make_folder(folder / "photos", 6, 3)
    pictures.make_tars(folder / "images-tar", 6, 6)
    pictures.make_parquet(folder / "images-parquet", 6)
    pictures.make_cifar(folder / "images-cifar", (4, 2), 3)
    pictures.make_mnist(folder / "images-mnist", 6, 3)
    (folder / "shown").mkdir()
    for number in range(3):
        pictures.picture(number, 20, 20).save(folder / "shown" / f"{number}.png")
    (folder / "labels.txt").write_text("".join(f"{n}.png {pictures.label(n)}\n" for n in range(3)))
    (folder / "index.json").write_text(json.dumps({str(i): [f"n{i:08}", c] for i, c in enumerate(pictures.CLASSES)}))
    for form in ("csv", "jsonl", "tar", "parquet"):
        target = folder / f"pairs-{form}"
        target.mkdir()
        if form in ("csv", "jsonl"):
            for image in (folder / "shown").iterdir():
                shutil.copy(image, target)
    rows = [(f"{number}.png", TEXTS[number]) for number in range(3)]
    with open(folder / "pairs-csv" / "train.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    lines = [json.dumps({"image": name, "caption": [text, "more"]}) for name, text in rows]
    (folder / "pairs-jsonl" / "train.jsonl").write_text("\n".join(lines))
    with tarfile.open(folder / "pairs-tar" / "train-0.tar", "w") as tar:
        for name, text in rows:
            pictures.add(tar, name, (folder / "shown" / name).read_bytes())
            pictures.add(tar, name.replace("png", "txt"), text.encode())
    import pyarrow
    from pyarrow import parquet

    images = [{"bytes": (folder / "shown" / name).read_bytes()} for name, _ in rows]
    table = pyarrow.table({"image": images, "caption": TEXTS})
    parquet.write_table(table, folder / "pairs-parquet" / "train-0.parquet")


def _configs(folder: Path, trunks: dict) -> None:
    from tokenformer.config import to_dict

    image, data = {"of": "image", "image_size": 16, "patch": 8}, {"workers": 0}
    shown = {name: to_dict(trunk) for name, trunk in trunks.items()}
    classify = {"model": {**SHAPE, **image, "classes": 3}, "data": {"path": "photos", **data}, **RUN}
    pairs = {"model": {"of": "pair", "embed": 8, "trunks": shown}, **RUN, "batch": 2}
    pairs["data"] = {"path": "pairs-csv", "tokenizer": "byte", **data}
    for name, config in (("classify", classify), ("pairs", pairs)):
        (folder / f"{name}.yml").write_text(json.dumps(config, indent=1))
    (folder / "progressive.yml").write_text(PROGRESSIVE)
    (folder / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (folder / "templates.txt").write_text("a photo of a {}.\nthe {}\n")
