"""Decoding: 300 images that are damaged or unusual, and crops that are where they should be."""

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data.images import pictures as p
from tokenformer.config_data import ImagesConfig
from tokenformer.data.images.decode import CROP_DRAWS, Cropping, Damaged, random_box
from tokenformer.data.images.drawing import generator

SIZE = 32
CROP = Cropping(SIZE, ImagesConfig(crop_pct=1.0))
FORMS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def both(item: bytes) -> list[np.ndarray]:
    """What evaluation and training see."""
    return [CROP.evaluation(item), CROP.training(item, generator("crop", len(item)).random(CROP_DRAWS))]


def refused(item: bytes) -> str:
    """The reason why both refuse it."""
    with pytest.raises(Damaged) as why:
        CROP.evaluation(item)
    with pytest.raises(Damaged):
        CROP.training(item, np.full(CROP_DRAWS, 0.5))
    return str(why.value)


def bomb_png(width: int, height: int) -> bytes:
    """A whole PNG of a few kilobytes that stands for as many pixels as it says."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def damaged_images() -> dict[str, bytes]:
    """200 images that cannot be shown: cut, of no known format, overwritten, too large."""
    found = {}
    for form in FORMS:
        whole = p.encoded(p.picture(1, 96, 80), form)
        for part in range(1, 21):
            found[f"{form} cut to {part}/21"] = whole[: len(whole) * part // 21]
        for n in range(5):
            found[f"{form} with another magic number {n}"] = bytes([n] * 4) + whole[4:]
    noise = np.random.default_rng(1)
    for n in range(20):
        found[f"noise {n}"] = noise.bytes(1 + n * 37)
    found |= {
        "nothing": b"",
        "text": b"<html>404 not found</html>",
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }
    found["a bomb"] = bomb_png(20_000, 20_000)
    found["a bomb that says less"] = bomb_png(10_001, 10_000)
    return found


def test_damaged_images_are_refused_with_a_reason():
    images = damaged_images()
    assert len(images) == 200
    for name, item in images.items():
        try:
            why = refused(item)
        except pytest.fail.Exception:
            pytest.fail(f"{name} was shown as if it were whole")
        assert why.startswith("it ") and "\n" not in why, (name, why)


def test_a_bomb_is_refused_before_memory_is_taken():
    """In a process of its own, whose largest size is then that of the refusal: the pixels would take 300 MB."""
    code = """
import resource, sys
from tests.data.images.test_decode import *
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = [refused(bomb_png(20_000, 20_000)), refused(bomb_png(10_001, 10_000))]
print(*said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, sep=chr(10))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second, megabytes = ran.stdout.splitlines()
    assert "more than the 100,000,000 pixels" in first and "10,001 × 10,000 pixels, more than the 100,000,000" in second
    assert int(megabytes) < 50


def unusual_images() -> dict[str, tuple[bytes, np.ndarray]]:
    """100 images that are whole, and the pixels that a person would see."""
    found = {}
    for n in range(10):
        square = p.picture(n, SIZE, SIZE)
        see = np.asarray(square)
        grey = np.asarray(square.convert("L"))
        found[f"grey {n}"] = p.encoded(square.convert("L"), "PNG"), np.repeat(grey[..., None], 3, 2)
        deep = Image.fromarray((grey.astype(np.uint16) << 8) + 77)
        found[f"16 bit {n}"] = p.encoded(deep, "PNG"), np.repeat(grey[..., None], 3, 2)
        alpha = square.convert("RGBA")
        alpha.paste((9, 9, 9, 0), (0, 0, SIZE, SIZE // 2))
        white = see.copy()
        white[: SIZE // 2] = 255
        found[f"alpha {n}"] = p.encoded(alpha, "PNG"), white
        palette = square.convert("1").convert("P")
        found[f"transparent black {n}"] = p.encoded(palette, "PNG", transparency=0), np.full_like(see, 255)
        black = Image.new("RGB", square.size)
        found[f"animated {n}"] = p.encoded(square, "WEBP", lossless=True, save_all=True, append_images=[black]), see
        cyan = square.convert("CMYK")
        found[f"CMYK {n}"] = p.encoded(cyan, "TIFF"), np.asarray(cyan.convert("RGB"))
        dot = Image.new("RGB", (1, 1), (n, 20 * n, 7))
        found[f"1 x 1 {n}"] = p.encoded(dot, "PNG"), np.full_like(see, 0) + np.array([n, 20 * n, 7], np.uint8)
        exif = Image.Exif()
        exif[0x0112] = n % 8 + 1
        turned = p.encoded(square, "PNG", exif=exif)
        found[f"turned {n}"] = turned, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(turned))))
        found[f"broken EXIF {n}"] = p.encoded(square, "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"), see
        found[f"a bit deep {n}"] = p.encoded(square.convert("1"), "PNG"), np.asarray(square.convert("1").convert("RGB"))
    return found


def test_unusual_images_are_seen_as_a_person_sees_them():
    images = unusual_images()
    assert len(images) == 100
    for name, (item, see) in images.items():
        assert np.array_equal(CROP.evaluation(item), see), name
        whole = Cropping(SIZE, ImagesConfig(crop_scale=[1.0, 1.0], crop_ratio=[1.0, 1.0]))
        assert np.array_equal(whole.training(item, np.full(CROP_DRAWS, 0.5)), see), name


def test_jpeg_files_of_cameras_and_printers():
    square = p.picture(3, 64, 64)
    cmyk = p.encoded(square.convert("CMYK"), "JPEG", quality=95)
    want = np.asarray(square.convert("CMYK").convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    assert np.abs(CROP.evaluation(cmyk).astype(int) - want).mean() < 3
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = p.encoded(square.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=exif)
    upright = p.encoded(square, "JPEG", quality=95)
    for ours, theirs in zip(both(turned)[:1], both(upright)[:1], strict=True):
        assert np.abs(ours.astype(int) - theirs).mean() < 3
    assert "floating point" in refused(p.encoded(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"))
    assert "64 times as long" in str(refused_evaluation(p.encoded(Image.new("RGB", (9000, 2)), "PNG")))


def refused_evaluation(item: bytes) -> Damaged:
    with pytest.raises(Damaged) as why:
        CROP.evaluation(item)
    return why.value


@pytest.mark.parametrize("width, height", [(300, 200), (200, 301), (57, 57), (16, 90)])
def test_evaluation_resizes_the_shorter_side_and_takes_the_centre(width, height):
    picture = p.picture(5, width, height)
    scaled = int(224 / 0.875)
    size = (scaled, int(scaled * height / width)) if width <= height else (int(scaled * width / height), scaled)
    left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
    want = picture.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224))
    assert np.array_equal(Cropping(224, ImagesConfig()).evaluation(p.encoded(picture, "PNG")), np.asarray(want))


def test_random_boxes_have_the_areas_and_ratios_that_were_asked_for():
    settings = ImagesConfig(crop_scale=[0.2, 0.5], crop_ratio=[0.5, 2.0])
    boxes = np.array([random_box(400, 300, generator("box", n).random(CROP_DRAWS), settings) for n in range(500)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, ratio = width * height / 120_000, width / height
    assert (
        0.19 < area.min() < 0.22 and 0.48 < area.max() < 0.51 and 0.49 < ratio.min() < 0.6 and 1.7 < ratio.max() < 2.01
    )
    assert boxes.min() == 0 and boxes[:, 2].max() == 400 and boxes[:, 3].max() == 300
    assert abs(np.median(boxes[:, 0] / (400 - width + 1e-9)) - 0.5) < 0.06
    assert random_box(1000, 10, np.full(CROP_DRAWS, 0.9), ImagesConfig()) == (493, 0, 506, 10)


def test_a_large_jpeg_is_decoded_small_and_looks_the_same():
    """A corner of a large photograph: decoding at an eighth gives what decoding it whole gives, but for the filter."""
    large = p.picture(2, 1600, 1200)
    draws = np.full(CROP_DRAWS, 0.3)
    small, whole = (CROP.training(p.encoded(large, form), draws).astype(int) for form in ("JPEG", "PNG"))
    assert np.abs(small - whole).mean() < 2
    box = random_box(1600, 1200, draws, CROP.settings)
    with Image.open(io.BytesIO(p.encoded(large))) as image:
        image.draft(None, (200, 150))
        assert image.size == (200, 150) and min(box[2] - box[0], box[3] - box[1]) / SIZE > 8  # so draft mode was used


def test_a_padded_crop_moves_the_image_and_leaves_black():
    crop = Cropping(32, ImagesConfig(crop="padded", padding=4))
    for top, left in ((0.0, 0.0), (0.999, 0.5)):
        draws = np.zeros(CROP_DRAWS)
        draws[0, 2:] = top, left
        y, x = int(top * 9), int(left * 9)
        want = np.pad(p.small(3), ((4, 4), (4, 4), (0, 0)))[y : y + 32, x : x + 32]
        assert np.array_equal(crop.training(p.small(3), draws), want)


def kinds_of_files() -> dict[str, bytes]:
    """A file of each kind that decoders treat by themselves."""
    square = p.picture(4, 60, 44)
    grey = square.convert("L")
    alpha = square.copy()
    alpha.putalpha(grey)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    palette = square.quantize(16)
    exif = Image.Exif()
    exif[0x0112] = 6
    images = {"RGB": square, "grey": grey, "16 bit": deep, "RGBA": alpha, "palette": palette}
    found = {f"PNG {name}": p.encoded(image, "PNG") for name, image in images.items()}
    found["PNG transparent palette"] = p.encoded(palette, "PNG", transparency=3)
    found["PNG with EXIF"] = p.encoded(square, "PNG", exif=exif)
    found |= {"JPEG": p.encoded(square), "JPEG progressive": p.encoded(square, "JPEG", progressive=True)}
    found |= {"JPEG CMYK": p.encoded(square.convert("CMYK")), "JPEG with EXIF": p.encoded(square, exif=exif)}
    found |= {"WEBP": p.encoded(square, "WEBP"), "WEBP lossless": p.encoded(alpha, "WEBP", lossless=True)}
    found |= {
        "GIF": p.encoded(palette, "GIF"),
        "BMP": p.encoded(square, "BMP"),
        "BMP palette": p.encoded(palette, "BMP"),
    }
    ways = (None, "tiff_deflate", "tiff_lzw", "packbits", "jpeg")
    found |= {f"TIFF {way}": p.encoded(square, "TIFF", compression=way) for way in ways}
    return found | {"TIFF 16 bit": p.encoded(deep, "TIFF"), "TIFF with EXIF": p.encoded(square, "TIFF", exif=exif)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", kinds_of_files())
def test_what_pillow_refuses_to_load_is_damaged(kind):
    """Four bytes are overwritten, at 150 places of each file."""
    whole, random, refusals = kinds_of_files()[kind], np.random.default_rng(7), 0
    both(whole)
    for place in random.integers(8, len(whole) - 4, 150).tolist():
        item = whole[:place] + random.bytes(4) + whole[place + 4 :]
        try:
            with Image.open(io.BytesIO(item), formats=FORMS) as image:
                image.load()
        except Exception:
            refusals += 1
            refused(item)
    assert refusals or not kind.startswith("PNG")


def test_orientation_is_applied_once():
    """Pillow turns a TIFF by itself while it loads it."""
    square, exif = p.picture(4, SIZE, SIZE), Image.Exif()
    whole = Cropping(SIZE, ImagesConfig(crop_scale=[1.0, 1.0], crop_ratio=[1.0, 1.0]))
    for turn in range(1, 9):
        exif[0x0112] = turn
        want = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(p.encoded(square, "PNG", exif=exif)))))
        for form in ("PNG", "TIFF"):
            item = p.encoded(square, form, exif=exif)
            assert np.array_equal(CROP.evaluation(item), want), (form, turn)
            assert np.array_equal(whole.training(item, np.full(CROP_DRAWS, 0.5)), want), (form, turn)
