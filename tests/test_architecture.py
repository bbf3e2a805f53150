"""The laws of the house: who may import whom, what is imported lazily, how long importing takes, how long files are."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tokenformer"
OPEN = {"errors", "files", "parsing", "terminal", "strict"}
BELOW = {"config", "ops", "models", "growth", "data", "parallel", "hub"}
MAY = {
    "errors": set(),
    "parsing": {"errors"},
    "files": {"errors", "parsing", "terminal"},
    "terminal": {"errors"},
    "strict": {"errors", "parsing"},
    "config": {"strict", "parsing", "errors"},
    "ops": {"config", "errors"},
    "models": {"ops", "config", "errors"},
    "growth": {"models", "config"} | OPEN,
    "data": {"config"} | OPEN,
    "parallel": {"models", "ops", "config"} | OPEN,
    "hub": {"data", "models", "config"} | OPEN,
    "hub/hf": {"hub", "adapters", "data", "models", "config"} | OPEN,  # a model of transformers attaches adapters
    "infer": {"models", "ops", "config"} | OPEN,
    "adapters": {"growth", "hub", "models", "config"} | OPEN,
    "train": BELOW | {"adapters"} | OPEN,
    "eval": {"infer", "hub", "data", "models", "config"} | OPEN,
    "serve": {"infer", "hub", "adapters", "data", "models", "config"} | OPEN,
    "inside": {"growth", "hub", "adapters", "data", "models", "config"} | OPEN,
    "cli": BELOW | {"adapters", "train", "infer", "eval", "serve", "inside"} | OPEN,
    "__init__": BELOW | {"adapters", "inside", "errors"},
    "__main__": {"cli"},
}
# optional libraries, each imported in one file; transformers in one folder
OPTIONAL = (
    "transformers",
    "lm_eval",
    "datasets",
    "matplotlib",
    "wandb",
    "tensorboard",
    "pyarrow",
    "PIL",
    "deepspeed",
    "zstandard",
    "starlette",
    "uvicorn",
    "jinja2",
)


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    first = "hub/hf" if parts[:2] == ("hub", "hf") else parts[0].removesuffix(".py")
    return "config" if first.startswith("config_") else first  # config.py and the sections declared beside it


def test_every_room_imports_only_what_the_design_allows():
    wrong = []
    for path in files():
        for name in imports(path):
            package, _, rest = name.partition(".")
            target = "config" if rest.startswith("config_") else rest.split(".")[0]
            if package == "tokenformer" and target in MAY and target not in MAY[room(path)] | {room(path)}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_the_law_would_catch_a_forbidden_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from tokenformer.train import trainer\n    import tokenformer.hub.folder\n")
    assert imports(bad) == {"tokenformer.train.trainer", "tokenformer.hub.folder"}


@pytest.mark.parametrize("library", OPTIONAL)
def test_an_optional_library_is_imported_in_one_file_at_most(library):
    users = [p.relative_to(PACKAGE) for p in files() if any(n.split(".")[0] == library for n in imports(p))]
    assert len(users) <= 1 or {str(p.parent) for p in users} == {"hub/hf"}, users


def outside_models() -> list[tuple[str, str]]:
    paths = [path for path in files() if "models" not in path.relative_to(PACKAGE).parts]
    return [(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def test_only_models_makes_a_language_model():
    """Doctests neither: `models.build` makes the model that a config describes."""
    assert [name for name, text in outside_models() if re.search(r"(?<!class )(?<!Token)\bLanguageModel\(", text)] == []


def test_only_models_names_reads_parameter_names():
    """`hub/official*` reads the official code's own names."""
    reads = re.compile(
        r"""(startswith|endswith|compile|match|search)\(\(?f?r?["'][^"']*(blocks|_tokens|\.weight|\.bias)"""
    )
    found = [name for name, text in outside_models() if reads.search(text)]
    assert [name for name in found if not name.startswith("hub/official")] == []


def test_no_file_is_longer_than_one_idea():
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text(encoding="utf-8").splitlines()) for p in files()}
    assert {name: n for name, n in lengths.items() if n > (800 if "kernels" in name else 500)} == {}


def test_importing_the_package_is_quick_and_imports_nothing_heavy():
    """Beyond torch: no optional library comes with it or with the command line, and few modules of any kind.

    Modules are counted, not seconds, which on a busy machine measure the others: all of ours and of Python's that the
    command line needs are some 25, and each of the libraries that would be felt brings more than the room left.
    """
    heavy = [*OPTIONAL, "rich", "huggingface_hub", "tokenizers", "torch._dynamo"]
    code = (
        "import sys, torch; before = set(sys.modules); import tokenformer, tokenformer.cli.main as m; "
        "m.build_parser(); new = set(sys.modules) - before; "
        f"print(len(new), [name for name in {heavy} if name in new])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, found = run.stdout.split(" ", 1)
    assert found.strip() == "[]"
    assert int(count) < 60, run.stdout


def test_the_jax_twin_is_small_knows_no_torch_and_is_known_by_nobody():
    twin = sorted((PACKAGE.parent / "tokenformer_jax").glob("*.py"))
    assert len(twin) > 5 and sum(len(path.read_text(encoding="utf-8").splitlines()) for path in twin) <= 1200
    assert [path.name for path in twin if any(name.split(".")[0] == "torch" for name in imports(path))] == []
    assert [path.name for path in files() if "tokenformer_jax" in path.read_text(encoding="utf-8")] == []


def test_every_public_name_can_be_reached():
    import tokenformer

    assert all(getattr(tokenformer, name) is not None for name in tokenformer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tokenformer.nothing
