"""The fuzzer: damaged and crafted files for every command that reads them.

    python -m tests.fuzz.fuzz --seed 1 --count 2000 --jobs 2      all of them; with --mishaps, of the second set
    python -m tests.fuzz.fuzz --seed 1 --case 17 --keep somewhere one of them, with its folder kept

A case is a command with good files, one or two of which were damaged. It must succeed, or end with exit code 2 and one
sentence; where a manifest lies, success means that the result is that of the good files.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import asking, harm, material, mishaps, sandbox
from tests.hub.loopback import Loopback
from tests.parallel.conftest import free_port

FINE = "fine"
LONGEST = 1500  # characters of a sentence
SENTENCE = re.compile("tokenformer( [a-z]+)*: ")  # argparse names the command
NOTICE = re.compile(" is used$")  # what was passed over
DAMAGED = re.compile(" is damaged |^damaged images: [1-9]", re.M)  # what is named and left out, with exit code 2
TIMES = re.compile(r'"duration_seconds": [^,}]*|[\d.,]+ (tokens/s|s\b)|127\.0\.0\.1:\d+')  # and ports


class Verdict(NamedTuple):
    case: int
    scenario: str
    harm: str
    verdict: str  # "fine", or what is wrong
    detail: str
    seconds: float


class Damage(NamedTuple):
    words: list[str]  # of the command line
    meanwhile: Callable[[], None] | None  # called in the child before the command
    done: list[str]  # what was done, in words
    vouched: bool  # whether success must give the result of the good files


class Fuzzer:
    """Good files, what each command gives with them, and one case after the other. Made before it is forked."""

    def __init__(self, work: Path, only: str = "", mishaps: bool = False) -> None:
        self.work = work
        self.mishaps = mishaps
        self.scenarios = {name: s for name, s in material.scenarios().items() if only in name}
        material.build(work / "good")
        preload()
        self.expected: dict[str, str] = {}

    def prove(self) -> None:
        """Every command succeeds with good files: else nothing would be tested."""
        wrong = []
        for name, scenario in self.scenarios.items():
            folder = self.fresh(name, scenario)
            ended = self.call(scenario, scenario.words, folder)
            if ended.how != "exit 0":
                wrong.append(f"{name} does not work with good files ({ended.how}):\n{ended.err[-3000:]}")
            self.expected[name] = result(scenario, folder, ended.out)
            shutil.rmtree(folder.parent)
        assert not wrong, "\n".join(wrong)

    def fresh(self, name: str, scenario: material.Scenario) -> Path:
        folder = self.work / f"case-{name}-{os.getpid()}" / "in"
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        for needed in scenario.needs:
            good = self.work / "good" / needed
            shutil.copytree(good, folder / needed) if good.is_dir() else shutil.copy(good, folder / needed)
        return folder

    def call(
        self, scenario: material.Scenario, words: list[str], folder: Path, meanwhile: Callable[[], None] | None = None
    ) -> sandbox.Ended:
        from tokenformer.cli.main import main

        port = free_port() if scenario.served or scenario.requests else 0

        def both() -> int:
            if meanwhile:
                meanwhile()
            if scenario.served:
                Loopback(Path.cwd(), port)
            if scenario.requests:
                asking.ask_later(port, scenario.requests)
            named = [word.replace("SERVER", f"http://127.0.0.1:{port}") for word in words]
            return main([word.replace("PORT", str(port)) for word in named])

        return sandbox.run(both, folder, folder.parent / "said", port=port)

    def case(self, seed: int, number: int, keep: Path | None = None) -> Verdict:
        chance = random.Random(f"{seed}/{number}")
        name = chance.choice(sorted(self.scenarios))
        scenario = self.scenarios[name]
        folder = self.fresh(name, scenario)
        damage = self.mishap if self.mishaps else self.harm
        words, meanwhile, done, vouched = damage(scenario, folder, chance)
        if keep:
            shutil.copytree(folder, keep, symlinks=True, dirs_exist_ok=True, copy_function=_copy)
            print("tokenformer " + " ".join(words))
        ended = self.call(scenario, words, folder, meanwhile)
        verdict, detail = judge(ended, folder)
        if verdict == FINE and ended.how == "exit 0" and (vouched or (scenario.elsewhere and words == scenario.words)):
            got = result(scenario, folder, ended.out)
            if got != self.expected[name]:
                verdict, detail = "other result", f"{self.expected[name][:300]} became {got[:300]}"
        shutil.rmtree(folder.parent, ignore_errors=True)
        if keep:
            print(ended.how, ended.out, ended.err, sep="\n")
        return Verdict(number, name, "; ".join(done), verdict, detail, ended.seconds)

    def harm(self, scenario: material.Scenario, folder: Path, chance: random.Random) -> Damage:
        """The first set of mutations."""
        files = material.harmed_files(folder, scenario, chance)
        done, vouched = [], scenario.vouched
        for file in files[: 2 if chance.random() < 0.15 else 1]:
            if file.is_file() and not file.is_symlink():  # the first harm may have taken it away
                done.append(f"{file.relative_to(folder)}: {harm.apply(file, folder, chance)}")
            if file.suffix == ".json" and not file.is_file():
                vouched = False  # it may have been the manifest
            if chance.random() < 0.6 and harm.sign(file, folder):
                done.append("signed")
                vouched = False
        return Damage(scenario.words, None, done, vouched)

    def mishap(self, scenario: material.Scenario, folder: Path, chance: random.Random) -> Damage:
        """The second."""
        if chance.random() < 0.12:
            words, said = mishaps.mistake(scenario.words, chance)
            return Damage(words, None, [said], False)
        files, before = material.harmed_files(folder, scenario, chance), mishaps.manifests(folder)
        if chance.random() < 0.05:
            said = f"{files[0].relative_to(folder)} is replaced or removed meanwhile"
            return Damage(scenario.words, lambda: mishaps.later(files[0], chance), [said], False)
        done, signed = [], False
        files = files[: 2 if chance.random() < 0.2 else 1]
        for file in files:
            if file.is_file() and not file.is_symlink():
                done.append(f"{file.relative_to(folder)}: {mishaps.apply(file, folder, chance)}")
        if chance.random() < 0.4 and mishaps.sign(files[0], folder):
            done.append("signed")
            signed = True
        listed = all(file.parts[-2:-1] != ("run",) for file in files)  # a run's own config is what the user says it is
        return Damage(
            scenario.words,
            None,
            done,
            scenario.vouched and listed and not signed and mishaps.manifests(folder) == before,
        )


def _copy(source: str, target: str) -> str:
    return shutil.copy2(source, target) if Path(source).is_file() else target


def preload() -> None:
    """Import everything once, so that a fork costs nothing. No tensor is touched: no thread may run yet."""
    import huggingface_hub.utils  # noqa: F401
    import torch
    import uvicorn  # noqa: F401

    import tokenformer

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(tokenformer.__path__, "tokenformer."):
        if not module.name.startswith(("tokenformer.hub.hf.", "tokenformer.ops.kernels", "tokenformer.__main__")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def result(scenario: material.Scenario, folder: Path, out: str) -> str:
    """What is compared: what is printed apart from times, or the weights that were written."""
    if scenario.output:
        return TIMES.sub("", out)
    written = {}
    for path in sorted(folder.rglob("*.safetensors")):
        parts = path.relative_to(folder).parts
        if parts[0] in ("out", "new", "out.safetensors") or "step-00001500" in parts:
            written["/".join(parts)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return json.dumps(written)


def judge(ended: sandbox.Ended, folder: Path) -> tuple[str, str]:
    if (folder / harm.CANARY).exists():
        return "executed", ""
    where = re.findall(r'File ".*?(tokenformer/[^"]+)", line (\d+)', ended.err)
    at = ":".join(where[-1]) if where else ""
    last = (ended.err.strip().splitlines() or [""])[-1][:200]
    if ended.how == "time":
        return "hang", f"{ended.seconds:.0f} s"
    if ended.how == "memory":
        return "memory", f"{ended.bytes / 1e9:.1f} GB {at} {last}"
    if ended.how.startswith("signal"):
        return "crash", ended.how
    if "Traceback (most recent call last)" in ended.err:
        return "traceback", f"{at} {last}"
    if ended.how not in ("exit 0", "exit 2"):
        return ended.how, last
    sentences = [line for line in ended.err.splitlines() if SENTENCE.match(line) and not NOTICE.search(line)]
    named = [line for line in sentences if DAMAGED.search(line)]  # each image that is left out
    if ended.how == "exit 2" and DAMAGED.search(ended.out + ended.err) and len(sentences) - len(named) < 2:
        return FINE, ""
    if ended.how == "exit 2" and (len(sentences) != 1 or len(sentences[0]) > LONGEST):
        return "no sentence", f"{len(sentences)} sentences, {len(ended.err)} characters: {last}"
    return FINE, ""


def _work(fuzzer: Fuzzer, seed: int, numbers: list[int], out) -> None:
    for number in numbers:
        try:
            out.put(fuzzer.case(seed, number))
        except Exception as error:
            out.put(Verdict(number, "", "", "the fuzzer's own fault", repr(error), 0.0))
    out.put(None)


def run(
    seed: int, count: int, jobs: int, only: str = "", say=lambda verdict: None, mishaps: bool = False
) -> list[Verdict]:
    """All cases, in forks of one process that has torch loaded."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as work:
        fuzzer = Fuzzer(Path(work), only, mishaps)
        fuzzer.prove()
        context = multiprocessing.get_context("fork")
        out = context.SimpleQueue()
        shares = [list(range(count))[job::jobs] for job in range(jobs)]
        workers = [context.Process(target=_work, args=(fuzzer, seed, share, out)) for share in shares]
        for worker in workers:
            worker.start()
        found, left = [], jobs
        while left:
            if out.empty():
                time.sleep(0.05)
                died = [worker.exitcode for worker in workers if worker.exitcode]
                assert not died or not out.empty(), f"a process of the fuzzer itself ended with {died[0]}"
                continue
            one = out.get()
            left -= one is None
            if one is not None:
                found.append(one)
                say(one)
        for worker in workers:
            worker.join()
    return sorted(found)


def line(seed: int, one: Verdict) -> str:
    return f"{one.verdict}: seed {seed} case {one.case}, {one.scenario}, {one.harm}: {one.detail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="commands whose name has this in it")
    parser.add_argument("--case", type=int, help="this one alone; give --only if it was given then")
    parser.add_argument("--mishaps", action="store_true", help="the second set of mutations")
    parser.add_argument("--keep", type=Path, help="with --case: where its folder goes")
    args = parser.parse_args()
    if not sandbox.landlock():
        print("this kernel has no Landlock: cases could write outside of their folder, so none is run")
        return 1
    if args.case is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as work:
            fuzzer = Fuzzer(Path(work), args.only, args.mishaps)
            fuzzer.prove()
            print(line(args.seed, fuzzer.case(args.seed, args.case, args.keep)))
        return 0
    start = time.monotonic()
    found = run(
        args.seed,
        args.count,
        args.jobs,
        args.only,
        lambda v: v.verdict != FINE and print(line(args.seed, v), flush=True),
        args.mishaps,
    )
    counts = Counter(one.verdict for one in found)
    print(f"{dict(counts)} of {len(found)} in {time.monotonic() - start:.0f} s; the longest:")
    for one in sorted(found, key=lambda one: -one.seconds)[:5]:
        print(f"{one.seconds:.1f} s", line(args.seed, one))
    return int(set(counts) != {FINE})


if __name__ == "__main__":
    sys.exit(main())
