"""`make docs`: a site of README.md, docs/ and the reports of studies and benchmarks, in build/site.

Pages are copied with their pictures into build/pages and keep their places, so links between them hold. Links to files
that are no pages (code, data) become plain names: the site has none of these.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build/pages", ROOT / "build/site"
PARTS = ("README.md", "docs/*.md", "experiments/*/README.md", "benchmarks/results/*/README.md")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")


def pages() -> list[Path]:
    return sorted(path.relative_to(ROOT) for part in PARTS for path in ROOT.glob(part))


def pictures(page: Path) -> list[Path]:
    found = re.findall(r"!\[[^\]]*\]\((?!https?:)([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    return [Path(os.path.normpath(page.parent / name)) for name in found]


def copied(page: Path) -> str:
    """Return the text of a page, without links to what is no page."""

    def keep(link: re.Match) -> str:
        target = Path(os.path.normpath(page.parent / link[2]))
        if not (ROOT / target).exists():
            sys.exit(f"{page} links to {link[2]}, which is not there")
        return link[0] if target in known else link[1] if link[1].startswith("`") else f"{link[1]} (`{target}`)"

    known = set(pages())
    return LINK.sub(keep, (ROOT / page).read_text(encoding="utf-8"))


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in pages():
        for name in (page, *pictures(page)):
            (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / page).write_text(copied(page), encoding="utf-8")
        for picture in pictures(page):
            shutil.copy(ROOT / picture, PAGES / picture)
    shutil.copy(ROOT / "docs/site.css", PAGES / "docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", str(SITE)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    print(f"{SITE}/index.html" if done.returncode == 0 else done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
