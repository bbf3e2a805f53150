"""Measure a model: perplexity, zero-shot tasks beside the paper's numbers; of images top-1 and top-5, of pairs recall.

example: tokenformer eval my-folder --text book.txt --stride 512
         tokenformer eval runs/mine --text data/books --part validation
         tokenformer eval my-folder --tasks all --data-dir zero-shot --out results.json
         tokenformer eval Haiyang-W/TokenFormer-150M --tasks lambada_openai,piqa
         tokenformer eval runs/icons --images examples/icons --confusion confusion.png
         tokenformer eval vit --images imagenet/val --class-index imagenet_class_index.json
         tokenformer eval vit --images val --labels LOC_val_solution.csv --class-index LOC_synset_mapping.txt
         tokenformer eval runs/pairs --pairs examples/icons
         tokenformer eval runs/pairs --images examples/icons --templates templates.txt
         tokenformer eval runs/pairs --images imagenet/val --class-index imagenet --templates imagenet
         torchrun --nproc-per-node 8 -m tokenformer eval my-folder --tasks all

MODEL is a folder, a run, official weights (with their config files, if none is beside them) or a hub name. Tasks come
through EleutherAI's harness (pip install 'tokenformer[eval]'), any of its tasks by name; with --data-dir the six of the
paper from local files, offline, and without the harness by our own scorer (--native), which gives the same. --images
takes what data.path takes: folders of classes, shards, Parquet, CIFAR, MNIST, or one folder and --labels. They are read
as in the model's training, unless words such as data.images.crop_pct=1 say otherwise. A damaged image is named and
counts in no figure, and the exit code is then 2.

Of a pair (`model.of: pair`), --pairs measures how many images find one of their captions among the first 1, 5 and 10,
and captions their image; what scores as high as the right one stands before it. Of a model that reads images
(`model.of: caption`) --pairs measures what it writes, and how likely the right name is beside 99 others. --images
classifies by the names of the classes (zero-shot): those of --class-index, of classnames.txt beside the data, or of the
data themselves, put into each of --templates (a line each, such as `a photo of a {}.`; default: those beside the data,
else the name alone). This package has names (imagenet, cifar10, cifar100) and templates (imagenet, cifar): give that
word instead of a file.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="+", metavar="MODEL", help="weights, and official config files; with --images: data.KEY=VALUE")
    add("--text", action="append", default=[], help="a text file or prepared set; may be given several times")
    part = "of prepared sets (default: the whole) or images (default: validation, where there is one, else all)"
    add("--part", choices=["train", "validation", "test"], help=part)
    add("--images", metavar="PATH", help="labelled images, for an image model or a pair")
    add(
        "--pairs",
        metavar="PATH",
        help="images with captions, for pairs and captions: CSV, JSON lines, Parquet, webdataset",
    )
    templates = "of a pair, with --images: lines with {} for the name of a class; or imagenet, cifar"
    add("--templates", type=Path, metavar="FILE", help=templates)
    index = "which folder is which class: JSON or a line for each class; or imagenet, cifar10, cifar100"
    add("--class-index", type=Path, metavar="FILE", help=index)
    labels = "of images that all lie in one folder: a line `FILE CLASS` each, Kaggle's CSV, or the devkit's list"
    add("--labels", metavar="FILE", help=labels)
    add("--confusion", type=Path, metavar="FILE", help="with --images: a PNG of which classes are taken for which")
    add("--size", type=int, metavar="N", help="with --images: pixels of the square that the model sees")
    add("--batch", type=int, help="with --images: how many at a time (default 64, on a CPU 8)")
    add("--field", default="text", help="of JSON lines or Parquet (default: text)")
    add("--stride", type=int, help="tokens by which the window moves (default: half of it)")
    add("--context", type=int, help="the window (default: the model's context)")
    add("--tasks", default="", help="names with commas between, or all (the six of the paper)")
    add("--data-dir", type=Path, help="local files of the six tasks; nothing is fetched")
    add("--native", action="store_true", help="score without the harness (needs --data-dir)")
    add("--limit", type=int, help="rows of a task, documents of a text, images of all classes, at most")
    add("--batch-tokens", type=int, default=16384, help="positions computed at once")
    add("--out", type=Path, help="a JSON file for the results")
    add("--force", action="store_true", help="replace a file of that name")
    add("--tokenizer", help="a name, tokenizer.json or folder (default: the model's own)")
    add("--adapter", action="append", default=[], metavar="FOLDER[=WEIGHT]", help="attach one; may be given often")
    help = "of runs with train.ema (default: average), models and adapters; of a language model fp8: rounded to 8 bits"
    add("--weights", choices=["average", "raw", "fp8"], help=help)
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16, float16 (default: bfloat16 on cuda, else as stored)")


def run(args: argparse.Namespace) -> int | None:
    from tokenformer.adapters import attach_all
    from tokenformer.cli.eval_images import measure_images, measure_pairs
    from tokenformer.config import load
    from tokenformer.config_data import DataConfig
    from tokenformer.data.text.inputs import find_inputs
    from tokenformer.data.text.tokenizer import fingerprint
    from tokenformer.eval.perplexity import is_prepared, window
    from tokenformer.eval.ranks import leave, local_device, rank
    from tokenformer.eval.tasks import TASKS, read_rows
    from tokenformer.files import check_writable, write_text
    from tokenformer.hub.open import open_model, split_words
    from tokenformer.infer.quantised import check_type, rounded

    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    names = list(TASKS) if names == ["all"] else names
    for option in ("stride", "context", "limit", "batch_tokens", "batch"):
        number = getattr(args, option)
        if number is not None and number < 1:
            raise UserError(f"--{option.replace('_', '-')} is {number}: give 1 or more")
    if args.images or args.pairs:
        if args.weights == "fp8":
            raise UserError("--weights fp8 is for language models: leave it out, or give --text or --tasks instead")
        if names or args.text or (args.images and args.pairs):
            raise UserError(
                "--images is for image models, --pairs for pairs, --text and --tasks for language models: "
                "give one of them"
            )
        return measure_pairs(args) if args.pairs else measure_images(args)
    for option in ("class_index", "labels", "confusion", "size", "templates"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option.replace('_', '-')} goes with --images: give them too, or leave it out")
    if not names and not args.text:
        raise UserError("there is nothing to measure: give --tasks (all, or names), --text, --images or --pairs")
    if args.native and args.data_dir is None:
        raise UserError("--native scores local files: say with --data-dir where they are")
    if args.data_dir is not None:
        for name in names:
            read_rows(name, args.data_dir, args.limit if args.native else None)  # the harness reads all
    for text in args.text:
        if not is_prepared(text):
            find_inputs([text])
            if args.part:
                raise UserError(f"{text} is no prepared set, so it has no part {args.part}: leave --part out")
    if args.out:
        check_writable(args.out, args.force)
    source, configs, _ = split_words(args.source)
    device = local_device(args.device)
    how = {"device": device, "dtype": args.dtype, "weights": args.weights}
    opened = open_model(source, configs, tokenizer=args.tokenizer, **how)
    opened.prepare = partial(attach_all, words=args.adapter, average=args.weights != "raw")
    opened.raw = opened.raw and not args.adapter  # then it is the adapter's: its base is the average it was trained on
    tokenizer, model = opened.tokenizer, opened.language
    if args.weights == "fp8":
        check_type(model.embedding.weight.dtype)
        model = rounded(model)
    context, stride = window(model.config.context, args.context, args.stride)
    results: dict[str, Any] = {"model": str(source), "parameters": model.cost().parameters, "weights": args.weights}
    if args.adapter:
        results["adapters"] = args.adapter
    results["tokenizer"] = {"name": tokenizer.name, "sha256": fingerprint(tokenizer)}
    results |= {"context": context, "limit": args.limit}
    try:
        if args.text:
            data = load(opened.run).data if opened.run else DataConfig()  # as the run was trained, else by default
            results |= {"stride": stride, "part": args.part, "shares": data.split if args.part else None, "texts": {}}
            for text in args.text:
                results["texts"][text] = measure_text(model, tokenizer, text, results, args)
        if names:
            results["tasks"], results["scorer"] = measure_tasks(model, tokenizer, names, context, args)
    finally:  # what was measured before an error is not lost
        if rank() == 0 and (results.get("texts") or "tasks" in results):
            show(Path(str(source)).name, results)
            if args.out:
                write_text(args.out, json.dumps(results, indent=1) + "\n")
                print(args.out)
    leave()


def measure_text(model, tokenizer, text: str, how: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    from tokenformer.eval.perplexity import open_documents, perplexity
    from tokenformer.terminal import progress

    shares = how["shares"] or [1.0]
    documents = open_documents(text, tokenizer, args.limit, field=args.field, part=args.part, shares=shares)
    window = {"context": how["context"], "stride": how["stride"], "batch": max(1, args.batch_tokens // how["context"])}
    with progress(f"measuring {Path(text).name}", None, " tokens") as advance:
        return perplexity(model, documents, tokenizer.end_of_document, **window, advance=advance)


def measure_tasks(
    model, tokenizer, names: list[str], context: int, args: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Measure tasks by the harness where it is installed, else by our own scorer; return which it was."""
    from tokenformer.eval.tasks import run_tasks
    from tokenformer.terminal import progress

    if not args.native:
        try:
            from tokenformer.eval import harness
        except UserError:
            if args.data_dir is None:
                raise
        else:
            ours = harness.HarnessModel(model, tokenizer, max_length=context, batch_tokens=args.batch_tokens)
            found = harness.run_harness(ours, names, data_dir=args.data_dir, limit=args.limit)
            return harness.metrics(found), "lm_eval"
    from tokenformer.infer.packed import Packed

    with progress("scoring", None) as advance:
        how = {"limit": args.limit, "context": context, "tokens": args.batch_tokens}
        found = run_tasks(Packed(model), tokenizer, names, args.data_dir, **how, advance=advance)
    return found, "native"


def show(name: str, results: dict[str, Any]) -> None:
    from tokenformer.eval.paper import HEAD, beside_paper
    from tokenformer.eval.tasks import TASKS
    from tokenformer.terminal import table

    if results.get("texts"):
        head = ["text", "loss", "perplexity", "bits per token", "bits per byte", "tokens", "bytes"]
        keys = ("loss", "perplexity", "bits_per_token", "bits_per_byte")
        found = results["texts"].items()
        rows = [[path, *(f"{m[k]:.4f}" for k in keys), f"{m['tokens']:,}", f"{m['bytes']:,}"] for path, m in found]
        table(head, rows)
    if "tasks" in results:
        rows = [[t, k, f"{v:.4f}"] for t, m in results["tasks"].items() for k, v in m.items() if k != "rows"]
        table(["task", "measure", "value"], rows, title=f"by {results['scorer']}")
        if TASKS.keys() & results["tasks"].keys():
            limit = results["limit"]
            if limit and any(m.get("rows") == limit for m in results["tasks"].values()):
                name = f"{name} (first {limit} rows)"
            rows = beside_paper(name, results["tasks"], {task: TASKS[task].printed for task in TASKS})
            table(HEAD, rows, title="accuracies in %, beside the paper's (HellaSwag and ARC-C: acc_norm)")
