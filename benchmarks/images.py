"""Decoding and cropping: images per second of one core and of several processes, against plain Pillow in a DataLoader.

  python benchmarks/images.py [--count 200] [--seconds 4] [--workers 2]

The images are made: noise with the spectrum of photographs, JPEG files of 500 × 375 pixels with some 110 kB, as in
ImageNet, and of 2000 × 1500 as cameras make them. They are in the page cache: this is the decoder's cost, not the
disk's. One core is measured in its own CPU time, so that what else runs on the machine does not count.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.decode import CROP_DRAWS, random_box
from tokenformer.data.images.opening import open_images
from tokenformer.data.images.samples import image_loader

SIZE, BATCH = 224, 32
SETTINGS = ImagesConfig(randaugment_ops=2, mixup=0.8, cutmix=1.0)
SHAPES = {"500 x 375": (375, 500, 92), "2000 x 1500": (1500, 2000, 85)}  # height, width, quality


def photograph(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Noise whose amplitude falls with the frequency, as that of photographs does."""
    noise = np.fft.rfft2(rng.normal(size=(3, height, width)))
    distance = np.hypot(np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None] * width)
    pixels = np.fft.irfft2(noise / np.maximum(distance, 1), (height, width))
    return Image.fromarray((128 + 50 * pixels / pixels.std()).clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def make_set(root: Path, shape: str, count: int) -> None:
    height, width, quality = SHAPES[shape]
    rng = np.random.default_rng(0)
    for n in range(count):
        path = root / "train" / f"class{n % 10}" / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(rng, height, width).save(path, quality=quality)


class Plain(torch.utils.data.Dataset):
    """What one would write by hand: open, convert, crop at random, resize, a tensor."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.rglob("*.jpg"))

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, i: int) -> torch.Tensor:
        with Image.open(self.paths[i % len(self.paths)]) as file:
            image = file.convert("RGB")
        box = random_box(*image.size, np.random.default_rng(i).random(CROP_DRAWS), SETTINGS)
        cropped = image.crop(tuple(map(int, box))).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(cropped))


def rate(batches: Iterator, seconds: float, clock) -> float:
    """Images per second of `clock`, from the third batch on."""
    for _ in range(2):
        next(batches)
    count, start = 0, clock()
    while clock() - start < seconds:
        next(batches)
        count += BATCH
    return count / (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    command = ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    torch.set_num_threads(1)
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            make_set(Path(folder), shape, args.count if shape == "500 x 375" else args.count // 8)
            size = np.mean([path.stat().st_size for path in Path(folder).rglob("*.jpg")])
            for workers, clock in ((0, time.process_time), (args.workers, time.perf_counter)):
                data = DataConfig(path=folder, workers=workers, images=SETTINGS)
                images = open_images(data, "train")
                ours = iter(image_loader(data, images, size=SIZE, seed=0, training=True, batch=BATCH))
                value = rate(ours, args.seconds, clock)
                ours.close()
                theirs = iter(torch.utils.data.DataLoader(Plain(Path(folder)), BATCH, num_workers=workers))
                rival = rate(theirs, args.seconds, clock)
                del theirs
                where = "one core, CPU time" if workers == 0 else f"{workers} processes"
                line = {"name": "images", "model": f"{shape} to {SIZE}, {where}", "value": round(value, 1)}
                line |= {"unit": "images/s", "rival": "torch DataLoader, Pillow", "rival_value": round(rival, 1)}
                line |= {"ratio": round(value / rival, 2), "kB_per_image": round(size / 1e3)}
                line |= {"device": f"{platform.machine()}, {os.cpu_count()} cores", "commit": commit}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
