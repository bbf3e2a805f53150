"""The plan command: what it recommends is what somebody would who has run FSDP on as many GPUs, and it says why."""

import dataclasses
import re
import time
from pathlib import Path

import pytest

from tokenformer.cli.main import main
from tokenformer.config import load, presets
from tokenformer.errors import UserError
from tokenformer.parallel.choose import SEARCHED, SPENT, choose, reason, settings_of, trades, variants
from tokenformer.parallel.estimate import estimate
from tokenformer.parallel.hardware import PRESETS, Hardware, read_hardware
from tokenformer.parallel.mesh import Degrees, degrees
from tokenformer.parallel.times import collective
from tokenformer.parallel.traffic import Cut

SMALL, LARGE = "lm/1.5b optimizer.kind=adamw", "llama/13b"  # 25 and 208 GB of parameters, gradients and state
MUON = "lm/1.5b optimizer.kind=muon"
SLOW = "hardware.network=0.4"  # 25 Gbit/s for a node
# question: preset and settings, GPUs, hardware; answer: bounds of the degrees, and other settings
EXPERT = {
    "1.5B on one GPU: it fits": (f"{SMALL} batch=512", 1, "h100", {"replicate": 1}),
    "1.5B on a node: it fits on each, so copies": (
        f"{SMALL} batch=512", 8, "h100", {"pipeline": 1, "token": 1, "replicate": 8, "recompute": "none"}),
    "1.5B on 64: shards inside a node at most": (
        f"{SMALL} batch=1024", 64, "h100", {"pipeline": 1, "token": 1, "shard": (1, 8), "recompute": "none"}),
    "1.5B on 1,024: hybrid": (f"{SMALL} batch=2048", 1024, "h100", {"pipeline": 1, "token": 1, "shard": (2, 64)}),
    "1.5B on 4,096: hybrid": (f"{SMALL} batch=8192", 4096, "h100", {"pipeline": 1, "token": 1, "shard": (2, 64)}),
    "four GPUs for each sequence: tokens are split": (
        f"{SMALL} batch=1024", 4096, "h100", {"pipeline": 1, "token": (4, 8)}),
    "the same under Muon": (f"{MUON} batch=1024", 4096, "h100", {"pipeline": 1, "token": (4, 8)}),
    "1.5B under Muon on 4,096: hybrid": (
        f"{MUON} batch=8192", 4096, "h100", {"pipeline": 1, "token": 1, "shard": (2, 256)}),
    "13B on a node: ZeRO-3, no pipeline": (
        f"{LARGE} batch=1024", 8, "h100", {"pipeline": 1, "token": 1, "shard": 8, "reshard": True}),
    "13B on 64: hybrid or all": (f"{LARGE} batch=2048", 64, "h100", {"pipeline": 1, "token": 1, "shard": (8, 64)}),
    "13B on 64 of 141 GB: shards inside a node": (
        f"{LARGE} batch=2048", 64, "h200", {"pipeline": 1, "token": 1, "shard": (4, 8)}),
    "13B on 1,024: hybrid": (f"{LARGE} batch=2048", 1024, "h100", {"pipeline": 1, "token": 1, "shard": (16, 256)}),
    "13B on 4,096: hybrid": (f"{LARGE} batch=8192", 4096, "h100", {"pipeline": 1, "token": 1, "shard": (16, 256)}),
    "13B on one GPU cannot be trained": (f"{LARGE} batch=64", 1, "h100", None),
    "a long context: recompute before tokens are split": (
        f"{SMALL} batch=64 model.context=65536", 8, "h100", {"pipeline": 1, "token": 1, "recompute": "full"}),
    "a slow network: a pipeline over nodes, shards inside": (
        f"{LARGE} batch=1024 {SLOW}", 64, "h100", {"pipeline": (2, 8), "shard": (1, 8), "token": (1, 2)}),
    "images on a node: copies": ("vision/b16", 8, "a100", {"replicate": 8}),
}  # fmt: skip


def ask(question: str, gpus: int, hardware: str):
    preset, *given = question.split()
    figures = [s.removeprefix("hardware.") for s in given if s.startswith("hardware.")]
    config = load(preset, overrides=[s for s in given if not s.startswith("hardware.")])
    return choose(config, gpus, read_hardware(hardware, figures))


@pytest.mark.parametrize("name", EXPERT)
def test_plan_answers_as_somebody_who_knows(name):
    question, gpus, hardware, answer = EXPERT[name]
    every, best = ask(question, gpus, hardware)
    assert (best is None) == (answer is None)
    if best is None:
        assert all("does not fit: " in reason(e, 72e9) for e in every)
        return
    found = dataclasses.asdict(best.degrees)
    found |= {"recompute": best.config.train.activation_checkpointing}
    found |= {"reshard": best.config.parallel.reshard_after_forward}
    for key, wanted in answer.items():
        if isinstance(wanted, tuple):
            assert wanted[0] <= found[key] <= wanted[1], (key, found)
        else:
            assert found[key] == wanted, (key, found)


@pytest.mark.parametrize("batch, said", [(1024, True), (16384, False)])
def test_gpus_that_mostly_wait_are_named(batch, said, capsys):
    assert main(["plan", "lm/1.5b", f"batch={batch}", "--gpus", "4096"]) == 0
    assert ("of its time: give a larger batch or fewer GPUs" in capsys.readouterr().out) == said


@pytest.mark.parametrize("preset", [name for name in presets() if not name.startswith(("pair/", "caption/"))])
@pytest.mark.parametrize("hardware", ["a100", "b200"])
def test_one_node_is_never_told_to_pipeline(preset, hardware):
    every, _ = ask(f"{preset} batch=64", 8, hardware)
    assert {e.degrees.pipeline for e in every} == {1}
    assert choose(load(preset), 8, Hardware(), {"pipeline": 2})[0] if preset.startswith("lm/1.5") else True


def test_the_recommendation_fits_and_none_is_faster_by_more_than_a_little():
    config = load("lm/1.5b", overrides=["batch=512"])
    every, best = choose(config, 64, Hardware(), spare=0.25)
    assert best is not None and best.total <= 60e9
    fits = [e for e in every if e.total <= 60e9]
    assert fits == every[: len(fits)] and fits == sorted(fits, key=lambda e: e.seconds)
    assert best.seconds <= 1.02 * fits[0].seconds
    assert {e.degrees.pipeline for e in every} == {1, 2, 4, 8, 16, 32}
    assert len({e.degrees for e in every}) == len(every) > 10
    assert all(e.degrees.world == 64 for e in every)


def test_what_is_decided_stays():
    config = load("lm/1.5b", overrides=["batch=512"])
    fixed = {"shard": 8, "pipeline": -1, "replicate": None, "micro_batch": 2, "activation_checkpointing": "full"}
    every, best = choose(config, 64, Hardware(), fixed | {"accumulate": "sharded", "reshard_after_forward": False})
    assert best is not None and {e.degrees.shard for e in every} == {8} and len({e.degrees.pipeline for e in every}) > 1
    assert {e.config.micro_batch for e in every} == {2}
    assert {e.config.train.activation_checkpointing for e in every} == {"full"}
    assert {(e.config.parallel.accumulate, e.config.parallel.reshard_after_forward) for e in every} == {
        ("sharded", False)
    }
    cut, eight = Cut(config), Degrees(replicate=8, shard=8)
    places = {v.config.parallel.accumulate for v in variants(cut, eight, fixed | {"accumulate": "auto"})}
    assert places == {"auto"} and "whole" in {v.config.parallel.accumulate for v in variants(cut, eight, fixed)}
    with pytest.raises(UserError, match=r"no layout of 64 GPUs has parallel.shard=3 and divides .*: change one"):
        choose(config, 64, Hardware(), {"shard": 3})


def test_what_a_file_says_about_gradients_loses_no_layout():
    every = []
    for more in ([], ["parallel.accumulate=sharded"]):
        found, _ = choose(load("lm/150m", overrides=["batch=8", *more]), 8, Hardware())
        every.append({e.degrees for e in found})
    assert every[0] == every[1] and Degrees(replicate=8) in every[1]


def test_settings_of_a_recommendation_are_those_that_were_estimated():
    config = load("llama/13b", overrides=["batch=1024"])
    _, best = choose(config, 16, Hardware())
    assert best is not None
    for before in ([], ["parallel.pipeline=2", "parallel.reshard_after_forward=false", "parallel.accumulate=whole"]):
        written = load("llama/13b", overrides=["batch=1024", *before])
        given = load("llama/13b", overrides=["batch=1024", *before, *settings_of(best, written)])
        again = estimate(given, degrees(given.parallel, 16))
        assert (again.memory, again.sent, again.time) == (best.memory, best.sent, best.time)
        assert {s.partition("=")[0] for s in settings_of(best, written)} <= set(SEARCHED.values())


def test_the_trade_of_whole_gradients_is_said_and_true():
    config = load("lm/1.5b", overrides=["batch=512"])
    fixed = {"shard": 8, "micro_batch": 4, "reshard_after_forward": True, "accumulate": "sharded"}
    _, best = choose(config, 8, Hardware(), fixed)
    (whole,) = [said for said in trades(best, Hardware()) if said.startswith("parallel.accumulate=whole: ")]
    memory, sent, time = map(float, re.findall(r"([+-][\d.]+)", whole))
    assert memory == pytest.approx(4 * 1.587 * 7 / 8, rel=0.02)  # fp32 gradients, the other seven eighths
    assert sent == pytest.approx(-4 * 1.587 * 15, rel=0.02)  # 15 of 16 micro-batches reduce nothing
    assert time <= 0


def test_every_reason_has_words_and_the_parts_add_up():
    for question, gpus, hardware, _ in EXPERT.values():
        for e in ask(question, gpus, hardware)[0] if gpus <= 64 else ():
            assert set(e.time) <= set(SPENT) and min(e.time.values()) >= 0
            assert e.seconds == pytest.approx(sum(e.time.values()))


def test_latency_and_bandwidth_of_collectives():
    h = Hardware(call=10, link_latency=1, network_latency=5, link=400, network=50, wire=1)
    assert collective(h, 0, 1, 8, 8) == pytest.approx((10 + 7) * 1e-6)  # seven hops of a ring
    assert collective(h, 0, 1, 64, 8) == pytest.approx((10 + 7 * 8 + 7 * 5) * 1e-6)
    assert collective(h, 0, 3, 64, 8, rounds=2) == pytest.approx(3 * (10 + 2 * (7 + 3 * 5)) * 1e-6)  # a tree
    assert collective(h, 8e9, 0, 8, 8) == pytest.approx(7 / 400)
    assert collective(h, 8e9, 0, 8, 1) == pytest.approx(7 / 50)  # one adapter each
    assert collective(h, 64e9, 0, 64, 8) == pytest.approx(63 / 400)  # eight adapters together
    assert collective(h, 8e9, 5, 1, 1) == 0


def test_traffic_beside_computation_is_hidden_and_what_is_longer_is_not():
    config = load("lm/1.5b", overrides=["batch=512", "micro_batch=8", "optimizer.kind=adamw"])
    fast, slow = (estimate(config, Degrees(shard=64), Hardware(network=n)) for n in (50, 1))
    assert sum(fast.time[k] for k in ("gather", "reduce")) < 0.05 * fast.seconds
    assert slow.seconds > 2 * fast.seconds and slow.time["compute"] == fast.time["compute"]
    open_air = estimate(config, Degrees(shard=64), Hardware(overlap=0))
    assert open_air.time["gather"] > 5 * fast.time["gather"]


def test_hardware_is_a_preset_or_a_file_and_a_wrong_key_is_refused(tmp_path, capsys):
    file = tmp_path / "ours.yml"
    file.write_text("tflops: 200\nmemory: 48\nnetwork: 12.5\n")
    found = read_hardware(str(file), ["link=32"])
    assert (found.tflops, found.memory, found.network, found.link, found.per_node) == (200, 48, 12.5, 32, 8)
    assert {h.memory for h in PRESETS.values()} == {80, 141, 180}
    command = ["plan", "lm/150m", "batch=64", "--gpus", "8", "--hardware", str(file)]
    assert main([*command, "hardware.per_node=4"]) == 0
    assert f"8 GPUs of 48 GB ({file}), 4 per node" in capsys.readouterr().out
    file.write_text("tflop: 200\n")
    assert main(command) == 2
    assert "unknown key 'hardware.tflop': did you mean 'hardware.tflops'?" in capsys.readouterr().err


def test_thousands_of_gpus_are_planned_in_seconds():
    begin = time.monotonic()
    for kind in ("adamw", "muon"):
        every, best = choose(load("lm/1.5b", overrides=["batch=8192", f"optimizer.kind={kind}"]), 4096, Hardware())
        assert best is not None and best.degrees.world == 4096 and len(every) > 50
    assert time.monotonic() - begin < 60


def test_the_command_prints_and_recommends(capsys):
    command = ["plan", "lm/1.5b", "batch=512", "micro_batch=4", "--gpus", "64", "--memory", "80GB"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "lm/1.5b: 64 GPUs of 80 GB (h100), 8 per node, batch 512" in out
    lines = out.splitlines()
    (recommended,) = [line for line in lines if line.endswith("<- recommended")]
    assert recommended.split()[4] == "4" and lines[-1].endswith(" micro_batch=4 train.activation_checkpointing=none")
    assert lines[-1].startswith("recommended: parallel.replicate=")
    width = lines[1].index("why")
    assert all(line[width - 2 : width] == "  " and line[width] != " " for line in lines[2:12])  # aligned


def test_a_run_that_grows_is_planned_for_its_last_model(capsys):
    growth = "growth=[{at: {step: 10}, qkv_tokens: 7680, proj_tokens: 7680, ffn_tokens: 30720}]"
    command = ["plan", "lm/150m", "batch=64", "micro_batch=4", "--gpus", "8"]
    said = []
    for more in ([], [growth]):
        assert main([*command, *more]) == 0
        said.append(capsys.readouterr().out)
    assert "planned for the model after its growth" in said[1]
    parameters = [float(re.search(r"memory: parameters ([\d.]+)", text)[1]) for text in said]
    assert parameters[1] > 5 * parameters[0]


def test_an_official_file_counts_its_batch_by_gpus(capsys):
    official = Path(__file__).parents[1] / "data" / "golden" / "l2_norm_gelu" / "config.yml"
    said = []
    for gpus in ("2", "8"):
        assert main(["plan", str(official), "--gpus", gpus]) == 0
        said.append(int(re.search(r"batch (\d+)", capsys.readouterr().out)[1]))
    assert said[1] == 4 * said[0]


@pytest.mark.parametrize(
    "command, message",
    [
        (["plan", "lm/150m", "batch=64", "--gpus", "0"], "--gpus is 0"),
        (["plan", "lm/150m", "batch=64", "--gpus", "8", "--memory", "much"], "--memory is 'much'"),
        (["plan", "lm/150m", "batch=64", "--gpus", "8", "--memory", "0"], "--memory is '0'"),
        (["plan", "lm/150m", "batch=64", "--gpus", "8", "--spare", "1.5"], "--spare is 1.5: give a share"),
        (["plan", "lm/150m", "batch=64", "--gpus", "8", "--hardware", "tpu"], "or one of a100, h100, h200, b200"),
        (["plan", "pair/b16", "--gpus", "8"], "not for model.of pair: begin with parallel.replicate"),
        (
            ["plan", "lm/150m", "batch=3", "micro_batch=3", "--gpus", "2048"],
            "no layout of 2048 GPUs has micro_batch=3 and divides",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(command, message, capsys):
    assert main(command) == 2
    assert message in capsys.readouterr().err
