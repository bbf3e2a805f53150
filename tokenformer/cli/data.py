"""Describe and check prepared sets and images; split and merge sets.

tokenformer data verify data/books
tokenformer data stats data/books --context 2048
tokenformer data peek data/books --document 3
tokenformer data split data/books --shares 90,5,5 --out data
tokenformer data merge data/pile-*-of-30_text_document.idx --out data/pile
tokenformer data images photos --out sheet.png data.images.randaugment_ops=2 data.images.mixup=0.8
"""

import argparse
from typing import TYPE_CHECKING

from tokenformer.config_data import DataConfig
from tokenformer.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from tokenformer.config_data import ImagesConfig
    from tokenformer.data.images.stored import Images


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="check files, checksums, structure and every token")
    verify.add_argument("sets", nargs="+", metavar="SET")
    verify.add_argument("--vocab", type=int, metavar="N", help="ids must be below it (default: the tokenizer's)")
    verify.set_defaults(action=_verify)
    stats = actions.add_parser("stats", help="documents, tokens, lengths, parts")
    stats.add_argument("set", metavar="SET")
    stats.add_argument("--shares", default="969,30,1", help="of train, validation, test (default: 969,30,1)")
    stats.add_argument("--context", type=int, default=2048)
    stats.set_defaults(action=_stats)
    peek = actions.add_parser("peek", help="print a document")
    peek.add_argument("set", metavar="SET")
    peek.add_argument("--document", type=int, default=0, metavar="N")
    peek.add_argument("--tokens", type=int, default=200, metavar="N", help="how many of its first (default: 200)")
    peek.add_argument("--tokenizer", help="instead of the set's own")
    peek.add_argument("--ids", action="store_true", help="print ids, not text")
    peek.set_defaults(action=_peek)
    split = actions.add_parser("split", help="write the parts as sets of their own")
    split.add_argument("set", metavar="SET")
    split.add_argument("--shares", default="969,30,1", help="of train, validation, test (default: 969,30,1)")
    split.add_argument("--out", default=".", metavar="FOLDER")
    split.set_defaults(action=_split)
    merge = actions.add_parser("merge", help="one set from several, such as the shards of `prepare --shard`")
    merge.add_argument("sets", nargs="+", metavar="SET")
    merge.add_argument("--out", required=True, metavar="PATH", help="path and name of the new set")
    merge.set_defaults(action=_merge)
    images = actions.add_parser("images", help="draw what a model sees of images, augmented and not; check them all")
    images.add_argument("path", metavar="PATH", help="as data.path: a folder, shards (train-{000..146}.tar), a file")
    images.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as data.images.mixup=0.8")
    images.add_argument("--config", metavar="CONFIG", help="a config file or preset, for its section `data`")
    images.add_argument("--out", default="sheet.png", metavar="FILE", help="the contact sheet (default: sheet.png)")
    images.add_argument("--count", type=int, default=8, metavar="N", help="images on it (default: 8)")
    images.add_argument("--force", action="store_true", help="replace the file if it is there")
    images.add_argument("--check", action="store_true", help="name the damaged images (exit code 2), draw nothing")
    images.set_defaults(action=_images)


def run(args: argparse.Namespace) -> int | None:
    return args.action(args)


def _shares(text: str) -> list[float]:
    try:
        return DataConfig(split=[float(share) for share in text.split(",")]).split
    except (ValueError, UserError):
        raise UserError(f"--shares {text} are not up to three numbers: write them as 969,30,1") from None


def _verify(args: argparse.Namespace) -> None:
    from tokenformer.data.text import indexed, sets
    from tokenformer.terminal import progress

    for path in args.sets:
        prefix = indexed.find_prefix(path)
        size = 2 * sum(p.stat().st_size for p in prefix.parent.glob(f"{prefix.name}.*") if p.is_file())
        with progress(f"checking {path}", size, " bytes") as advance:
            source = sets.verify(path, args.vocab, advance)
        what = "checksums, structure and tokens" if source.description else "structure and tokens (no description)"
        print(f"{source.prefix}: {source.documents:,} documents, {len(source.tokens):,} tokens; {what} are right")


def _stats(args: argparse.Namespace) -> None:
    from tokenformer.data.text import sets
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.terminal import table

    if args.context < 1:
        raise UserError(f"--context is {args.context}: give a number above 0")
    source = Indexed(args.set)
    table(["set", source.prefix.name], sets.stats(source, _shares(args.shares), args.context))


def _peek(args: argparse.Namespace) -> None:
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.data.text.sets import set_tokenizer
    from tokenformer.data.text.tokenizer import load_tokenizer

    source = Indexed(args.set)
    if not 0 <= args.document < source.documents:
        raise UserError(f"{source.prefix.name} has no document {args.document}: give 0 to {source.documents - 1}")
    ids = source.document(args.document)
    shown = ids[: max(0, args.tokens)].tolist()
    if args.ids:
        print(*shown)
    else:
        tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else set_tokenizer(source)
        print(tokenizer.decode(shown))
    if len(shown) < len(ids):
        print(f"… {len(ids) - len(shown):,} more tokens (--tokens)")


def _split(args: argparse.Namespace) -> None:
    from tokenformer.data.text import sets
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.terminal import progress

    shares = _shares(args.shares)
    with progress(f"splitting {args.set}", len(Indexed(args.set, "quick").tokens), " tokens") as advance:
        made = sets.split(args.set, shares, args.out, advance)
    for prefix in made.values():
        print(prefix)


def _merge(args: argparse.Namespace) -> None:
    from tokenformer.data.text import sets
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.terminal import progress

    with progress("merging", sum(len(Indexed(p, "quick").tokens) for p in args.sets), " tokens") as advance:
        print(sets.merge(args.sets, args.out, advance))


def _images(args: argparse.Namespace) -> int:
    from tokenformer import files
    from tokenformer.config import read
    from tokenformer.config_data import DataConfig, ImagesConfig
    from tokenformer.data.images.opening import NoTraining, open_images, open_parts
    from tokenformer.data.images.sheet import contact_sheet, damaged_images
    from tokenformer.strict import build, merge, override

    raw = override(merge(read(args.config) if args.config else {}, {"data": {"path": args.path}}), args.overrides)
    data = build(DataConfig, raw["data"], "data")
    settings = data.images or ImagesConfig()
    if not 1 <= args.count <= 100:
        raise UserError(f"--count {args.count} is no number of images for a sheet: give 1 to 100")
    if not args.check:
        files.check_writable(args.out, args.force, ".png")
    try:
        parts: dict[str, Images] = dict(zip(("train", "validation"), open_parts(data), strict=True))
    except NoTraining:  # it may be looked at all the same
        parts = {"validation": open_images(data, "validation")}
    for part, images in parts.items():
        print(f"{part}: {len(images):,} images of {len(images.classes):,} classes")
    if args.check:
        found = [
            f"{images.name(i)}: {why}" for images in parts.values() for i, why in damaged_images(images, data.workers)
        ]
        print(*found, f"damaged images: {len(found):,}", sep="\n")
        return 2 if found else 0
    model = raw.get("model", {}).get("image_size")
    size = settings.size or (model if isinstance(model, int) else 224)
    with files.atomic_file(args.out) as beside:
        beside.write_bytes(
            contact_sheet(
                next(iter(parts.values())), settings, size, args.count, int(raw.get("seed", 1234)), _augmented
            )
        )
    print(f"{args.out}: the first row as in evaluation, the others as in three epochs of training")
    return 0


def _augmented(fields: dict, settings: "ImagesConfig") -> "np.ndarray":
    """Return the pixels that a model is trained on, as bytes again."""
    import torch

    from tokenformer.ops.augment import augment

    batch = {"pixels": torch.from_numpy(fields["pixels"]), "label": torch.from_numpy(fields["label"])}
    x, _ = augment({**batch, "draws": fields["draws"]}, settings, int(fields["label"].max()) + 1)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (settings.mean, settings.std))
    return ((x * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
