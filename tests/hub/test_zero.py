"""ZeRO-1 folders: DeepSpeed's own fp32 weights bit for bit, and one sentence for every folder that is not whole."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenformer.errors import UserError
from tokenformer.hub import unpickle, zero

DATA = Path(__file__).parents[1] / "data" / "zero"
FOLDERS = ["world1", "world2", "world3", "world3_bf16"]
MODEL = "mp_rank_00_model_states.pt"
EMBEDDING = "sequential.0.word_embeddings.weight"
QUERY = "sequential.2.attention.query.key_param_tokens"
BIAS = "sequential.5.norm.bias"


def shard(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def equal(ours: dict[str, torch.Tensor], folder: str) -> bool:
    theirs = load_file(DATA / f"expected_{folder}.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def rewrite(path: Path, change) -> None:
    """Write a checkpoint file again after `change(content)`, with what consolidation needs of it."""
    content = unpickle.read(path, foreign="ignore")
    if "param_shapes" in content:
        content = {key: content[key] for key in ("module", "param_shapes")}
    else:
        keep = ("single_partition_of_fp32_groups", "group_paddings", "partition_count")
        content = {"optimizer_state_dict": {key: content["optimizer_state_dict"][key] for key in keep}}
    change(content.get("optimizer_state_dict", content))
    torch.save(content, f"{path}.new")  # the old file is still mapped
    Path(f"{path}.new").replace(path)


@pytest.fixture
def step(request, tmp_path) -> Path:
    """A copy of one checkpoint's step folder, to break; `world2` unless told."""
    shutil.copytree(DATA / getattr(request, "param", "world2"), tmp_path / "run")
    return tmp_path / "run" / "global_step2"


def refused(folder: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        zero.consolidate(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_weights_are_deepspeeds_own_bit_for_bit(folder, tmp_path):
    ours = zero.consolidate(DATA / folder)
    assert equal(ours, folder)
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    save_file(ours, tmp_path / "own.safetensors")  # refuses tensors that share memory
    module = unpickle.read(DATA / folder / "global_step2" / MODEL, foreign="ignore")["module"]
    assert not any(torch.equal(ours[name], half.float()) for name, half in module.items())  # more than the half weights


@pytest.mark.parametrize("folder", FOLDERS)
def test_one_step_can_be_given_directly(folder):
    assert equal(zero.consolidate(DATA / folder / "global_step2"), folder)


def test_a_zero_folder_is_recognised(tmp_path):
    assert zero.is_zero(DATA / "world1") and zero.is_zero(DATA / "world1" / "global_step2")
    assert not any(map(zero.is_zero, (DATA, DATA.parent / "golden" / "softmax", tmp_path, tmp_path / "absent")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../latest", r"no file 'latest'.*global_step2"),
        (MODEL, f"{MODEL} is missing"),
        (shard(0), f"{shard(0)} is missing"),
        (shard(1), r"1 optimizer shards, not zero_pp_rank_0 to 1"),
    ],
)
def test_a_missing_file_is_named(step, name, words):
    (step / name).unlink()
    refused(step.parent, words)


@pytest.mark.parametrize("step", ["world3"], indirect=True)
def test_a_missing_rank_in_the_middle_is_named(step):
    (step / shard(1)).unlink()
    refused(step, f"{shard(1)} is missing")


@pytest.mark.parametrize("tag", ["global_step9", "../run/global_step2", "", "\xff", "global_step2/configs"])
def test_a_wrong_latest_is_refused(step, tag):
    (step.parent / "latest").write_bytes(tag.encode("latin1"))
    refused(step.parent, "found: global_step2")


def test_a_folder_without_any_checkpoint_is_refused(tmp_path):
    refused(tmp_path, "found: none")
    refused(tmp_path / "absent", "found: none")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mp_rank_01_model_states.pt", "model parallelism"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "model parallelism"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "stage 3"),
        (f"bf16_{shard(0)}", "two precisions"),
        (shard(2), "3 optimizer shards, not zero_pp_rank_0 to 1"),
    ],
)
def test_files_of_other_layouts_or_saves_are_refused(step, name, words):
    shutil.copy(step / shard(1), step / name)
    refused(step, words)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({EMBEDDING: (129, 16)}, "values"),
        ({EMBEDDING: (127, 16)}, "values beyond"),
        ({BIAS: (32,)}, f"too few values for {BIAS}"),
        ({QUERY: (16, 12)}, f"an fp32 {QUERY} that differs"),
        ({EMBEDDING: (127, 16), QUERY: (13, 16)}, "differs"),
        ({EMBEDDING: (-128, -16)}, "layout that is not known"),
        ({EMBEDDING: "shape"}, "layout that is not known"),
        ({EMBEDDING: None}, "layout that is not known"),
    ],
)
def test_a_tampered_shape_is_refused(step, shapes, words):
    def change(model):
        for group in model["param_shapes"]:
            group.update({name: shape for name, shape in shapes.items() if name in group})

    rewrite(step / MODEL, change)
    refused(step, words)


def break_groups(state):
    state["single_partition_of_fp32_groups"].pop()


def break_stage(state):
    state["fp32_flat_groups"] = state.pop("single_partition_of_fp32_groups")


def break_value(state):
    state["single_partition_of_fp32_groups"][0][5] += 0.01


def break_kind(state):
    state["single_partition_of_fp32_groups"] = "flat"


def break_count(state):
    state["partition_count"] = 4


def break_end(state):
    state["single_partition_of_fp32_groups"][1] = torch.cat(
        [state["single_partition_of_fp32_groups"][1], torch.ones(4)]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (break_groups, "other parameter groups"),
        (break_stage, "not of ZeRO stage 1"),
        (break_value, "differs"),
        (break_kind, "other parameter groups"),
        (break_count, "2 optimizer shards, not zero_pp_rank_0 to 3"),
        (break_end, "values beyond"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tampered_shard_is_refused(step, change, words, rank):
    if change is break_count:
        rank = 0  # the ranks agree on it, one is asked
    rewrite(step / shard(rank), change)
    refused(step, words)


@pytest.mark.parametrize("step", ["world3_bf16"], indirect=True)
def test_what_remains_must_be_padding(step):
    last = step / f"bf16_{shard(2)}"
    rewrite(last, lambda state: state["single_partition_of_fp32_groups"][1].__setitem__(slice(-4, None), 1.0))
    refused(step, "4 values beyond")


def test_zeros_beyond_the_padding_are_refused(step):
    def longer(state):
        state["single_partition_of_fp32_groups"][1] = torch.cat(
            [state["single_partition_of_fp32_groups"][1], torch.zeros(4)]
        )

    rewrite(step / shard(1), longer)
    refused(step, "4 values beyond")


@pytest.mark.parametrize("step", ["world1"], indirect=True)
def test_gaps_between_aligned_weights_are_left_out(step):
    def spread(state):
        flat = state["single_partition_of_fp32_groups"]
        flat[1] = torch.cat([flat[1][:16], torch.full((3,), 9.0), flat[1][16:]])
        state["param_alignment_paddings"] = [[0] * 21, [3, 0]]

    rewrite(step / shard(0), spread)
    assert equal(zero.consolidate(step), "world1")


def test_a_cut_shard_is_named(step):
    content = (step / shard(1)).read_bytes()
    (step / shard(1)).write_bytes(content[: len(content) // 2])
    refused(step, f"{shard(1)} is cut off")


@pytest.mark.parametrize("step", ["world3", "world3_bf16"], indirect=True)
@pytest.mark.parametrize("gone", ["group_paddings", "partition_count"])
def test_older_deepspeed_without_some_keys_is_read(step, gone):
    before = zero.consolidate(step)
    for file in step.glob("*optim*"):
        rewrite(file, lambda state: state.pop(gone))
    assert all(torch.equal(tensor, before[name]) for name, tensor in zero.consolidate(step).items())


def test_one_group_may_stand_alone(step):
    def merge_shapes(model):
        model["param_shapes"] = model["param_shapes"][0]
        model["module"] = {name: half for name, half in model["module"].items() if ".norm." not in name}

    rewrite(step / MODEL, merge_shapes)
    for rank in range(2):
        rewrite(step / shard(rank), break_groups)
    assert len(zero.consolidate(step)) == 21


def test_buffers_and_tied_weights_come_from_where_they_are(step):
    def change(model):
        model["module"] |= {"scale": torch.ones(2, dtype=torch.float16), "head": model["module"][EMBEDDING]}
        model["shared_params"] = {"head": EMBEDDING}

    rewrite(step / MODEL, change)
    ours = zero.consolidate(step)
    assert torch.equal(ours["head"], ours[EMBEDDING]) and ours["scale"].dtype == torch.float32
