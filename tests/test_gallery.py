"""The gallery of examples/icons: two models are trained (here: hardly), and one page shows what they do."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from tests.serve.test_page import browser, wait  # noqa: F401 (a fixture)
from tokenformer.config import load
from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.pairs import open_pairs, pairs_of
from tokenformer.data.text.tokenizer import load_tokenizer

ICONS = Path(__file__).parents[1] / "examples" / "icons"
HARDLY = ["pair/icons:steps=1", "caption/icons:steps=1", "draw/icons:steps=1", "draw/icons:batch=8"]
HARDLY += [
    "pair/icons:batch=8",
    "draw/icons:data.images.size=8",
    "draw/icons:micro_batch=8",
    "pair/icons:micro_batch=8",
]
HARDLY += [f"{preset}:validation.samples=4" for preset in ("pair/icons", "caption/icons", "draw/icons")]


ALL = ICONS.parent / "all-icons"


@pytest.fixture(scope="module")
def gallery(tmp_path_factory) -> Path:
    spec = importlib.util.spec_from_file_location("gallery", ICONS / "gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = tmp_path_factory.mktemp("gallery")
    module.main([*HARDLY, "--out", str(out / "gallery.html"), "--runs", str(out / "runs")])
    sys.modules.pop("gallery", None)
    return out / "gallery.html"


def test_the_page_holds_everything_that_it_shows(gallery):
    text = gallery.read_text()
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text) and "fetch(" not in text
    facts = json.loads(re.search(r"const facts = (\{.*\});", text)[1])
    assert len(facts["icons"]) == 160 and facts["training"] == 120 and facts["parameters"] < 25e6
    assert len(facts["captions"]) == len(facts["drawings"]) == 40  # all that were held out
    assert [one["name"] for one in facts["captions"]] == [icon["name"] for icon in facts["icons"] if icon["held"]]
    assert all(0 <= one["nearest"] < 120 for one in facts["drawings"])
    assert {len(row) for row in [*facts["search"]["images"], *facts["search"]["words"].values()]} == {64}
    assert all(icon["image"].startswith("data:image/png;base64,") for icon in facts["icons"])


def test_all_icons_are_there_once_and_no_name_is_unknown(tmp_path, monkeypatch):
    """No name is in two parts, all differ in tokens, and the settings of the large models fit their presets."""
    images, names = ImagesConfig(caption_column="name"), {}
    for part in ("train", "validation", "test"):
        found = pairs_of(open_pairs(DataConfig(path=str(ALL), cache=str(tmp_path), images=images), part))
        names[part] = [found.captions(row)[0] for row in range(len(found))]
    every = [name for some in names.values() for name in some]
    assert [len(some) for some in names.values()] == [1571, 158, 182] and len(set(every)) == 1911
    tokenizer = load_tokenizer(str(ALL / "tokenizer.json"))
    ids = [tokenizer.encode(name) for name in every]
    assert len(set(map(tuple, ids))) == 1911 and tokenizer.encode("heart")[0] == tokenizer.encode("red heart")[-1]
    assert [tokenizer.decode(row).strip() for row in ids] == [name.lower() for name in every]
    monkeypatch.chdir(ALL.parents[1])
    for kind in ("pair", "caption", "draw"):
        config = load(f"{kind}/icons", ALL / f"{kind}.yml")
        assert load_tokenizer(config.data.tokenizer).vocab_size == tokenizer.vocab_size == 1024


@pytest.mark.browser
def test_in_a_browser_it_opens_search_answers_and_pictures_are_there(gallery, browser):  # noqa: F811
    browser.get(gallery.as_uri())
    pictures = wait(lambda: browser.find_elements("css selector", "#found img"))
    assert len(pictures) == 8
    before = browser.find_element("id", "found").text
    field = browser.find_element("id", "query")
    field.clear()
    field.send_keys("animal xyzzy")
    wait(lambda: browser.find_element("id", "found").text != before)
    assert "xyzzy" in browser.find_element("id", "unknown").text
    assert len(browser.find_elements("css selector", "#named figure")) == 40
    assert len(browser.find_elements("css selector", "#drawn figure")) == 40
    script = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    wait(lambda: browser.execute_script(script) == 0)
    assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
