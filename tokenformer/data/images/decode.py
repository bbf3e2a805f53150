"""From an image file to the square of pixels that a model sees.

Unusual: size and format are looked at before memory is taken. A JPEG of training is decoded at a half, a quarter or an
eighth of its size where the crop needs no more. Images are turned upright, and transparent ones laid on white.
"""

import io
import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from tokenformer.config_data import ImagesConfig
from tokenformer.errors import UserError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # others may start programs (EPS) or are rarely read
MOST_PIXELS = 100_000_000
MOST_BYTES = 1 << 28
CROP_DRAWS = (10, 4)  # tries of a random crop: area, ratio, top, left
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")


class Damaged(Exception):
    """An image that cannot be decoded, and why."""


class Cropping(NamedTuple):
    """How an image becomes a square."""

    size: int
    settings: ImagesConfig

    def evaluation(self, item: bytes | np.ndarray) -> np.ndarray:
        """Return the centre: the shorter side is resized to size / crop_pct, as torchvision and timm do it.

        Of an odd number of pixels that are cut off, the larger half is on the right and below, as transformers does it
        with exported models; torchvision and timm round, so that their centre may lie one pixel further.
        """
        return _guarded(item, self._centre)

    def training(self, item: bytes | np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return the crop that `draws` (CROP_DRAWS numbers in 0 … 1) decide."""
        make = {"resized": self._resized, "padded": self._padded, "centre": self._centre}[self.settings.crop]
        return _guarded(item, lambda image: make(image, draws))

    @property
    def _filter(self) -> Any:
        from PIL import Image

        return {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[self.settings.interpolation]

    def _centre(self, image: Any, draws: np.ndarray | None = None) -> Any:
        upright = _upright(image)
        target = resized_to(self.size, self.settings.crop_pct)
        short, long = sorted(upright.size)
        longer = int(target * long / short)
        if longer > 64 * target:
            raise Damaged(f"it is {upright.width:,} × {upright.height:,} pixels, more than 64 times as long as wide")
        width, height = (target, longer) if upright.width <= upright.height else (longer, target)
        if upright.size != (width, height):
            upright = upright.resize((width, height), self._filter)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return upright.crop((left, top, left + self.size, top + self.size))

    def _resized(self, image: Any, draws: np.ndarray) -> Any:
        if image.format != "JPEG":  # which alone can be decoded smaller, and whose EXIF is known before
            image.load()
        width, height = image.size[::-1] if _orientation(image) >= 5 else image.size
        box = random_box(width, height, draws, self.settings)
        shrink = min(box[2] - box[0], box[3] - box[1]) / self.size
        by = next((n for n in (8, 4, 2) if n <= shrink), 1)
        if by > 1 and image.format == "JPEG":
            before = image.size
            image.draft(None, tuple(-(-side // by) for side in before))
            by = round(before[0] / image.size[0])
            box = tuple(place / by for place in box)
        upright = _upright(image)
        box = (box[0], box[1], min(box[2], upright.width), min(box[3], upright.height))
        return upright.resize((self.size, self.size), self._filter, box)

    def _padded(self, image: Any, draws: np.ndarray) -> Any:
        upright, pad = _upright(image), self.settings.padding
        if upright.size != (self.size, self.size):
            upright = upright.resize((self.size, self.size), self._filter)
        top, left = (int(n * (2 * pad + 1)) - pad for n in draws[0, 2:].tolist())
        return upright.crop((left, top, left + self.size, top + self.size))  # what lies outside is black


def resized_to(size: int, crop_pct: float) -> int:
    """Return what the shorter side of an image is resized to before the centre is cut out.

    >>> resized_to(224, 0.9), resized_to(224, 224 / 248)
    (248, 248)
    """
    return max(size, math.floor(size / crop_pct + 1e-6))


def random_box(width: int, height: int, draws: np.ndarray, settings: ImagesConfig) -> tuple[float, ...]:
    """Return left, top, right and bottom of a crop of random area and ratio; of the centre where ten tries do not fit.

    >>> random_box(100, 60, np.full(CROP_DRAWS, 0.5), ImagesConfig())
    (22, 2, 79, 59)
    """
    (least, most), ratios = settings.crop_scale, settings.crop_ratio
    low, high = (math.log(ratio) for ratio in ratios)
    for area, ratio, top, left in draws.tolist():
        area = width * height * (least + (most - least) * area)
        ratio = math.exp(low + (high - low) * ratio)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    w = min(width, max(1, round(height * ratios[1])))
    h = min(height, max(1, round(width / ratios[0])))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def need_pillow() -> None:
    """Refuse where Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("images need Pillow: pip install 'tokenformer[vision]'") from None


def written(text: str, width: int, height: int) -> np.ndarray:
    """Return a picture of a text on white (height, width, 3), broken into lines."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), "white")
    pen, lines = ImageDraw.Draw(image), [""]
    for word in text.encode("latin-1", "replace").decode("latin-1").split():  # the letters that the font has
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if pen.textlength(longer) <= width - 8 or not lines[-1] else [*lines, word]
    pen.multiline_text((4, 4), "\n".join(lines), fill="black")
    return np.asarray(image)


def png(pixels: np.ndarray) -> bytes:
    """Return pixels (height, width, 3) as a PNG file."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _guarded(item: bytes | np.ndarray, make: Any) -> np.ndarray:
    """Return the pixels that `make` gives; whatever a decoder stumbles over says that the image is damaged."""
    from PIL import Image

    if isinstance(item, np.ndarray):
        return np.asarray(make(Image.fromarray(item)))
    if len(item) > MOST_BYTES:
        raise Damaged(f"it has {len(item):,} bytes, more than the {MOST_BYTES:,} that are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked here, and a strange EXIF block is no damage
            with Image.open(io.BytesIO(item), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise Damaged(
                        f"it is {width:,} × {height:,} pixels, more than the {MOST_PIXELS:,} that are decoded"
                    )
                return np.asarray(make(image))
    except (Damaged, MemoryError):
        raise
    except Image.DecompressionBombError:  # Pillow's own limit, twice as high
        raise Damaged(f"it has more than the {MOST_PIXELS:,} pixels that are decoded") from None
    except Image.UnidentifiedImageError:
        raise Damaged(f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file") from None
    except Exception as error:  # decoders raise nearly every kind for files that are not what they say
        raise Damaged(f"it cannot be decoded ({error or type(error).__name__})") from None


def _orientation(image: Any) -> int:
    """Return what EXIF says. Of a PNG and a TIFF it is known when they are loaded: Pillow's `getexif` would load a PNG
    itself, and an error of its pixels would be taken for one of EXIF; a TIFF is turned while it is loaded.
    """
    try:
        return image.getexif().get(0x0112, 1) if image.format else 1
    except Exception:  # a broken EXIF block is no broken image
        return 1


def _upright(image: Any) -> Any:
    """Return the image with its pixels decoded, as RGB, the way up that EXIF says."""
    from PIL import Image

    image.load()
    turn = _orientation(image)
    if image.mode in _SIXTEEN_BIT:  # Pillow would cut them off at 255
        levels = np.asarray(image)
        if levels.min() < 0 or levels.max() > 65535:
            raise Damaged("its pixels have more than 16 bits")
        image = Image.fromarray((levels.astype(np.uint32) >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise Damaged("its pixels are floating point numbers, whose range is not known")
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    ways = Image.Transpose
    turned = {
        **{2: ways.FLIP_LEFT_RIGHT, 3: ways.ROTATE_180, 4: ways.FLIP_TOP_BOTTOM, 5: ways.TRANSPOSE},
        **{6: ways.ROTATE_270, 7: ways.TRANSVERSE, 8: ways.ROTATE_90},
    }.get(turn)
    return image if turned is None else image.transpose(turned)
