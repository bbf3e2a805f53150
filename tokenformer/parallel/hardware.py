"""The GPUs, links and network that `plan` reckons with: four presets, or a YAML file with these keys.

Figures are those of data sheets; `reached` and `wire` say which share of them a run gets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenformer.config import to_dict
from tokenformer.errors import UserError
from tokenformer.parsing import YAML_BYTES, is_file, parse_yaml, read_text
from tokenformer.strict import Section, build, key, override


@dataclass(frozen=True)
class Hardware(Section, section="hardware"):
    """What a step takes its time from. The defaults are those of an H100."""

    tflops: float = key("TFLOP/s of one GPU in bf16, dense", 989.0, above=0)
    memory: float = key("GB of one GPU", 80.0, above=0)
    memory_speed: float = key("GB/s of that memory", 3350.0, above=0)
    per_node: int = key("GPUs of a node, joined by fast links", 8, above=0)
    link: float = key("GB/s that one GPU sends inside its node", 450.0, above=0)
    network: float = key("GB/s that one GPU's share of the network sends to other nodes", 50.0, above=0)
    call: float = key("microseconds of a collective before anything is sent", 14.0, least=0)
    link_latency: float = key("microseconds of each hop inside a node", 1.9, least=0)
    network_latency: float = key("microseconds of each hop between nodes", 4.0, least=0)
    fp8: float = key("how much faster than in bf16 a product is in fp8; 1: there is no fp8", 1.6, least=1)
    reached: float = key("share of tflops that the computation reaches", 0.5, above=0, most=1)
    overlap: float = key("share of its time that communication beside computation does not cost", 0.9, least=0, most=1)
    wire: float = key("share of link, network and memory_speed that is reached", 0.8, above=0, most=1)


# Data sheets: A100 80GB SXM (June 2021), H100 SXM (March 2023), H200 SXM (November 2023), DGX B200 (2024). TFLOP/s are
# those without sparsity; NVLink's figure is of both directions together, so half of it is `link`; `network` is one
# adapter per GPU, as in NVIDIA's DGX: 200 Gbit/s for A100, 400 for the others. Latencies are those by which NCCL
# chooses between rings and trees (baseLatencies and hwLatencies of its tuning, protocol LL128). `reached`: 45 to 52 %
# were measured on one H200 (benchmarks/results/step). `wire`: NCCL counts with 360 of an H100's 450 GB/s. `overlap` is
# a guess. `fp8`: 1.56 to 1.89 were measured for products alone on one H200, through seconds; in a step it was not.
PRESETS = {
    "a100": Hardware(tflops=312, memory=80, memory_speed=2039, link=300, network=25, fp8=1),
    "h100": Hardware(),
    "h200": Hardware(memory=141, memory_speed=4800),
    "b200": Hardware(tflops=2250, memory=180, memory_speed=8000, link=900),
}


def read_hardware(source: str, overrides: Sequence[str] = ()) -> Hardware:
    """Return a preset's hardware, or a file's, with assignments `key=value` laid over it.

    >>> read_hardware("a100", ["network=12.5"]).network
    12.5
    """
    if source in PRESETS:
        raw = to_dict(PRESETS[source])
    elif is_file(source):
        raw = parse_yaml(read_text(source, YAML_BYTES), source) or {}
    else:
        raise UserError(f"--hardware is '{source}': give a YAML file, or one of {', '.join(PRESETS)}")
    return build(Hardware, override(raw, overrides), "hardware")
