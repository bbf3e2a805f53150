"""What can be configured about data: the keys of the section `data`."""

from dataclasses import dataclass
from typing import Literal

from tokenformer.strict import Section, key, need

IGNORED = -100  # a label that counts in no loss
Verify = Literal["auto", "quick", "full"]
# what `data.images` draws for each sample, in this order (data/images/__init__.py says what each means) …
DRAWS = (
    *("flip", "erase_top", "erase_left", "erase_height", "erase_width", "erase_key"),
    *("mix", "mix_share", "cut_row", "cut_column"),
)
# … and then, for each operation of RandAugment, its number in this list and its level
OPERATIONS = (
    *("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add"),
    *("color", "contrast", "brightness", "sharpness"),
    *("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
)


@dataclass(frozen=True)
class ImagesConfig(Section, section="data.images"):
    """Images: where they are, how they are cropped, and how they are augmented in training."""

    format: Literal["auto", "folder", "tar", "parquet", "cifar", "mnist", "csv", "jsonl"] = key(
        "of data.path: a folder per class inside train/ and val/; webdataset shards (`train-{000..146}.tar`); Parquet; "
        "the binary files of CIFAR-10 or CIFAR-100; those of MNIST; of pairs also CSV and JSON lines with paths",
        "auto",
    )
    validation: str | None = key("path of the images to validate on; absent = the val/ or test part of data.path", None)
    hold_back: int = key(
        "training images that are kept out of training and validated on instead; the data alone decide which",
        0,
        least=0,
    )
    classes: str | None = key("file with a class name per line; absent = the names that the data have", None)
    labels: str | None = key(
        "of images that all lie in one folder: a file with a line `FILE CLASS` each, Kaggle's CSV, or the list of "
        "ImageNet's devkit (meta.mat beside it)",
        None,
    )
    image_column: str = key("column of the images in Parquet, of their paths in CSV and JSON lines", "image")
    caption_column: str = key(
        "column of the texts of pairs; an image may have several, of which each epoch draws one", "caption"
    )
    drop_caption: float = key(
        "task draw: share of captions that are left out in training; guidance needs some", 0.1, least=0, most=1
    )
    label_column: str = key("column of the class numbers in Parquet", "label")
    damaged: Literal["refuse", "skip"] = key(
        "what is done about an image that cannot be decoded: stop and name it, or count it and take another; about a "
        "pair without text: stop and name it, or leave it out",
        "refuse",
    )
    size: int | None = key(
        "height and width of what the model sees; absent = the model's own", None, above=0, most=4096
    )
    crop: Literal["resized", "padded", "centre"] = key(
        "in training: a random part of the image, resized; the image with a black border, cut at a random place; as in "
        "evaluation",
        "resized",
    )
    crop_scale: list[float] = key(
        "resized: smallest and largest share of the area", make=lambda: [0.08, 1.0], above=0, most=1
    )
    crop_ratio: list[float] = key(
        "resized: smallest and largest width over height", make=lambda: [3 / 4, 4 / 3], above=0, most=100
    )
    padding: int = key("padded: pixels of the border", 4, least=0, most=4096)
    crop_pct: float = key("in evaluation: the centre square's share of the shorter side", 0.875, above=0, most=1)
    interpolation: Literal["bicubic", "bilinear"] = key("how pixels are resized", "bicubic")
    mean: list[float] = key("subtracted from red, green and blue in 0 … 1", make=lambda: [0.485, 0.456, 0.406])
    std: list[float] = key("red, green and blue are divided by it", make=lambda: [0.229, 0.224, 0.225], above=0)
    flip: float = key("probability of mirroring an image", 0.5, least=0, most=1)
    randaugment_ops: int = key("operations of RandAugment per image", 0, least=0, most=16)
    randaugment_level: float = key("their mean strength, 0 to 10", 9.0, least=0, most=10)
    randaugment_deviation: float = key("standard deviation of the strength", 0.5, least=0)
    randaugment_probability: float = key("that an operation is applied", 0.5, least=0, most=1)
    erase: float = key("probability of filling a rectangle with noise", 0.0, least=0, most=1)
    mixup: float = key("α of mixup's Beta(α, α); 0 = no mixup", 0.0, least=0, most=1000)
    cutmix: float = key("α of cutmix; 0 = no cutmix; with both, each pair draws one", 0.0, least=0, most=1000)
    mix_probability: float = key("that a pair is mixed, where mixup or cutmix is on", 1.0, least=0, most=1)
    smoothing: float = key("of labels: the share of the target that goes to all classes alike", 0.0, least=0, below=1)
    repeats: int = key(
        "repeated augmentation: times that an epoch shows each image, close together", 1, above=0, most=100
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("crop_scale", "crop_ratio"):
            value = getattr(self, name)
            fits = len(value) == 2 and value[0] <= value[1]
            need(fits, f"data.images.{name} is {value}: give the smallest and the largest")
        for name in ("mean", "std"):
            value = getattr(self, name)
            need(len(value) == 3, f"data.images.{name} is {value}: give three numbers")
        both = f"data.images.hold_back is {self.hold_back} and validation is '{self.validation}'"
        need(not (self.hold_back and self.validation), f"{both}: give one of them")

    @property
    def mixes(self) -> bool:
        """Tell whether pairs of images are mixed: then a micro-batch is even."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class DataConfig(Section, section="data"):
    """Prepared sets, and the order in which their samples come."""

    path: str | dict[str, float] | None = key(
        "a set made by `tokenformer prepare` (or an official one), or a blend: {path: weight, …}; or images",
        None,
        above=0,
    )
    order: Literal["permutation", "official"] = key(
        "of the samples: a keyed permutation of each epoch, or the document, sample and shuffle order of GPT-NeoX",
        "permutation",
    )
    split: list[float] = key("shares of train, validation and test documents", make=lambda: [969.0, 30.0, 1.0], least=0)
    boundaries: bool = key("documents in one sample do not see each other (batches carry `documents`)", False)
    boundary_labels: Literal["next", "ignore"] = key(
        "with boundaries: what the end of a document predicts: the next document's first token, or nothing", "next"
    )
    tokenizer: str | None = key("name or path; absent = the one that the set was prepared with", None)
    verify: Verify = key(
        "on opening: quick = sizes and structure, full = all checksums too, auto = full for sets up to 4 GB", "auto"
    )
    workers: int = key(
        "threads (processes, where samples are decoded) that read ahead per rank; 0 = none", 2, least=0, most=1024
    )
    prefetch: int = key("micro-batches that are read ahead", 8, above=0, most=10**5)
    cache: str | None = key(
        "folder for the index of order official, of tar shards, and for unpacked Parquet; absent = beside the data",
        None,
    )
    images: ImagesConfig | None = key("of images: how they are read, cropped and augmented", None)

    @property
    def sets(self) -> dict[str, float]:
        """Return the paths of the sets, with their weights in the blend."""
        if isinstance(self.path, dict):
            return self.path
        return {self.path: 1.0} if self.path else {}

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 1 <= len(self.split) <= 3 and sum(self.split) > 0
        need(fits, f"data.split is {self.split}: give up to three shares (train, validation, test), as [969, 30, 1]")
