"""The generated modelling file: it needs torch and transformers alone, and computes what we compute, bit for bit."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tokenformer
from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.hub.remote import modeling_source
from tokenformer.models import LanguageModel

SHAPE = {"layers": 2, "dim": 32, "heads": 4, "vocab": 128, "context": 64}
TOKENS = {"qkv_tokens": 24, "proj_tokens": 16, "ffn_tokens": 48}
CONFIGS = {
    **{theta: ModelConfig(**SHAPE, **TOKENS, theta=theta) for theta in ("l2_norm_gelu", "gelu_l2_norm", "softmax")},
    "segmented": ModelConfig(
        **SHAPE,
        qkv_tokens=[8, 16],
        proj_tokens=16,
        ffn_tokens=[16, 32],
        tau={"ffn": [3.0, 7.25]},
        layer_overrides={1: LayerOverride(ffn_tokens=[8, 8, 8])},
    ),
    "transformer": ModelConfig(**SHAPE, kind="transformer"),
    "llama": ModelConfig(**SHAPE, kind="llama", kv_heads=2, tied=False, rotary_fraction=1.0),
}
READER = """
import importlib.util, json, os, shutil, sys
from pathlib import Path
from typing import Any
sys.path[:] = [p for p in sys.path if not p.endswith("-packages")] + sys.argv[1].split(os.pathsep)
assert importlib.util.find_spec("tokenformer") is None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

torch.set_num_threads(1)
out = {}
for folder in map(Path, sys.argv[2:]):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # label smoothing shifts its labels
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer(["a b c d", "b"], return_tensors="pt", padding=True)
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]], inputs
    ids = inputs["input_ids"][:1]
    with torch.no_grad():
        out[f"{folder.name}.logits"] = model(ids).logits
    out[f"{folder.name}.batch"] = model.generate(**inputs, max_new_tokens=8, eos_token_id=-1, do_sample=False)
    for cache in ("dynamic", "static"):
        options = dict(max_new_tokens=8, eos_token_id=-1, do_sample=False, cache_implementation=cache)
        out[f"{folder.name}.{cache}"] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    try:
        model.load_adapter(folder)  # not peft's, and ours needs the package
        raise SystemExit("an adapter was taken")
    except Exception as error:
        assert type(error).__name__ == "UserError" and "needs the package, not its remote code" in str(error), error
    model.train().gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(folder.parent / f"{folder.name}-again")
edited = Path(shutil.copytree(folder, folder.parent / "edited"))
(edited / "config.json").write_text((edited / "config.json").read_text().replace('"heads": 4', '"heads": 2'))
try:
    AutoModelForCausalLM.from_pretrained(edited, trust_remote_code=True)
    sys.exit("an edited config.json was taken")
except Exception as error:
    assert type(error).__name__ == "UserError" and "config.json was changed" in str(error), error
model.save_pretrained(edited)
AutoModelForCausalLM.from_pretrained(edited, trust_remote_code=True)
save_file(out, folder.parent / "out.safetensors")
print(json.dumps(sorted(m for m in sys.modules if m.split(".")[0] == "tokenformer")))
"""


def without_us(root: Path) -> str:
    """The folders of everything that is installed here except our package, as a path list."""
    folders = []
    for entry in map(Path, sys.path):
        stdlib = (entry / "os.py").exists() or entry.name == "lib-dynload"
        if entry.is_dir() and not stdlib and not (entry / "tokenformer" / "__init__.py").exists():
            folders.append(root / f"site{len(folders)}")
            folders[-1].mkdir()
            for package in entry.iterdir():
                if "tokenformer" not in package.name:
                    (folders[-1] / package.name).symlink_to(package)
    return os.pathsep.join(map(str, folders))


def run_without_us(script: str, root: Path, *arguments: Path) -> Any:
    """Run a script in `root` where our package and the hub are not; return its last line, which is JSON."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "home")}
    environment["HF_MODULES_CACHE"] = str(root / "modules")
    command = [sys.executable, "-I", "-S", "-c", script, without_us(root), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().split("\n")[-1])


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, dict[str, LanguageModel], dict[str, torch.Tensor]]:
    """Models of every kind, their folders, and what somebody without our package computed with them."""
    pytest.importorskip("transformers", minversion="5.17")
    root = tmp_path_factory.mktemp("remote")
    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3, "d": 4}
    tokenizer = Tokenizer(models.WordLevel({**words, **{f"w{i}": i for i in range(5, 128)}}, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    built = {}
    for name, config in CONFIGS.items():
        built[name] = LanguageModel(config, seed=7).eval()
        with torch.no_grad():
            for parameter in built[name].parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6)
        tokenformer.save(built[name], root / name, format="hf", tokenizer_json=tokenizer.to_str())
    assert run_without_us(READER, root, *(root / name for name in built)) == []
    return root, built, load_file(root / "out.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_without_our_package_logits_are_bit_equal_and_texts_the_same(exported, name):
    root, built, out = exported
    threads, ids = torch.get_num_threads(), torch.tensor([[1, 2, 3, 4]])
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            assert torch.equal(built[name](ids).logits, out[f"{name}.logits"])
        wanted = built[name].generate(ids, 8)
        alone = built[name].generate(torch.tensor([[2]]), 8)
    finally:
        torch.set_num_threads(threads)
    assert len(set(wanted[0].tolist())) > 5
    assert torch.equal(wanted, out[f"{name}.dynamic"]) and torch.equal(wanted, out[f"{name}.static"])
    assert torch.equal(wanted[0], out[f"{name}.batch"][0]) and torch.equal(alone[0], out[f"{name}.batch"][1, 3:])
    again = tokenformer.load(root / f"{name}-again")  # what they saved is ours again, and carries the file on
    assert again.config == built[name].config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), built[name].parameters(), strict=True))
    assert (root / f"{name}-again" / "modeling_tokenformer.py").read_text() == modeling_source()


def test_a_folder_saved_by_the_trainer_can_be_loaded_without_us_too(exported, tmp_path):
    from tokenformer.hub.hf import TokenFormerForCausalLM

    TokenFormerForCausalLM.from_native(exported[1]["softmax"]).save_pretrained(tmp_path)
    assert (tmp_path / "modeling_tokenformer.py").read_text() == modeling_source()
    mapped = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert mapped["AutoModelForCausalLM"] == "modeling_tokenformer.TokenFormerForCausalLM"


def test_the_file_imports_the_standard_library_torch_and_transformers_alone(exported):
    from transformers.dynamic_module_utils import get_imports

    names = set(get_imports(exported[0] / "softmax" / "modeling_tokenformer.py"))
    assert names - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_the_file_says_where_it_comes_from_and_holds_no_more_than_it_needs():
    text = modeling_source()
    assert f"tokenformer {tokenformer.__version__}" in text and "Apache-2.0" in text and "2410.23168" in text
    names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {"pattention_group", "normalise", "LanguageModel", "ModelConfig", "UserError"} <= names
    assert not {"parse_yaml", "override", "equal_transformer", "presets"} & names
