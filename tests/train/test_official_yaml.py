"""The official training files run as they are, apart from paths and (here) sizes."""

import pytest
import torch

from tests.train.conftest import TEXT
from tokenformer.config import load
from tokenformer.data.text.prepare import prepare
from tokenformer.errors import UserError
from tokenformer.hub import save
from tokenformer.hub.dcp import read_tensors
from tokenformer.hub.open import read_config
from tokenformer.hub.run_folder import all_steps, newest_whole
from tokenformer.models import LanguageModel
from tokenformer.train.report import read_rows
from tokenformer.train.run import with_batch_sizes
from tokenformer.train.trainer import Trainer

NAMES = [
    "1-5B_train_pile", "150M_train_pile", "354M_to_757M_train_openwebtext2_120k", "354M_to_757M_train_openwebtext2_60k",
    "354M_train_openwebtext2_basemodel", "450M_train_pile", "900M_train_pile",
]  # fmt: skip
TINY = ("model.layers=2", "model.dim=16", "model.heads=2", "model.context=16", "model.vocab=384")
TOKENS = ("model.qkv_tokens=16", "model.proj_tokens=16", "model.ffn_tokens=48")


@pytest.fixture
def official_set(tmp_path):
    """As the official tool leaves it: no description beside it, one tokenizer file somewhere."""
    from tokenformer.data.text.tokenizer import ByteTokenizer

    prefix = prepare([TEXT], tmp_path / "set", "alice", tokenizer="byte", workers=1)
    (tmp_path / "set" / "alice.json").unlink()
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    return prefix


@pytest.mark.parametrize("name", NAMES)
def test_each_official_training_file_trains_three_steps(shared, official_set, tmp_path, name, capsys):
    paths = [f"data.path={official_set}", f"data.tokenizer={tmp_path / 'tokenizer.json'}"]
    if "_to_" in name:  # pretrain_partial_init: the base, as the official trainer would have left it
        base = LanguageModel(load("lm/150m", overrides=[*TINY, *(t.replace("48", "24") for t in TOKENS)]).model, seed=5)
        save(base, tmp_path / "base", format="official")
        paths.append(f"start={tmp_path / 'base'}")
    small = ["micro_batch=2", "steps=3", "validation.batches=1", "validation.generate=4", "data.workers=1"]
    config = read_config(
        shared / "golden" / "configs" / f"{name}.yml", overrides=[*TINY, *TOKENS, *paths, *small], training=True
    )
    assert Trainer(config, tmp_path / "run").run() is None
    assert list(all_steps(tmp_path / "run"))[:4] == [0, 1, 2, 3]  # extra_save_iters
    written = load(tmp_path / "run" / "config.yml")
    accumulation = config.accumulation
    assert (written.batch, written.micro_batch, written.accumulation) == (2 * accumulation, 2, None)
    said = capsys.readouterr().out
    shares = f" = 2 × {accumulation} accumulated × 1 ranks" if accumulation > 1 else ""
    assert f"batch {2 * accumulation}{shares}, " in said
    row = next(row for row in read_rows(tmp_path / "run") if row["kind"] == "train")
    assert row["rate"] == 0 and 5.5 < row["loss"] < 6.5 and row["loss_scale"] == 4096  # first step at rate 0
    if "_to_" in name:
        first = read_tensors(tmp_path / "run" / "checkpoints" / "step-00000000" / "model")
        key = "blocks.1.ffn.segments.0.value_tokens"
        assert torch.equal(first[key][:24], base.blocks[1].ffn.segments[0].value_tokens.detach())
        assert first[key].shape == (48, 16) and first[key][24:].std() > 0


def test_the_batch_of_the_first_start_is_held(shared, official_set, tmp_path):
    """Micro × accumulation × world size at the first start; another accumulation later only cuts it differently."""
    paths = [f"data.path={official_set}", f"data.tokenizer={tmp_path / 'tokenizer.json'}"]
    file = shared / "golden" / "configs" / "150M_train_pile.yml"
    common = [*TINY, *TOKENS, *paths, "validation.batches=1", "validation.generate=0", "checkpoint.also=[]"]
    Trainer(read_config(file, overrides=[*common, "micro_batch=2", "steps=3"], training=True), tmp_path / "run").run()
    again = read_config(file, overrides=[*common, "micro_batch=4", "steps=3"], training=True)
    trainer = Trainer(again, tmp_path / "run", resume=True)
    trainer.run()
    assert trainer.config.batch == 8 and trainer.task.loader.micro_batches == 2
    overridden = read_config(file, overrides=["batch=1024"], training=True)
    assert with_batch_sizes(overridden, world=8).batch == 1024
    assert with_batch_sizes(read_config(file, training=True), world=8).batch == 32 * 4 * 8
    with pytest.raises(UserError, match="batch 1000 cannot be cut into micro-batches of 32 on each of 8 ranks"):
        with_batch_sizes(read_config(file, overrides=["batch=1000"], training=True), world=8)


def test_what_the_official_files_say_is_what_we_do(shared, capsys):
    config = read_config(shared / "golden" / "configs" / "150M_train_pile.yml", training=True)
    said = capsys.readouterr().err
    assert "gradients are clipped at 1; the official trainer drops this setting" in said
    assert (config.optimizer.kind, config.optimizer.rate, config.optimizer.betas) == ("adamw", 6e-4, [0.9, 0.95])
    assert (config.schedule.kind, config.schedule.warmup, config.schedule.floor) == ("cosine", 0.01, 0.1)
    assert (config.steps, config.schedule.steps, config.seed, config.accumulation) == (143000, 143000, 1234, 4)
    assert (config.train.precision, config.train.activation_checkpointing) == ("fp16", "full")
    assert (config.train.loss_scale, config.train.loss_scale_window, config.train.loss_scale_min) == (4096, 1000, 1)
    assert (config.checkpoint.every, config.checkpoint.keep, config.checkpoint.also[-1]) == (500, 6, 512)
    assert (config.validation.every, config.validation.batches, config.log.every) == (5000, 100, 1)
    assert (config.data.order, config.data.path) == ("official", "./data/pile/pile_0.87_deduped_text_document")
    assert config.out == "work_dirs/150M_TokenFormer_Pile" and config.start is None


@pytest.mark.parametrize("stage, shard, reshard", [(0, 1, False), (1, -1, False), (2, -1, False), (3, -1, True)])
def test_zero_stages(shared, tmp_path, stage, shard, reshard):
    (tmp_path / "zero.yml").write_text(f'{{"zero_optimization": {{"stage": {stage}}}, "log_interval": 7}}')
    files = [shared / "golden" / "configs" / "150M_train_pile.yml", tmp_path / "zero.yml"]
    parallel = read_config(*files, training=True).parallel
    assert (parallel.shard, parallel.reshard_after_forward) == (shard, reshard)


@pytest.mark.parametrize(
    "line, sentence",
    [
        ('"optimizer": {"type": "SGD"}, "log_interval": 1', "optimizer.type is 'SGD', not Adam"),
        ('"lr_decay_style": "exponential"', "lr_decay_style is 'exponential'"),
        ('"model_parallel_size": 2', "model_parallel_size is 2, which is not followed here"),
        ('"precision": "int8"', "precision is 'int8'"),
        ('"zero_optimization": {"stage": 5}', "stage is 5, not 0 to 3"),
        ('"train_data_paths": ["a", "b"]', "train_data_paths is"),
    ],
)
def test_what_cannot_be_followed_is_refused(shared, tmp_path, line, sentence):
    (tmp_path / "more.yml").write_text("{" + line + "}")
    files = [shared / "golden" / "configs" / "150M_train_pile.yml", tmp_path / "more.yml"]
    with pytest.raises(UserError, match=sentence):
        read_config(*files, training=True)
    assert read_config(*files).model.layers == 12  # the model alone can still be read
    assert newest_whole(tmp_path) is None
