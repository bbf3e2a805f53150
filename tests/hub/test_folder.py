"""Our own folder: whole, sharded, refused when harmed; models from a hub through a real server on loopback."""

import http.server
import json
import os
import subprocess
import sys
import threading
from urllib.parse import urlparse

import pytest
import torch

from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.errors import UserError
from tokenformer.hub import folder, load, save
from tokenformer.hub.official_config import to_official
from tokenformer.hub.open import open_model
from tokenformer.models import LanguageModel

SEGMENTED = ModelConfig(
    layers=3, dim=32, heads=2, qkv_tokens=[9, 7], proj_tokens=16, ffn_tokens=[16, 8, 8], vocab=64, theta="softmax",
    tau={"proj": [2.5]},
    layer_overrides={1: LayerOverride(ffn_tokens=[4, 5]), 2: LayerOverride(tau={"qkv": [1.0, 2.0]})},
)  # fmt: skip
IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("shard_bytes", [10**9, 5000])
def test_a_segmented_model_comes_back_bit_equal(tmp_path, shard_bytes, monkeypatch):
    model = LanguageModel(SEGMENTED, seed=2)
    model.history = [{"rule": "segment", "number": 0}]
    monkeypatch.setattr(folder, "SHARD_BYTES", shard_bytes)
    folder.save_folder(model, tmp_path / "m", '{"version": "1.0"}')
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == (1 if shard_bytes > 5000 else 17)
    again = load(tmp_path / "m")
    assert again.config == model.config == open_model(tmp_path / "m").config
    assert again.history == model.history
    assert open_model(tmp_path / "m").tokenizer_json == '{"version": "1.0"}'
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert load(tmp_path / "m", dtype=torch.bfloat16)(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["transformer", "llama"])
def test_the_baselines_come_back_bit_equal(tmp_path, kind):
    model = LanguageModel(ModelConfig(layers=2, dim=32, heads=2, kind=kind, vocab=64, tied=kind != "llama"))
    save(model, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("size", "files"), [(5000, 17), ("5KB", 17), ("9 KB", 10), ("1GB", 1)])
@pytest.mark.parametrize("format", ["ours", "hf"])
def test_weights_go_into_files_of_the_size_that_is_asked_for(tmp_path, format, size, files):
    model = LanguageModel(SEGMENTED)
    save(model, tmp_path / "m", format=format, max_shard_size=size)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == files
    assert torch.equal(load(tmp_path / "m")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("size", ["five", 0, "-1MB", "1.5GB"])
def test_a_size_of_files_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(UserError, match="give a number of bytes, or such as '500MB'"):
        save(LanguageModel(SEGMENTED), tmp_path / "m", max_shard_size=size)


@pytest.mark.parametrize("format", ["ours", "hf", "official"])
def test_what_is_saved_is_readable_as_the_umask_says(tmp_path, format):
    plain = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=8, proj_tokens=8, ffn_tokens=8, vocab=64)
    before = os.umask(0o027)
    try:
        save(LanguageModel(plain), tmp_path / "m", format=format)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "m").rglob("*")}
    assert set(modes.values()) == {"0o640"}, modes
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o750


def test_nothing_is_overwritten(tmp_path):
    model = LanguageModel(SEGMENTED)
    (tmp_path / "m").mkdir()
    save(model, tmp_path / "m")  # an empty folder may be filled
    with pytest.raises(UserError, match="is there already"):
        save(model, tmp_path / "m")


@pytest.mark.parametrize("harm", ["cut", "no manifest", "flip", "config"])
def test_a_harmed_folder_is_refused(tmp_path, harm):
    save(LanguageModel(SEGMENTED), tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    if harm == "cut":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif harm == "no manifest":
        os.unlink(tmp_path / "m" / "manifest.json")
    elif harm == "flip":
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
    else:
        (tmp_path / "m" / "config.yml").write_text("model: {}")
    with pytest.raises(UserError):
        load(tmp_path / "m")


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match="there is nothing at"):
        load(tmp_path / "no" / "where")
    for path in ("../nope", "./nope", "nope/..", "-/nope"):  # not names of the hub
        with pytest.raises(UserError, match="there is nothing at"):
            load(path)
    with pytest.raises(UserError, match="nor a name that the hub could have"):
        load("some--one/model")
    with pytest.raises(UserError, match="holds no weights that we know"):
        load(tmp_path)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs: a list of files, and files in ranges. The first weights break off."""

    files: dict[str, bytes]
    ranges: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body: bytes, status=200, send: int | None = None, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:send])
        if send is not None:
            self.wfile.flush()
            self.close_connection = True

    def do_GET(self):
        path = urlparse(self.path).path
        if path.startswith("/api/models/owner/model/tree/"):
            files = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.files.items()]
            self.answer(json.dumps(files).encode())
        elif path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer(json.dumps({"id": "owner/model", "sha": "c" * 40, "siblings": siblings}).encode())
        elif path.startswith("/owner/model/resolve/") and path.rsplit("/", 1)[1] in self.files:
            name = path.rsplit("/", 1)[1]
            body, status, extra = self.files[name], 200, {}
            if self.headers.get("Range") and self.command == "GET":
                start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
                type(self).ranges.append(f"{name} from {start}")
                extra["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body, status = body[start:], 206
            broken = name.endswith(".bin") and self.command == "GET" and not type(self).ranges and len(body) - 1000
            self.answer(body, status, broken or None, ETag=f'"{name}-1"', X_Repo_Commit="c" * 40, **extra)
        else:
            self.answer(b'{"error": "Repository Not Found"}', 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


LOAD = """
import sys, tokenformer
try:
    model = tokenformer.load(sys.argv[1])
except tokenformer.UserError as error:
    print("UserError:", error)
else:
    print(model.cost().parameters, float(model(__import__("torch").arange(8)[None]).logits.abs().sum()))
"""


def test_a_hub_name_is_downloaded_cached_and_resumed(tmp_path):
    """A released folder: weights, and a config that names the class without model_type; the download breaks once."""
    shape = {"layers": 1, "dim": 64, "heads": 4, "qkv_tokens": 8, "proj_tokens": 8, "ffn_tokens": 8}
    model = LanguageModel(ModelConfig(**shape))  # over 12 MB: the client resumes in pieces of 10
    save(model, tmp_path / "official", format="official")
    config = {"architectures": ["TokenFormerForCausalLM"], **to_official(model.config)}
    weights = (tmp_path / "official" / "pytorch_model.bin").read_bytes()
    Hub.files = {"config.json": json.dumps(config).encode(), "pytorch_model.bin": weights, "README.md": b"#"}
    Hub.ranges = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "60",  # the machine may be busy
        "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }

    def run(name, **more):
        command = [sys.executable, "-c", LOAD, name]
        done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        first = run("owner/model")
        assert "UserError" not in first, first
        parameters, total = first.split()
        assert int(parameters) == model.cost().parameters
        assert float(total) == pytest.approx(model(torch.arange(8)[None]).logits.abs().sum().item(), rel=1e-5)
        assert Hub.ranges == ["pytorch_model.bin from 10485760"]
        assert "the hub has no model 'owner/other'" in run("owner/other")
    finally:
        server.shutdown()
        server.server_close()
    assert run("owner/model", HF_HUB_OFFLINE="1") == first  # from the cache
    assert "the hub cannot be reached" in run("owner/unseen", HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached" in run("owner/unseen")  # the server is gone


def test_a_wrapper_and_tensors_without_values_are_not_saved(tmp_path):
    model = LanguageModel(SEGMENTED)
    for wrapper, do in (
        (torch.optim.swa_utils.AveragedModel(model), "it wraps one: save its .module"),
        (torch.compile(model), "it wraps one: save its ._orig_mod"),
        (model.blocks, "give a LanguageModel or an ImageModel"),
        ({}, "give a LanguageModel or an ImageModel"),
    ):
        with pytest.raises(UserError, match=f"{type(wrapper).__name__} is not a model of this package: {do}"):
            save(wrapper, tmp_path / "m")
    with pytest.raises(UserError, match=r"'embedding.weight' is not whole in memory"):
        save(LanguageModel(SEGMENTED).to("meta"), tmp_path / "m")
    assert not (tmp_path / "m").exists()
