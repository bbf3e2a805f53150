"""A pair on the command line: recall, classes by their names, features in a file, images found by texts."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.models.test_pair import pair
from tokenformer import load, save
from tokenformer.cli.main import main
from tokenformer.config_data import ImagesConfig
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.eval.images import answers, read_class_index, summary
from tokenformer.eval.pairs import read_lines
from tokenformer.models import build

ICONS = Path(__file__).parents[2] / "examples" / "icons"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A pair of bytes with random weights, which are larger than at first: it tells images and texts apart."""
    model = build(pair(text={"vocab": 384, "context": 24}), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim else 1)
    model.images = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0, "interpolation": "bicubic"}
    path = tmp_path_factory.mktemp("pair") / "model"
    save(model, path, tokenizer_json=ByteTokenizer().to_json())
    return path


def features(folder: Path, images: list[Path] = (), texts: list[str] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Computed one by one, without our readers: resized by Pillow, bytes + 1, an end token 0."""
    model, found = load(folder), []
    for path in images:
        picture = Image.open(path).convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
        pixels = np.asarray(picture.resize((16, 16), Image.Resampling.BICUBIC)).copy()
        found.append((torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5)
    ids = [torch.tensor([[*(b + 1 for b in text.encode()[:23]), 0]]) for text in texts]
    with torch.no_grad():
        return (
            torch.cat([model.encode_image(x) for x in found]) if found else torch.empty(0),
            torch.cat([model.encode_text(x) for x in ids]) if ids else torch.empty(0),
        )


class Alike:
    """An image set of equal grey squares with these labels."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels, self.classes, self.fingerprint = labels, list("abcdefg"), "grey"

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, index: int) -> np.ndarray:
        return np.full((8, 8, 3), 128, np.uint8)

    def name(self, index: int) -> str:
        return str(index)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w") as tar:
        for name, data in sorted(members.items()):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))


def test_recall_of_a_webdataset_as_clip_benchmark_lays_it_out(folder, tmp_path, capsys):
    """test/0.tar with several captions in a text; the figures are counted here by hand, a damaged image apart."""
    names = ["food/avocado", "food/bagel", "animals/fox", "animals/owl"]
    captions = [["avocado", "green"], ["bagel"], ["fox", "face", "red"], ["owl"]]
    members = {"9.png": b"no image", "9.txt": b"nothing"}
    for number, (name, texts) in enumerate(zip(names, captions, strict=True)):
        members |= {f"{number}.png": (ICONS / "train" / f"{name}.png").read_bytes()}
        members |= {f"{number}.txt": "\n".join(texts).encode()}
    write_tar(tmp_path / "test" / "0.tar", members)
    out = tmp_path / "out.json"
    assert main(["eval", str(folder), "--pairs", str(tmp_path), "--out", str(out)]) == 2
    said, found = capsys.readouterr(), json.loads(out.read_text())
    assert "9.png in" in said.err and "is damaged" in said.err and "texts that find their image" in said.out
    assert found["images"] == 4 and found["captions"] == 7 and found["damaged"] == 1 and found["part"] == "validation"
    images, texts = features(
        folder, [ICONS / "train" / f"{n}.png" for n in names], [text for some in captions for text in some]
    )
    scores, owner = (images @ texts.T).tolist(), [0, 0, 1, 2, 2, 2, 3]
    best = [max(range(7), key=lambda text: row[text]) for row in scores]
    assert found["image_to_text_r1"] == sum(owner[text] == image for image, text in enumerate(best)) / 4
    best = [max(range(4), key=lambda image: scores[image][text]) for text in range(7)]
    assert found["text_to_image_r1"] == pytest.approx(sum(o == image for o, image in zip(owner, best, strict=True)) / 7)
    assert found["chance"]["text_to_image_r1"] == 0.25 and found["text_to_image_r5"] == 1.0


def test_equal_captions_tie_and_are_counted(folder, tmp_path, capsys):
    """A caption of several images is no way to find one's own text first, whatever batch and padding it is in."""
    icons = sorted((ICONS / "train" / "food").glob("*.png"))[:24]
    images, texts = features(folder, icons, names := ["tea", "green", "a red fruit", "bread and butter"])
    own = [names[i] for i in (images @ texts.T).argmax(1)]  # each image has the text that it likes best
    lines = [f"{icon},{text}" for icon, text in zip(icons, own, strict=True)]
    lines.insert(12, f"{icons[12]},this one is long enough")  # pads those beside it
    (tmp_path / "val.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
    out = tmp_path / "out.json"
    assert main(["eval", str(folder), "--pairs", str(tmp_path), "--batch", "5", "--out", str(out)]) == 0
    found, shared = json.loads(out.read_text()), sum(own.count(text) > 1 for text in own)
    assert f"{shared} captions belong to several images" in capsys.readouterr().out and shared > 20
    assert found["shared"] == shared and found["image_to_text_r1"] == pytest.approx((24 - shared) / 24)


def test_of_classes_with_equal_scores_the_first_is_taken():
    """By hand: three classes, of which two are called the same; and seven that are all alike."""
    labels = np.array([0, 1, 2, 6])
    logits = torch.tensor([[1.0, 3, 3, 0, 0, 0, 0], [1, 3, 3, 0, 0, 0, 0], [1, 3, 3, 0, 0, 0, 0], [2.0] * 7])

    def model(x):
        return logits[: len(x)]

    model.parameters = lambda: iter([logits])
    images = Alike(labels)
    found = answers(model, images, ImagesConfig(), 8, 4, lambda _: None)
    assert [answer.likeliest for answer in found] == [1, 1, 1, 0]
    assert [answer.among_five for answer in found] == [True, True, True, False]
    assert summary(found, list("abcdefg"))["top1"] == 0.25


def test_zero_shot_averages_templates_and_makes_them_a_unit(folder, tmp_path, capsys):
    (tmp_path / "templates.txt").write_text("a {}.\n\nthe {c} here\n")
    for name in ("fox", "owl", "bagel"):
        group = "food" if name == "bagel" else "animals"
        (tmp_path / "data" / group).mkdir(parents=True, exist_ok=True)
        shutil.copy(ICONS / "train" / group / f"{name}.png", tmp_path / "data" / group)
    out = tmp_path / "out.json"
    words = ["eval", str(folder), "--images", str(tmp_path / "data"), "--templates", str(tmp_path / "templates.txt")]
    assert main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    paths = [tmp_path / "data" / name for name in ("animals/fox.png", "animals/owl.png", "food/bagel.png")]
    images, texts = features(folder, paths, ["a animals.", "the animals here", "a food.", "the food here"])
    classes = torch.stack([texts[:2].mean(0), texts[2:].mean(0)])
    classes = classes / classes.norm(dim=1, keepdim=True)
    logits = load(folder).scale.exp() * images @ classes.T
    labels = torch.tensor([0, 0, 1])
    assert found["top1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-3)
    assert found["templates"] == ["a {}.", "the {c} here"] and found["chance"] == 0.5
    (tmp_path / "bad.txt").write_text("a photo\n")
    assert main([*words[:-1], str(tmp_path / "bad.txt")]) == 2
    assert "has a line without {}" in capsys.readouterr().err


def test_names_and_templates_lie_beside_the_data_or_in_the_package(folder, tmp_path, capsys):
    """As clip-benchmark lays a set of classes out; then without its files, with the names and templates of CIFAR."""
    labels = {"fox": 0, "owl": 2, "beaver": 2}
    members = {f"{n}.cls": str(label).encode() for n, label in labels.items()}
    members |= {f"{name}.png": (ICONS / "train" / "animals" / f"{name}.png").read_bytes() for name in labels}
    write_tar(tmp_path / "data" / "test" / "0.tar", members)
    (tmp_path / "data" / "test" / "nshards.txt").write_text("1\n")
    beside = {"classnames.txt": "fox\nox\nsea_bird\n", "zeroshot_classification_templates.txt": "a {c}.\nthe {c}\n"}
    for name, text in beside.items():
        (tmp_path / "data" / name).write_text(text)

    def measured(*words: str) -> dict:
        out = tmp_path / "out.json"
        assert (
            main(["eval", str(folder), "--images", str(tmp_path / "data"), *words, "--out", str(out), "--force"]) == 0
        )
        return json.loads(out.read_text())

    def expected(names: list[str], templates: list[str]) -> float:
        paths = [ICONS / "train" / "animals" / f"{name}.png" for name in sorted(labels)]
        texts = [template.replace("{}", name) for name in names for template in templates]
        images, texts = features(folder, paths, texts)
        classes = torch.nn.functional.normalize(texts.unflatten(0, (len(names), -1)).mean(1), dim=1)
        wanted = torch.tensor([labels[name] for name in sorted(labels)])
        return torch.nn.functional.cross_entropy(load(folder).scale.exp() * images @ classes.T, wanted).item()

    found = measured()
    assert found["loss"] == pytest.approx(expected(["fox", "ox", "sea bird"], ["a {}.", "the {}"]), rel=1e-3)
    assert [entry["class"] for entry in found["classes"].values()] == ["fox", "sea_bird"]
    for name in beside:
        (tmp_path / "data" / name).unlink()
    cifar = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    found = measured("--class-index", "cifar10", "--templates", "cifar")
    assert found["chance"] == 0.1 and found["loss"] == pytest.approx(expected(cifar, found["templates"]), rel=1e-3)
    capsys.readouterr()
    assert main(["eval", str(folder), "--images", str(tmp_path / "data"), "--templates", "cifar11"]) == 2
    assert (
        "there is no file cifar11: give one, or the name of known templates (cifar, imagenet)"
        in capsys.readouterr().err
    )


def test_the_packages_names_of_classes():
    """ImageNet's classes are in the order of their synsets; no two have one name."""
    for name, count in (("imagenet", 1000), ("cifar10", 10), ("cifar100", 100)):
        folders, names = read_class_index(Path(name))
        assert len({n.lower() for n in names}) == count and folders == sorted(folders)
    assert read_class_index(Path("imagenet"))[0][999] == "n15075141"
    for name in ("imagenet", "cifar"):
        assert len(set(read_lines(Path(name), "templates", ""))) > 10


def test_features_in_a_file_and_images_found_by_texts(folder, tmp_path, capsys):
    paths = sorted((ICONS / "val" / "food").glob("*.png"))[:4]
    (tmp_path / "bad.png").write_bytes(b"no image")
    out = tmp_path / "images.safetensors"
    assert main(["embed", str(folder), *map(str, paths), str(tmp_path / "bad.png"), "--out", str(out)]) == 2
    assert "bad.png is damaged" in capsys.readouterr().err
    (tmp_path / "texts.txt").write_text("a red fruit\nbread\n")
    texts = tmp_path / "texts.safetensors"
    words = ["--text", "tea", "--texts", str(tmp_path / "texts.txt")]
    assert main(["embed", str(folder), *words, "--out", str(texts)]) == 0
    images, wanted = features(folder, paths, ["tea", "a red fruit", "bread"])
    for file, right, names in ((out, images, list(map(str, paths))), (texts, wanted, ["tea", "a red fruit", "bread"])):
        with safe_open(file, "pt") as held:
            torch.testing.assert_close(held.get_tensor("features"), right, rtol=0, atol=2e-3)
            assert json.loads(held.metadata()["names"]) == names
    capsys.readouterr()
    sheet = tmp_path / "sheet.png"
    assert main(["match", str(folder), *map(str, paths), *words, "--top", "2", "--json", "--sheet", str(sheet)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:3]]
    for row, scores in zip(rows, wanted @ images.T, strict=True):
        assert [found["file"] for found in row["images"]] == [str(paths[i]) for i in scores.topk(2).indices]
    with Image.open(sheet) as picture:
        assert picture.size == ((3 + 2) * 64 + 2 * 4, 3 * 64 + 2 * 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["match", "MODEL", "ICONS"], "there is nothing to look for"),
        (["match", "MODEL", "ICONS", "--text", " "], "a text is empty"),
        (["match", "MODEL", "ICONS", "--text", "a", "--top", "0"], "--top is 0: give 1 or more"),
        (
            ["embed", "MODEL", "ICONS", "--text", "a", "--out", "x.safetensors"],
            "features of images or of texts: give images, or",
        ),
        (["embed", "MODEL", "nowhere.png", "--out", "x.safetensors"], "there is no image and no folder nowhere.png"),
        (["embed", "MODEL", "ICONS", "--out", "x.npy"], "x.npy would be a .safetensors file: give a name that ends in"),
        (["match", "MODEL", "ICONS", "--text", "a", "--sheet", "x.jpg"], "x.jpg would be a .png file: give a name"),
        (["eval", "MODEL", "--pairs", "ICONS", "--templates", "x"], "--templates goes with --images"),
        (["predict", "MODEL", "ICONS"], "is a model of pair, but one of image is needed here: `tokenformer match`"),
        (["eval", "MODEL"], "there is nothing to measure: give --tasks (all, or names), --text, --images or --pairs"),
        (["eval", "MODEL", "--pairs", "nowhere"], "there is no file or folder 'nowhere'"),
        (
            ["shrink", "MODEL", "--ratio", "0.5", "--images", "ICONS", "--on", "image.", "--out", "x"],
            "give --by newest",
        ),
        (["generate", "MODEL", "--prompt", "a"], "is a model of pair, but one of language or caption is needed here"),
        (["plan", "pair/b16", "--gpus", "8"], "layouts are planned for models of language and image"),
    ],
)
def test_what_is_refused(folder, words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([{"MODEL": str(folder), "ICONS": str(ICONS)}.get(word, word) for word in words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_trunk_grows_and_shrinks_on_the_command_line(folder, tmp_path, capsys):
    assert main(["grow", str(folder), "--on", "text.", "--ffn-tokens", "64", "--out", str(tmp_path / "big")]) == 0
    assert "computes the same: yes" in capsys.readouterr().out
    big = load(tmp_path / "big")
    assert big.config.trunk("text.").ffn_tokens == [48, 16] and big.images["size"] == 16
    torch.testing.assert_close(*(load(f).encode_text(torch.tensor([[5, 0]])) for f in (folder, tmp_path / "big")))
    words = ["shrink", str(tmp_path / "big"), "--on", "text.", "--by", "newest", "--tau", "hold", "--ffn-tokens", "48"]
    assert main([*words, "--out", str(tmp_path / "small")]) == 0
    assert load(tmp_path / "small").config.trunk("text.").segments("ffn")[0][0] == 48
    assert main(["info", str(folder)]) == 0 and "a pair of both, compared by softmax in 20" in capsys.readouterr().out


def test_a_text_that_is_cut_is_said_once(folder, tmp_path, capsys):
    """23 tokens and the end: what comes later changes nothing, as in CLIP, but not without a word."""
    words = ["--text", "b" * 23, "--text", "a red " * 5, "--text", "a red " * 5 + "car"]
    assert main(["embed", str(folder), *words, "--out", str(tmp_path / "x.safetensors")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "more than the 23 tokens that the model reads" in said[0] and "'a red a red" in said[0]


@pytest.mark.parametrize("names", [("0", "1"), ("n02119789", "n07693725")])
def test_classes_whose_names_are_no_words_are_said(folder, tmp_path, capsys, names):
    for name, image in zip(names, ("animals/fox", "food/bagel"), strict=True):
        (tmp_path / "data" / name).mkdir(parents=True)
        shutil.copy(ICONS / "train" / f"{image}.png", tmp_path / "data" / name)
    (tmp_path / "index.json").write_text(json.dumps({str(i): [name, f"a {i}"] for i, name in enumerate(names)}))
    words = ["eval", str(folder), "--images", str(tmp_path / "data")]
    assert main(words) == 0
    assert f"the classes are called {names[0]}, {names[1]}, which are no words: name them" in capsys.readouterr().err
    assert main([*words, "--class-index", str(tmp_path / "index.json")]) == 0
    assert "no words" not in capsys.readouterr().err
