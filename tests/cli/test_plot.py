"""`tokenformer plot`: curves from metrics.jsonl as a picture and as a page without any outside part."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tokenformer.cli.main import main
from tokenformer.train.plot import Growth, bounds, in_a_row, read_curve


@pytest.fixture
def runs(tmp_path):
    """Two runs of 100 steps, the second grown at step 60, with a start that must not stretch the axis."""
    for name, grown in (("plain", False), ("a <b> & c", True)):
        rows = []
        for step in range(1, 101):
            cost = {"tokens": 64 * step, "flops": 1e6 * step, "hours": step / 100}
            loss = 90.0 if step == 1 else 2 + 3 / step
            rows.append({"kind": "train", "step": step, "loss": loss, "tokens_per_second": 10.0, **cost})
            if step % 25 == 0:
                rows.append({"kind": "validation", "step": step, "loss": loss + 0.1})
        rows.append({"kind": "train", "step": 101, "loss": None, "tokens_per_second": 10.0, "tokens": 6464})
        if grown:
            rows.append({"kind": "event", "step": 60, "what": "growth", "to": "2 × 96 tokens", "losses": [2.2, 2.3]})
        rows.append({"kind": "sample", "step": 100, "text": "<script>alert(1)</script>"})
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"kind": "tra')  # a line that a kill cut short
    return tmp_path / "plain", tmp_path / "a <b> & c"


def test_a_picture_and_a_page_stand_in_the_run(runs, capsys):
    assert main(["plot", str(runs[0])]) == 0
    assert capsys.readouterr().out.split() == [str(runs[0] / "curves.png"), str(runs[0] / "curves.html")]
    assert (runs[0] / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("axis, right", [("step", 100), ("tokens", 6400), ("hours", 1.0), ("compute", 1e8)])
def test_curves_lie_where_the_axis_says(runs, axis, right):
    curve = read_curve(runs[1], axis)
    assert len(curve.train) == 100 and curve.train[-1][0] == pytest.approx(right)
    assert [x / right for x, _ in curve.validation] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert curve.growths == [Growth(pytest.approx(0.6 * right), "2 × 96 tokens", [2.2, 2.3])]
    assert bounds([curve])[2] < 2.5  # the fall of the first tenth, from 90 to 2.3, is cut off
    curve.growths[0].losses[1] = 7.0
    assert bounds([curve])[2] > 7  # but a jump at a growth is shown


def test_a_run_that_counts_images_is_drawn_over_images(runs, tmp_path, capsys):
    metrics = runs[0] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("tokens", "images"))
    assert read_curve(runs[0], "images").train[-1][0] == 6400
    assert main(["plot", str(runs[0]), "--x", "images", "--out", str(tmp_path / "x.html")]) == 0
    assert ">images</text>" in (tmp_path / "x.html").read_text()
    assert main(["plot", *map(str, runs), "--out", str(tmp_path / "both.html")]) == 0  # beside one that counts tokens
    page = (tmp_path / "both.html").read_text()
    assert "<th>images</th>" in page and "<th>tokens</th>" in page and "per token" not in page
    capsys.readouterr()
    assert main(["plot", str(runs[0]), "--x", "tokens", "--out", str(tmp_path / "x.html")]) == 2
    assert "does not count tokens: draw it over step, hours, compute or images" in capsys.readouterr().err


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_page_is_self_contained_and_names_are_escaped(runs, tmp_path):
    assert main(["plot", *map(str, runs), "--out", str(tmp_path / "x.html"), "--title", "T & <i>"]) == 0
    raw = (tmp_path / "x.html").read_text()
    page = Page()
    page.feed(raw)
    assert not re.search(r"""(src|href)=|@import|url\(["']?http|https?://""", raw)  # nothing is fetched
    assert [tag for tag, _ in page.tags].count("script") == 1 and "alert(1)" in page.text  # text stays text
    growths = [attrs for tag, attrs in page.tags if attrs.get("class") == "grow"]
    assert len(growths) == 1 and "grown to 2 × 96 tokens, loss 2.200 → 2.300" in page.text
    chart = next(attrs for _, attrs in page.tags if attrs.get("class") == "chart")
    data = json.loads(chart["data-curves"])
    assert [len(curve["train"]) for curve in data["curves"]] == [100, 100]
    assert len([1 for tag, _ in page.tags if tag == "circle"]) == 10  # validations, and before and after growth
    assert "T & <i>" in page.text and "Sample: a <b> & c" in page.text
    for name in ("plain", "a <b> & c"):
        assert f"{name}, training" in page.text and f"{name}, validation" in page.text
    used = set(re.findall(r"var\((--c\d)\)", raw))
    light, dark = (set(re.findall(r"(--c\d):", part)) for part in raw.split("prefers-color-scheme: dark")[:2])
    assert used and used <= light and used <= dark


def test_runs_in_a_chain_begin_where_the_one_before_ends(runs):
    alone = [read_curve(run, "compute") for run in runs]
    first, second = in_a_row(alone)
    assert first == alone[0] and second.begins == first.ends > 0
    assert [x - first.ends for x, _ in second.train] == pytest.approx([x for x, _ in alone[1].train])
    assert second.growths[0].x == first.ends + alone[1].growths[0].x


def test_names_title_and_axis(runs, tmp_path, capsys):
    out = tmp_path / "x.html"
    assert main(["plot", *map(str, runs), "--names", "small,large", "--out", str(out)]) == 0
    page = out.read_text()
    assert "skipped steps" not in page  # there were none
    assert "<h1>Loss of small and large</h1>" in page and ">training FLOPs of each run</text>" in page
    assert main(["plot", str(runs[0]), "--out", str(out)]) == 0
    assert ">step</text>" in out.read_text()
    assert main(["plot", str(runs[1]), "--out", str(out)]) == 0  # it grew: steps before and after cost differently
    assert ">training FLOPs</text>" in out.read_text()
    capsys.readouterr()
    assert main(["plot", str(runs[0]), "--names", "a,b", "--out", str(out)]) == 2
    assert "--names gives 2 names for 1 runs: give one for each" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere"], "nowhere has no metrics.jsonl: give the folder of a run"),
        (["RUN", "--out", "x.pdf"], "x.pdf is neither a .png nor a .html file"),
    ],
)
def test_bad_arguments_are_one_sentence(runs, capsys, arguments, sentence):
    assert main(["plot", *(str(runs[0]) if a == "RUN" else a for a in arguments)]) == 2
    assert sentence in capsys.readouterr().err


def test_without_matplotlib_the_page_still_works(runs, tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; from tokenformer.cli.main import main; sys.exit(main())"
    for name, expected in (("x.html", 0), ("x.png", 2)):
        command = [sys.executable, "-c", code, "plot", str(runs[0]), "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
    assert "pip install 'tokenformer[plot]'" in done.stderr
