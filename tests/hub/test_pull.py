"""`pull` from a real server on the loopback: only what differs moves, and whatever the server does, the folder is the
old one or the new one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tokenformer
from tests.hub.conftest import flip, refused, remade
from tests.hub.loopback import Loopback
from tests.test_adapters import make_adapter
from tokenformer import ModelConfig
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.files import check_manifest
from tokenformer.hub import ranges
from tokenformer.hub.pieces import spans
from tokenformer.models import build

SHAPE = ModelConfig(layers=2, dim=64, heads=4, qkv_tokens=48, proj_tokens=48, ffn_tokens=96, vocab=384, context=32)


def random_model(config: ModelConfig, seed: int = 1):
    """A model without zeros: tensors of zeros are equal, and would be fetched once."""
    model, draw = build(config, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return model


def write(model, folder: Path, **more) -> Path:
    tokenformer.save(model, folder, tokenizer_json=ByteTokenizer().to_json(), **more)
    return folder


@pytest.fixture
def server(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(ranges, "PAUSE", 0.01)
    served = Loopback(tmp_path / "cloud")
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def cloud(server) -> Path:
    """A model on the server."""
    return write(random_model(SHAPE), server.root / "mine")


@pytest.fixture
def device(tmp_path, monkeypatch) -> Path:
    (tmp_path / "device").mkdir()
    monkeypatch.chdir(tmp_path / "device")
    return tmp_path / "device"


def pull(server: Loopback, *words: str, name: str = "mine") -> int:
    """Pull, and return the bytes that moved."""
    before = server.total
    assert main(["pull", f"{server.url}/{name}", *words]) == 0
    return server.total - before


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def change(model, *parameters: str):
    with torch.no_grad():
        for name in parameters:
            model.get_parameter(name).add_(1)
    return model


def test_tensors_json_holds_the_digest_of_every_stored_tensor(tmp_path):
    import hashlib

    from safetensors.numpy import load_file

    model = random_model(SHAPE).to(torch.float16)
    for kind, prefix in (("ours", ""), ("hf", "model.")):
        folder = write(model, tmp_path / kind, format=kind, max_shard_size="60KB")
        digests = json.loads((folder / "tensors.json").read_text())
        assert sorted(digests) == sorted(path.name for path in folder.glob("*.safetensors")) and len(digests) > 3
        for file, found in digests.items():
            tensors = load_file(folder / file)
            assert found == {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}
        assert sum(map(len, digests.values())) == len(list(model.parameters()))
        assert all(name.startswith(prefix) for found in digests.values() for name in found)
        assert "tensors.json" in json.loads((folder / "manifest.json").read_text())["files"]


def test_a_folder_comes_whole_and_a_second_pull_moves_the_manifest_alone(server, cloud, device, capsys):
    size = sum(len(data) for data in content(cloud).values())
    assert pull(server) == size and server.connections == 1
    assert content(device / "mine") == content(cloud) and names(device) == ["mine"]
    assert "(26 of 26 tensors and files)" in capsys.readouterr().out
    assert pull(server) == (cloud / "manifest.json").stat().st_size
    assert "nothing new" in capsys.readouterr().out


def test_only_what_differs_moves_also_between_shards_and_under_other_names(server, cloud, device, capsys):
    pull(server)
    shutil.rmtree(cloud)
    changed = change(random_model(SHAPE), "norm.weight", "blocks.1.ffn.segments.0.value_tokens")
    write(changed, cloud, max_shard_size="100KB")
    moved, new = pull(server), 4 * (64 + 96 * 64)
    overhead = sum((cloud / name).stat().st_size for name in ("tensors.json", "manifest.json"))
    assert new < moved < new + overhead + 8000  # and the headers
    assert "(2 of " in capsys.readouterr().out
    assert content(device / "mine") == content(cloud) and names(device) == ["mine"]
    shutil.rmtree(cloud)
    write(changed, cloud, format="hf")  # all tensors have another name
    assert pull(server, "--have", "mine", "--out", "hf") < 200_000 and server.sent["model.safetensors"] < 700_000
    assert tokenformer.load(device / "hf").history == []


def test_without_tensors_json_files_are_compared(server, cloud, device):
    (cloud / "tensors.json").unlink()
    remade(cloud)
    server.breaks = [200_000, *[0] * 20]
    assert main(["pull", f"{server.url}/mine"]) == 2
    server.breaks = []
    assert pull(server) < 200_000 + (cloud / "tokenizer.json").stat().st_size  # the file goes on where it was
    assert content(device / "mine") == content(cloud)
    (cloud / "history.json").write_text("[]")
    remade(cloud)
    assert pull(server) == sum((cloud / name).stat().st_size for name in ("manifest.json", "history.json"))
    assert content(device / "mine") == content(cloud)


def test_a_damaged_folder_is_repaired_by_what_is_damaged(server, cloud, device):
    pull(server)
    flip(device / "mine" / "model.safetensors")
    assert pull(server) < 20_000
    assert content(device / "mine") == content(cloud)


def test_of_equal_tensors_one_moves(server, device):
    model = build(SHAPE)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 if p.dim() == 1 else 0.0)
    write(model, server.root / "mine")
    pull(server)
    assert server.sent["model.safetensors"] < 150_000
    assert content(device / "mine") == content(server.root / "mine")


def test_a_broken_connection_is_continued_where_it_broke(server, cloud, device):
    server.breaks = [70_000, 100_000, 1, 0]
    assert pull(server) == sum(len(data) for data in content(cloud).values())
    assert content(device / "mine") == content(cloud) and not server.breaks


def test_every_file_is_continued_where_it_broke(server, cloud, device):
    """Also the manifest and tensors.json, of which nobody knows the size before; no byte moves twice."""
    server.most = 1000
    assert (cloud / "tensors.json").stat().st_size > 2000
    manifest = json.loads((cloud / "manifest.json").read_text())
    (cloud / "manifest.json").write_text(json.dumps(manifest) + " " * 7000)
    assert pull(server) == sum(len(data) for data in content(cloud).values())
    assert content(device / "mine") == content(cloud)


def test_force_removes_foreign_files_also_if_nothing_else_changed(server, cloud, device, capsys):
    pull(server)
    (device / "mine" / "notes.txt").write_text("mine")
    assert "notes.txt is not in the folder's manifest.json" in refused(capsys, "pull", f"{server.url}/mine")
    pull(server, "--force")
    assert content(device / "mine") == content(cloud)


def test_a_server_that_breaks_off_for_ever_is_one_sentence_and_what_came_is_kept(server, device, capsys):
    """One tensor is all zeros, as the places are to which nothing came yet."""
    model = random_model(SHAPE)
    torch.nn.init.zeros_(model.blocks[0].ffn.segments[0].value_tokens)
    cloud = write(model, server.root / "mine")
    server.breaks = [300_000] + [0] * 20
    assert "could not be fetched wholly" in refused(capsys, "pull", f"{server.url}/mine")
    assert names(device) == [".mine.pull"]
    server.breaks = []
    assert pull(server) < sum(len(data) for data in content(cloud).values()) - 290_000
    assert content(device / "mine") == content(cloud) and names(device) == ["mine"]
    (device / ".mine.pull").mkdir()  # what came of another version
    pull(server)
    assert names(device) == ["mine"]


@pytest.mark.multi
def test_killed_while_fetching_it_goes_on_inside_a_tensor(server, device):
    """The embedding of 5 MB comes slowly; nothing of what came is fetched again."""
    write(random_model(ModelConfig(**{**vars(SHAPE), "vocab": 20_000})), server.root / "mine")
    server.seconds_per_block, server.block = 0.01, 1 << 14
    process = subprocess.Popen([sys.executable, "-m", "tokenformer", "pull", f"{server.url}/mine"], env=online())
    end = time.monotonic() + 60
    while not any(path.stat().st_size > 1_100_000 for path in device.glob(".mine.pull/*.part")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(device) == [".mine.pull"]
    server.seconds_per_block = 0
    whole = sum(len(data) for data in content(server.root / "mine").values())
    assert pull(server) < whole - 1_000_000
    assert content(device / "mine") == content(server.root / "mine") and names(device) == ["mine"]


def online(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    return {**kept, "HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HUB_ETAG_TIMEOUT": "60", **more}


def test_a_server_without_ranges_sends_whole_files(server, cloud, device, capsys):
    server.ranges, server.breaks = False, [0, 0, 9, 200_000]
    pull(server)
    assert not server.breaks
    assert "sends no ranges: files that differ are fetched whole" in capsys.readouterr().err
    assert content(device / "mine") == content(cloud)
    shutil.rmtree(cloud)
    write(change(random_model(SHAPE), "norm.weight"), cloud)
    assert pull(server) > (cloud / "model.safetensors").stat().st_size
    assert content(device / "mine") == content(cloud)


def test_another_range_than_was_asked_for_is_refused(server, cloud, device, capsys):
    server.shift = 4
    assert "mine sent 'bytes 4-7/" in refused(capsys, "pull", f"{server.url}/mine")


def test_tensors_are_found_only_where_they_fill_their_file():
    def found(a: list, b: list, size: int = 20) -> dict:
        header = json.dumps({"a": {"data_offsets": a}, "b": {"data_offsets": b}}).encode()
        return spans(b"8 bytes." + header, 8 + len(header) + size)

    assert len(found([12, 20], [0, 12])) == 2
    for a, b in (([12, 20], [0, 11]), ([12, 20], [0, 13]), ([0, 12], [0, 20]), ([20, 12], [0, 20])):
        assert found(a, b) == {}
    assert found([12, 20], [0, 12], 21) == found([0.0, 12], [12, 20]) == found([0], [0, 20]) == {} == spans(b"", 0)


def test_redirects_are_followed_and_busy_servers_asked_again(server, cloud, device):
    server.redirects, server.answers = True, [503]
    pull(server)
    assert content(device / "mine") == content(cloud)


def changing(server, cloud: Path, new: Path):
    """The folder on the server is replaced after the first answer with weights."""

    def replace(name: str) -> None:
        if name == "model.safetensors" and server.sent[name] > 8 and new.exists():
            shutil.rmtree(cloud)
            new.rename(cloud)

    return replace


def test_a_folder_that_changes_meanwhile_is_refused_and_the_next_pull_gets_the_new_one(server, cloud, device, capsys):
    pull(server)
    old = content(device / "mine")
    write(change(random_model(SHAPE), "embedding.weight"), server.root / "newer")
    shutil.rmtree(cloud)
    write(change(random_model(SHAPE, 2), "embedding.weight"), cloud)
    server.sent.clear()
    server.before = changing(server, cloud, server.root / "newer")
    said = refused(capsys, "pull", f"{server.url}/mine")
    assert "model.safetensors is not the file that its manifest.json describes (it changed meanwhile" in said
    assert content(device / "mine") == old
    pull(server)
    assert content(device / "mine") == content(cloud) and names(device) == ["mine"]


@pytest.mark.parametrize("file", ["model.safetensors", "tensors.json", "config.yml", "tokenizer.json"])
def test_a_file_that_is_not_the_manifests_is_refused(server, cloud, device, capsys, file):
    tokenformer.save(random_model(ModelConfig(**{**vars(SHAPE), "context": 64}), 2), device / "mine")
    old = content(device / "mine")
    for harm in (flip, lambda path: path.write_bytes(path.read_bytes()[:-40]), Path.unlink):
        harm(cloud / file)
        assert f"{file} is not the file that" in refused(capsys, "pull", f"{server.url}/mine")
        assert content(device / "mine") == old


def test_digests_that_lie_are_refused(server, cloud, device, capsys):
    """A header that is not the manifest's, though all tensors are; then a tensors.json that names other digests."""
    at = (cloud / "model.safetensors").read_bytes().index(b'"pt"') + 1
    flip(cloud / "model.safetensors", at)
    assert "model.safetensors is not the file that" in refused(capsys, "pull", f"{server.url}/mine")
    flip(cloud / "model.safetensors", at)
    digests = json.loads((cloud / "tensors.json").read_text())
    digests["model.safetensors"]["norm.weight"] = "0" * 64
    (cloud / "tensors.json").write_text(json.dumps(digests))
    remade(cloud)
    assert "model.safetensors is not the file that" in refused(capsys, "pull", f"{server.url}/mine")
    for wrong in ("../../evil", 5, None):
        digests["model.safetensors"]["norm.weight"] = wrong
        (cloud / "tensors.json").write_text(json.dumps(digests))
        remade(cloud)
        pull(server, "--out", f"out-{wrong}".replace("/", "-"))  # then the file is fetched whole
    assert not (device.parent / "evil.part").exists()


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'{"files": {}}',
        b'{"files": {"a": 1}}',
        b'{"files": {"../a": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"/tmp/a": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"manifest.json": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"a\\u0000b": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"./a": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"a": {"bytes": 0, "sha256": "%s"}, "a/b": {"bytes": 0, "sha256": "%s"}}}' % (2 * (b"0" * 64,)),
        b'{"files": {"": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"a": {"bytes": -1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"a": {"bytes": 1, "sha256": "../../a"}}}',
        b'{"files": {"a": {"bytes": 99999999999999999, "sha256": "%s"}}}' % (b"0" * 64),
    ],
)
def test_a_manifest_that_we_would_not_write_is_refused(server, cloud, device, capsys, manifest):
    (cloud / "manifest.json").write_bytes(manifest)
    said = refused(capsys, "pull", f"{server.url}/mine")
    assert ("but its disk has" in said) == (b"9999" in manifest)
    assert not (device / "mine").exists()


def test_what_cannot_be_pulled_is_said_before_anything_is_made(server, cloud, device, capsys, monkeypatch):
    write(random_model(SHAPE, 2), device / "other")
    (device / "notes").mkdir()
    (device / "notes" / "a.txt").write_text("mine")
    (device / "other" / "notes.txt").write_text("mine")
    before, here = content(device), f"{server.url}/mine"
    for words, sentence in {
        (here, "--out", "notes"): "is there already, which we did not write",
        (here, "--out", "other"): "notes.txt is not in the folder's manifest.json and would be lost",
        (here, "--out", "."): "would be replaced, but you are in it",
        (here, "--have", "nowhere"): "--have nowhere is no folder",
        (f"{server.url}/nothing",): "nothing has no manifest.json: give the address of a folder that tokenformer wrote",
        (f"{server.url}/mine?x=1",): "is no address of a folder",
        ("http://[::1/x",): "is no address of a folder",
        ("http://127.0.0.1:1/x",): "could not be fetched wholly",
        (f"{server.url}/mine/%2e%2e%2fnotes",): "does not end in a plain name: give the folder to make",
        (server.url,): "does not end in a plain name: give the folder to make",
        ("other",): "is here already",
        ("./nowhere",): "there is nothing at",
        ("lm/150m",): "is here already",
    }.items():
        assert sentence in refused(capsys, "pull", *words), words
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(capsys, "pull", here)
    assert content(device) == before and names(device) == ["notes", "other"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    pull(server, "--out", "other", "--force")
    assert content(device / "other") == content(cloud)


def test_two_pulls_into_one_folder_do_not_mix(server, cloud, device, capsys):
    """The second is refused while the first, which the server keeps waiting, is under way."""
    words = []

    def second(name: str) -> None:
        if name == "model.safetensors" and not words:
            words.append("asked")
            words.append(subprocess.run(command, env=online(), capture_output=True, text=True).stderr)

    command = [sys.executable, "-m", "tokenformer", "pull", f"{server.url}/mine"]
    server.before = second
    pull(server)
    assert "another process pulls into" in words[1]
    assert content(device / "mine") == content(cloud)


def test_from_a_hub_one_commit_is_pulled_and_an_edited_card_is_left_out(server, device, capsys, monkeypatch):
    write(random_model(SHAPE), server.root / "mine", format="hf")
    flip(server.root / "mine" / "README.md")

    def run(*words: str) -> subprocess.CompletedProcess:
        environment = online(HF_ENDPOINT=server.url, HF_HOME=str(device / "home"), HF_TOKEN="hf_secret")
        command = [sys.executable, "-m", "tokenformer", "pull", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    done = run("hub:owner/mine@main")
    assert done.returncode == 0 and "README.md was changed on the server and is left out" in done.stderr, done.stderr
    assert not (device / "mine" / "README.md").exists() and (device / "mine" / "modeling_tokenformer.py").exists()
    loaded = tokenformer.load(device / "mine")
    assert torch.equal(loaded.embedding.weight, random_model(SHAPE).embedding.weight)
    assert set(server.tokens) == {("HEAD", "Bearer hf_secret"), ("GET", "Bearer hf_secret")}
    assert "has no manifest.json" in run("owner/other").stderr
    server.tokens.clear()
    assert run(f"{server.url}/mine", "--out", "plain").returncode == 0
    assert set(server.tokens) == {("GET", None)}  # another server gets no token of the hub


def test_an_adapter_moves_alone(server, device, capsys):
    base = build(
        ModelConfig(layers=1, dim=32, heads=2, vocab=64, context=32, qkv_tokens=8, proj_tokens=9, ffn_tokens=24)
    )
    make_adapter(server.root / "tales", base, 1, layers=[0], qkv=2048, ffn=2048)
    new = 4 * 8 * 2048 * 32
    assert new < pull(server, name="tales") < 1.01 * new
    tokenformer.attach(base, device / "tales", "tales")
    check_manifest(device / "tales")
    capsys.readouterr()


def test_a_grown_model_that_trained_with_everything_old_frozen_moves_its_new_segments(server, device, tmp_path):
    """The device has the small model; the cloud grows it, trains what is new, and the device pulls and slices."""
    text = Path(__file__).parents[1] / "data" / "alice.txt"
    assert main(["prepare", str(text), "--tokenizer", "byte", "--out", str(tmp_path), "--name", "text"]) == 0
    sizes = {"qkv_tokens": 192, "proj_tokens": 192, "ffn_tokens": 192}
    small = random_model(ModelConfig(layers=1, dim=192, heads=4, vocab=384, context=32, **sizes))
    write(small, device / "mine")
    stage = "{at: {step: 0}, qkv_tokens: 384, proj_tokens: 384, ffn_tokens: 384, old_tokens: 0}"
    settings = ["steps=2", "batch=2", "validation.every=0", "train.device=cpu", f"growth=[{stage}]"]
    words = ["train", str(device / "mine"), f"data.path={tmp_path / 'text'}", *settings, "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert main(["convert", "--to", "ours", str(tmp_path / "run"), "--out", str(server.root / "mine")]) == 0
    big = tokenformer.load(server.root / "mine")
    new = sum(p.nbytes for p in big.parameters()) - sum(p.nbytes for p in small.parameters())
    assert new == 4 * 10 * 192 * 192 and new < pull(server) < 1.01 * new
    assert content(device / "mine") == content(server.root / "mine")
    pulled = tokenformer.load(device / "mine")
    ids = torch.arange(30)[None]
    assert torch.equal(pulled(ids).logits, big(ids).logits) and not torch.allclose(
        pulled(ids).logits, small(ids).logits
    )
