"""The keys of data.images: every number has its bounds, and a mistake is one sentence before anything is opened."""

import pytest

from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.errors import UserError
from tokenformer.strict import build, to_dict

RECIPE = {"randaugment_ops": 2, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1, "erase": 0.25, "repeats": 3}


def test_keys_are_read_and_written_back():
    data = build(DataConfig, {"path": "photos", "images": {"size": 224, **RECIPE}})
    assert data.images == ImagesConfig(size=224, **RECIPE) and data.images.mixes
    assert build(DataConfig, to_dict(data)) == data
    assert build(DataConfig, {"path": "text"}).images is None and not ImagesConfig().mixes


@pytest.mark.parametrize(
    "key, value",
    [
        *[(key, value) for key in ("flip", "erase", "mix_probability") for value in (-0.1, 1.1, float("nan"))],
        *[("smoothing", 1.0), ("crop_pct", 0.0), ("crop_pct", 1.1), ("mixup", -1.0), ("cutmix", 1e9), ("size", 0)],
        *[("size", 10**6), ("repeats", 0), ("randaugment_ops", -1), ("randaugment_level", 11.0), ("padding", -1)],
        *[("crop_scale", [0.5]), ("crop_scale", [0.5, 0.1]), ("crop_scale", [0.0, 1.0]), ("crop_ratio", [2.0, 1.0])],
        *[("mean", [0.5]), ("std", [0.5, 0.5, 0.0]), ("hold_back", -1), ("damaged", "ignore"), ("crop", "center")],
        *[("format", "zip"), ("flip", "often"), ("flipp", 0.5)],
    ],
)
def test_a_mistake_is_one_sentence(key, value):
    with pytest.raises(UserError, match=f"data.images.{key}") as why:
        build(DataConfig, {"images": {key: value}}, "data")
    assert "\n" not in str(why.value)
