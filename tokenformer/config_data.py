"""What can be configured about data: the keys of the section `data`."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from tokenformer.strict import key, need

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
class ImagesConfig:
    """Images: where they are, how they are cropped, and how they are augmented in training."""

    format: Literal["auto", "folder", "tar", "parquet", "cifar", "mnist"] = key(
        "of data.path: a folder per class inside train/ and val/; webdataset shards (`train-{000..146}.tar`); Parquet; "
        "the binary files of CIFAR-10 or CIFAR-100; those of MNIST",
        "auto",
    )
    validation: str | None = key("path of the images to validate on; absent = the val/ or test part of data.path", None)
    hold_back: int = key(
        "training images that are kept out of training and validated on instead; the data alone decide which", 0
    )
    classes: str | None = key("file with a class name per line; absent = the names that the data have", None)
    image_column: str = key("of Parquet", "image")
    label_column: str = key("of Parquet", "label")
    damaged: Literal["refuse", "skip"] = key(
        "what is done about an image that cannot be decoded: stop and name it, or count it and take another", "refuse"
    )
    size: int | None = key("height and width of what the model sees; absent = the model's own", None, most=4096)
    crop: Literal["resized", "padded", "centre"] = key(
        "in training: a random part of the image, resized; the image with a black border, cut at a random place; as in "
        "evaluation",
        "resized",
    )
    crop_scale: list[float] = key("resized: smallest and largest share of the area", make=lambda: [0.08, 1.0])
    crop_ratio: list[float] = key("resized: smallest and largest width over height", make=lambda: [3 / 4, 4 / 3])
    padding: int = key("padded: pixels of the border", 4, most=4096)
    crop_pct: float = key("in evaluation: share of the shorter side that the square in the centre takes", 0.875)
    interpolation: Literal["bicubic", "bilinear"] = key("of resizing", "bicubic")
    mean: list[float] = key("subtracted from red, green and blue in 0 … 1", make=lambda: [0.485, 0.456, 0.406])
    std: list[float] = key("red, green and blue are divided by it", make=lambda: [0.229, 0.224, 0.225])
    flip: float = key("probability of mirroring an image", 0.5)
    randaugment_ops: int = key("operations of RandAugment per image", 0, most=16)
    randaugment_level: float = key("their mean strength, 0 to 10", 9.0)
    randaugment_deviation: float = key("standard deviation of the strength", 0.5)
    randaugment_probability: float = key("that an operation is applied", 0.5)
    erase: float = key("probability of filling a rectangle with noise", 0.0)
    mixup: float = key("α of mixup's Beta(α, α); 0 = no mixup", 0.0, most=1000)
    cutmix: float = key("α of cutmix; 0 = no cutmix; with both, each pair draws one", 0.0, most=1000)
    mix_probability: float = key("that a pair is mixed, where mixup or cutmix is on", 1.0)
    smoothing: float = key("of labels: the share of the target that goes to all classes alike", 0.0)
    repeats: int = key("repeated augmentation: times that an epoch shows each image, close together", 1, most=100)

    def __post_init__(self) -> None:
        at = "data.images"
        _check_choices(self, at)
        for name in ("flip", "randaugment_probability", "erase", "mix_probability"):
            value = getattr(self, name)
            need(0 <= value <= 1, f"{at}.{name} is {value}: give a probability, 0 to 1")
        for name in ("mixup", "cutmix", "randaugment_deviation", "randaugment_ops", "padding", "hold_back"):
            value = getattr(self, name)
            need(value >= 0, f"{at}.{name} is {value}: give 0 or more")
        need(0 <= self.smoothing < 1, f"{at}.smoothing is {self.smoothing}: give a share below 1")
        need(0 <= self.randaugment_level <= 10, f"{at}.randaugment_level is {self.randaugment_level}: give 0 to 10")
        need(0 < self.crop_pct <= 1, f"{at}.crop_pct is {self.crop_pct}: give a share above 0 and up to 1")
        need(self.size is None or self.size > 0, f"{at}.size is {self.size}: give a number above 0")
        need(self.repeats > 0, f"{at}.repeats is {self.repeats}: give a number above 0")
        for name, most in (("crop_scale", 1.0), ("crop_ratio", 100.0)):
            value = getattr(self, name)
            fits = len(value) == 2 and 0 < value[0] <= value[1] <= most
            need(fits, f"{at}.{name} is {value}: give the smallest and the largest, above 0 and up to {most:g}")
        for name, least in (("mean", float("-inf")), ("std", 0.0)):
            value = getattr(self, name)
            fits = len(value) == 3 and all(least < number < float("inf") for number in value)
            need(fits, f"{at}.{name} is {value}: give three numbers{' above 0' * (name == 'std')}")

    @property
    def mixes(self) -> bool:
        """Whether pairs of images are mixed: then a micro-batch is even."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class DataConfig:
    """Prepared sets, and the order in which their samples come."""

    path: str | dict[str, float] | None = key(
        "a set made by `tokenformer prepare` (or an official one), or a blend: {path: weight, …}", None
    )
    order: Literal["permutation", "official"] = key(
        "of the samples: a stateless permutation of each epoch, or the document, sample and shuffle order of GPT-NeoX",
        "permutation",
    )
    split: list[float] = key("shares of train, validation and test, by documents", make=lambda: [969.0, 30.0, 1.0])
    boundaries: bool = key("documents in one sample do not see each other (batches carry `documents`)", False)
    boundary_labels: Literal["next", "ignore"] = key(
        "with boundaries: what the end of a document is to predict: the next document's first token, or nothing", "next"
    )
    tokenizer: str | None = key("name or path; absent = the one that the set was prepared with", None)
    verify: Verify = key(
        "on opening: quick = sizes and structure, full = all checksums too, auto = full for sets up to 4 GB", "auto"
    )
    workers: int = key(
        "threads (processes, where samples are decoded) that read ahead on each rank; 0 reads alone", 2, most=1024
    )
    prefetch: int = key("micro-batches that are read ahead", 8, most=10**5)
    cache: str | None = key(
        "folder for the index of order official, of tar shards, and for unpacked Parquet; absent = beside the data",
        None,
    )
    images: ImagesConfig | None = key("of images: how they are read, cropped and augmented", None)

    @property
    def sets(self) -> dict[str, float]:
        """Paths of the sets, with their weights in the blend."""
        if isinstance(self.path, dict):
            return self.path
        return {self.path: 1.0} if self.path else {}

    def __post_init__(self) -> None:
        for name, weight in self.sets.items():
            need(0 < weight < float("inf"), f"data.path gives {name} the weight {weight}: give a number above 0")
        _check_choices(self, "data")
        shares = self.split
        fits = 1 <= len(shares) <= 3 and min(shares, default=-1) >= 0 and 0 < sum(shares) < float("inf")
        need(fits, f"data.split is {shares}: give up to three shares (train, validation, test), such as [969, 30, 1]")
        need(self.workers >= 0, f"data.workers is {self.workers}: give 0 or more")
        need(self.prefetch > 0, f"data.prefetch is {self.prefetch}: give a number above 0")


def _check_choices(config: "DataConfig | ImagesConfig", at: str) -> None:
    """Refuse what is none of the words that a key knows. YAML is checked before; this is for Python."""
    for field in fields(config):
        choices = get_args(field.type) if get_origin(field.type) is Literal else ()
        value = getattr(config, field.name)
        need(not choices or value in choices, f"{at}.{field.name} is '{value}', not one of {', '.join(choices)}")
