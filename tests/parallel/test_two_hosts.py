"""Two hosts for real: two network namespaces joined by a cable, a torchrun agent in each; and the cable is cut."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.parallel.cluster import needs
from tests.parallel.test_equal import far, losses
from tests.parallel.workers import train
from tests.train.conftest import result

pytestmark = [pytest.mark.hosts, pytest.mark.multi]
NAMES = ("first-host", "second-host")
TIMEOUT = 10
SETTINGS = [
    "steps=100", "schedule.steps=100", "checkpoint.every=20", "log.every=1", "batch=4", "micro_batch=1",
    "model.heads=4", "model.rotary_fraction=0.5",
]  # fmt: skip
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True)


class Hosts:
    """Two hosts that know each other by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spaces = [f"tokenformer-{os.getpid()}-{i}" for i in range(2)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 first-host\n10.77.0.2 second-host\n")
        for space in self.spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        one, other = self.spaces
        ip("-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
        for i, space in enumerate(self.spaces, 1):
            ip("-n", space, "address", "add", f"10.77.0.{i}/24", "dev", "cable")
            ip("-n", space, "link", "set", "cable", "up")

    def cable(self, state: str) -> None:
        ip("-n", self.spaces[0], "link", "set", "cable", state)

    def remove(self) -> None:
        for space in self.spaces:
            ip("netns", "delete", space)

    def start(self, file: Path, run: Path, *settings: str) -> list[subprocess.Popen]:
        """An agent on each host; what it says is in `run`-0.txt and -1.txt."""
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        agent += ["--rdzv-backend=c10d", "--rdzv-endpoint=first-host:29400", "--rdzv-id=test"]
        agent += ["-m", "tokenformer", "train", str(file), *SETTINGS, *settings]
        agent += [f"parallel.timeout={TIMEOUT}", "--out", str(run), "--resume"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        started = []
        for i, (space, name) in enumerate(zip(self.spaces, NAMES, strict=True)):
            enter = ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", "bash", "-c", ENTER, "enter"]
            with open(f"{run}-{i}.txt", "a") as log:
                command = [*enter, str(self.folder / "hosts"), name, *agent]
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return started


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    needs("ip", "unshare")
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def alone(ran, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    train(str(run), str(ran.file), SETTINGS, "float32")
    return run


def end(agents: list[subprocess.Popen], seconds: float, run: Path) -> list[int]:
    try:
        return [agent.wait(seconds) for agent in agents]
    except subprocess.TimeoutExpired:
        raise AssertionError([Path(f"{run}-{i}.txt").read_text()[-3000:] for i in range(2)]) from None
    finally:
        for agent in agents:
            agent.kill()


@pytest.mark.parametrize("mesh", ["shard", "token", "pipeline"])
def test_two_hosts_compute_what_one_process_does(hosts, ran, alone, tmp_path, mesh):
    run = tmp_path / "run"
    agents = hosts.start(ran.file, run, f"parallel.{mesh}=2")
    assert end(agents, 120, run) == [0, 0], Path(f"{run}-0.txt").read_text()
    torch.testing.assert_close(losses(run)[:20], losses(alone)[:20], rtol=1e-5, atol=0)
    assert len(losses(run)) == 100 and far(result(run)["model"], result(alone)["model"]) < 1e-3


def test_a_cut_cable_ends_both_sides_in_time_and_the_restarted_job_goes_on(hosts, ran, alone, tmp_path):
    run = tmp_path / "run"
    agents = hosts.start(ran.file, run, "parallel.shard=2")
    until = time.monotonic() + 60
    while not (run / "checkpoints" / "last").exists() and time.monotonic() < until:
        time.sleep(0.05)
    hosts.cable("down")
    cut = time.monotonic()
    codes = end(agents, 120, run)
    took = time.monotonic() - cut
    hosts.cable("up")
    for i, name in enumerate(NAMES):
        said = Path(f"{run}-{i}.txt").read_text()
        assert codes[i] != 0 and f"rank {i} on {name} lost the others" in said, said
        assert "Timed out waiting 10000ms" in said
    assert took < TIMEOUT + 20
    assert end(hosts.start(ran.file, run, "parallel.shard=2"), 120, run) == [0, 0]
    said = (run / "log").read_text()
    assert "going on from step" in said and "done after step 100" in said
    assert far(result(run)["model"], result(alone)["model"]) < 1e-3
