"""What the parameter tokens do: statistics against a plain loop, effects that add up, tokens that are switched off."""

import base64
import copy
import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tokenformer
from tokenformer import UserError, hub
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.growth.measure import each_activation, segments
from tokenformer.growth.shrink import remove_dead
from tokenformer.inside import Token, ablate, explore, record
from tokenformer.inside.edit import edit
from tokenformer.inside.effects import direct_effects, real_effects, twins, vocabulary_effects
from tokenformer.inside.learned import what_growth_learned
from tokenformer.inside.page import growth_view, make_page
from tokenformer.inside.tally import FIRES, unpack

SHAPE = {"layers": 2, "dim": 32, "heads": 4, "context": 48, "vocab": 384}
TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(scope="module", params=["l2_norm_gelu", "softmax"])
def model(request):
    config = ModelConfig(**SHAPE, qkv_tokens=[12, 8], proj_tokens=16, ffn_tokens=[40, 24], theta=request.param)
    return lively(config)


def lively(config):
    made = tokenformer.LanguageModel(config, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return made.eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(384, (6, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_statistics_and_places_are_those_of_a_plain_loop(model, ids, device):
    model, ids, plain = copy.deepcopy(model).to(device), ids.to(device), {}
    found = explore(model, ids.split(4)).to("cpu")

    def visit(where, _score, active):
        plain.setdefault(where, []).append(active.cpu())

    each_activation(model, ids, visit)
    assert found.rows == ids.numel() and found.tables.keys() == plain.keys()
    for where, parts in plain.items():
        active = torch.cat(parts)
        torch.testing.assert_close(found.mean(where), active.mean(0), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.spread(where), active.std(0, unbiased=False), atol=1e-6, rtol=1e-5)
        assert (found.tables[where]["fires"] - (active > FIRES).sum(0)).abs().max() <= 1  # float64 here, fp32 there
        for which, sign in (("high", 1), ("low", -1)):
            values, places = unpack(found.tables[where][which])
            torch.testing.assert_close(sign * values, active.T.gather(1, places).float(), atol=1e-5, rtol=1e-5)
            best = (sign * active).topk(values.shape[1], dim=0).values.T.float()
            torch.testing.assert_close(values, best, atol=1e-5, rtol=1e-5)


def test_two_halves_merge_to_the_whole_and_the_batch_changes_no_place(model, ids):
    whole, first, second = explore(model, [ids]), explore(model, [ids[:2]]), explore(model, [ids[2:]])
    first.merge(second)
    assert first.rows == whole.rows
    for where, tables in whole.tables.items():
        for name, table in tables.items():
            if name in ("high", "low"):
                (a, at), (b, same) = unpack(table), unpack(first.tables[where][name])
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
                assert (at == same).float().mean() > 0.99  # rounding of the last bit may order two places otherwise
            else:
                torch.testing.assert_close(table.double(), first.tables[where][name].double(), atol=1e-6, rtol=1e-6)
    other = lively(ModelConfig(**SHAPE, qkv_tokens=12, proj_tokens=16, ffn_tokens=40))
    with pytest.raises(UserError, match="tallies of models of different shapes"):
        first.merge(explore(other, [ids]))


def test_equal_activations_are_ordered_by_their_place(ids):
    """The first block sees the embedding alone, so a repeated row has equal activations."""
    model = lively(ModelConfig(**SHAPE, qkv_tokens=12, proj_tokens=16, ffn_tokens=40))
    found = explore(model, [ids[:1].repeat(3, 1)[i : i + 1] for i in range(3)]).tables[0, "query", 0]["high"]
    values, places = unpack(found)
    assert all(
        earlier < later
        for row, at in zip(values.tolist(), places.tolist(), strict=True)
        for a, b, earlier, later in zip(row, row[1:], at, at[1:], strict=False)
        if a == b
    )
    assert set(places[0, :3].diff().tolist()) == {40}


def test_direct_effects_add_up_to_the_logit(model, ids):
    found = direct_effects(model, ids[0, :-1], ids[0, 1:])
    torch.testing.assert_close(found.total(), found.logit_T, atol=1e-4, rtol=1e-5)
    expected = model(ids[:1, :-1]).logits[0].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found.logit_T, expected)


@pytest.mark.parametrize("token", [Token(1, "ffn", 45), Token(0, "proj", 3), Token(0, "query", 15)])
def test_a_token_that_is_switched_off_is_one_of_a_hand_edited_model(model, ids, token):
    seen, wanted = ids[0, :-1], ids[0, 1:]
    found = real_effects(model, seen, wanted, [(token, t) for t in range(10)])
    edited = tokenformer.LanguageModel(model.config)
    edited.load_state_dict(model.state_dict())
    part = {
        "ffn": edited.blocks[1].ffn,
        "proj": edited.blocks[0].attention.proj,
        "query": edited.blocks[0].attention.query,
    }
    segment, row = (1, token.row - {"ffn": 40, "query": 12}[token.projection]) if token.projection != "proj" else (0, 3)
    with torch.no_grad():
        part[token.projection].segments[segment].value_tokens[row] = 0
        lost = (model(seen[None]).logits - edited(seen[None]).logits)[0].gather(1, wanted[:, None])[:10, 0]
    torch.testing.assert_close(torch.tensor(found), lost, atol=1e-6, rtol=1e-5)
    before = model(ids).logits
    with ablate(model, [token], "mask"):
        masked = model(ids).logits
    assert not torch.equal(masked, before) and torch.equal(model(ids).logits, before)


def test_a_masked_token_is_as_if_its_row_were_not_there(ids):
    model = lively(ModelConfig(**SHAPE, qkv_tokens=12, proj_tokens=16, ffn_tokens=40))
    smaller = tokenformer.LanguageModel(
        ModelConfig(**SHAPE, qkv_tokens=12, proj_tokens=16, ffn_tokens=39, tau={"ffn": [40**0.5]})
    )
    rows = [i for i in range(40) if i != 7]
    state = {n: t[rows] if ".ffn." in n else t for n, t in model.state_dict().items()}
    smaller.load_state_dict({n: t.clone() for n, t in state.items()})
    with ablate(model, [Token(0, "ffn", 7), Token(1, "ffn", 7)], "mask"), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, smaller(ids).logits, atol=1e-5, rtol=1e-5)


def test_what_a_value_raises_is_raised_when_it_counts_more(model):
    where, up, down = next(found for found in vocabulary_effects(model, 3, 257) if found[0] == (1, "ffn", 0))
    hidden, value = torch.randn(32), model.blocks[1].ffn.segments[0].value_tokens[5].detach()
    moved = (model.norm(hidden + 100 * value) - model.norm(hidden)) @ model.head_rows(hidden).T
    assert up[5, 0] < 257 and moved[up[5, 0]] > moved[down[5, 0]]
    assert where[1] == "ffn"


def test_a_token_without_values_writes_nothing(model):
    with ablate(model, ["1:ffn:5"]):
        where, up, down = next(found for found in vocabulary_effects(model, 3, 257) if found[0] == (1, "ffn", 0))
    assert where[1] == "ffn" and up[5].eq(-1).all() and down[5].eq(-1).all() and up[[0, 4, 6]].ge(0).all()


def test_tokens_that_several_switch_off_come_back_with_the_last_of_them(model, ids):
    before = model(ids).logits
    first, second = ablate(model, ["0:ffn:3", "0:query:1"]), ablate(model, "0:ffn:3")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not model.blocks[0].ffn.segments[0].value_tokens[3].any()
    second.__exit__(None, None, None)
    assert torch.equal(model(ids).logits, before)

    def often():
        for _ in range(100):
            with ablate(model, ["0:ffn:3"]):
                pass

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("projection", ["ffn", "proj", "query", "value"])
def test_masks_of_several_with_blocks_count_together(model, ids, projection):
    one, other = f"0:{projection}:3", f"0:{projection}:5"
    with ablate(model, [one, other], "mask"):
        both = model(ids).logits
    with ablate(model, [one], "mask"), ablate(model, [other], "mask"):
        assert torch.equal(model(ids).logits, both)
    with ablate(model, [other], "mask"):
        assert not torch.equal(model(ids).logits, both)


def test_no_gradient_of_a_changed_model_comes_without_a_word(model, ids):
    loss = model(ids[:, :-1], labels=ids[:, 1:]).loss_sum
    with ablate(model, ["0:ffn:3"]), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_twins_are_found():
    model = lively(ModelConfig(**SHAPE, qkv_tokens=12, proj_tokens=16, ffn_tokens=40))
    segment = model.blocks[0].ffn.segments[0]
    assert twins(segment).eq(-1).all()
    with torch.no_grad():
        segment.key_tokens[9] = 1.001 * segment.key_tokens[3]
        segment.value_tokens[9] = segment.value_tokens[3]
    found = twins(segment)
    assert found[9] == 3 and found[3] == 9 and found.eq(-1).sum() == 38
    with torch.no_grad():
        segment.key_tokens[9] *= 10  # the same direction, another activation
    assert twins(segment).eq(-1).all()


def test_dead_tokens_are_those_with_zero_keys_and_without_them_nothing_changes(ids):
    model = lively(ModelConfig(**SHAPE, qkv_tokens=[12, 8], proj_tokens=16, ffn_tokens=[40, 24]))
    dead = {(0, "ffn", 0): list(range(3, 33)), (1, "ffn", 1): list(range(24)), (1, "proj", 0): [0, 5]}
    dead |= {(1, name, 0): rows for name, rows in (("query", [1, 2]), ("key", [0, 11]), ("value", [4, 5, 6]))}
    with torch.no_grad():
        for where, segment in segments(model):
            segment.key_tokens[dead.get(where, [])] = 0
    found = explore(model, [ids])
    assert {w: found.dead(w).nonzero()[:, 0].tolist() for w in found.tables if found.dead(w).any()} == dead
    smaller = remove_dead(model, {where: found.dead(where) for where in found.tables})
    assert smaller.cost().parameters == model.cost().parameters - 2 * 32 * (30 + 24 + 2 + 6)
    before, after = model(ids).logits, smaller(ids).logits
    assert (before - after).abs().max() < 1e-6 * before.abs().max()
    assert smaller.history[-1]["by"] == "explored"


def test_a_token_that_only_damps_the_others_is_not_dead(ids):
    """Its activation is zero everywhere, since its score is very negative, but it counts in the norm."""
    model = lively(ModelConfig(**SHAPE, qkv_tokens=12, proj_tokens=16, ffn_tokens=40))
    with torch.no_grad():
        x = model.blocks[0].ffn_norm(torch.ones(1, 32))
        assert x.abs().max() == 0
        model.blocks[0].ffn.segments[0].key_tokens[2] *= 1e4
    found = explore(model, [ids])
    assert not any(found.dead(where).any() for where in found.tables)


def test_the_loss_without_the_newest_segments_is_a_mean_over_the_tokens_that_come_next(model, ids):
    found = growth_view(what_growth_learned(model, ids), ids, 384)
    for mean, made in zip(found["mean"], (tokenformer.slice(model, segments=1), model), strict=True):
        _, loss, count = made(ids[:, :-1], labels=ids[:, 1:])
        assert mean == pytest.approx((loss / count).item(), rel=1e-4)
    assert found["places"] and all(place % 40 < 39 and a > b for place, a, b in found["places"])
    for id, _, times in found["best"] + found["worst"]:
        assert times == (ids[:, 1:] == id).sum()


def test_no_word_ends_the_script_that_holds_the_data_or_hides_its_end(model, ids):
    words, cards = ["</script>", "<!--", "<script>", "a < b"], list(record.cards(model, explore(model, [ids]), 4))
    page = make_page("Inside", [], cards, ids, lambda i: (words[i], words[i].encode()), 4, {}, None)
    data = page.split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in data and json.loads(data)["words"] == words


def test_another_kind_of_model_and_a_token_that_is_not_there_are_refused(model, ids):
    other = tokenformer.LanguageModel(ModelConfig(**SHAPE, kind="transformer"))
    for look in (
        lambda: explore(other, [ids]),
        lambda: direct_effects(other, ids[0, :-1], ids[0, 1:]),
        lambda: edit(other, {Token(0, "ffn", 3): 2.0}),
    ):
        with pytest.raises(UserError, match="only a TokenFormer for language can be explored"):
            look()
    for batch in ({"ids": ids}, ids[0], ids[:, :0]):
        with pytest.raises(UserError, match="explore reads tensors of ids"):
            explore(model, [batch])
    draws = tokenformer.grow(model, ffn_tokens=70, switch="draw")
    for look in (lambda: explore(draws, [ids]), lambda: direct_effects(draws, ids[0, :-1], ids[0, 1:])):
        with pytest.raises(UserError, match=r"under a switch \(draw\), which cannot be looked into"):
            look()
    strange = {"has 2 layers": Token(7, "ffn", 0), "has 64 tokens": (0, "ffn", 64), "no parameter": Token(0, "ffn", -1)}
    for said, token in strange.items():
        with pytest.raises(UserError, match=said), ablate(model, [token]):
            pass
    with pytest.raises(UserError, match="under a switch"), ablate(draws, ["0:ffn:0"], "mask"):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = lively(ModelConfig(**SHAPE, qkv_tokens=12, proj_tokens=16, ffn_tokens=40))
    grown = tokenformer.grow(base, ffn_tokens=64)
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            if "segments.1.value" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(4))
        grown.blocks[0].ffn.segments[0].key_tokens[:7] = 0
    place = tmp_path_factory.mktemp("inside")
    hub.save(grown, place / "model", tokenizer_json=ByteTokenizer().to_json())
    (place / "text.txt").write_text(TEXT)
    return place


@pytest.fixture(scope="module")
def looked(folder):
    words = ["--tokens", "2000", "--sample", "40", "--batch", "4"]
    assert (
        main(
            [
                "explore",
                str(folder / "model"),
                "--text",
                str(folder / "text.txt"),
                "--out",
                str(folder / "looked"),
                *words,
            ]
        )
        == 0
    )
    return folder / "looked"


def test_the_folder_holds_tables_lines_and_a_page(looked):
    lines = [json.loads(line) for line in (looked / "tokens.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * (3 * 12 + 16 + 64)
    by_name = {line["token"]: line for line in lines}
    assert [name for name, line in by_name.items() if line["dead"]] == [f"0:ffn:{i}" for i in range(7)]
    value, place, context = by_name["1:ffn:50"]["high"][0]
    assert by_name["1:ffn:50"]["segment"] == 1 and TEXT[place] == context.split("⟩")[0][-1]
    assert value == pytest.approx(by_name["1:ffn:50"]["high"][0][0]) and len(by_name["1:ffn:50"]["raises"]) == 8
    assert "raises" not in by_name["0:query:0"]
    assert load_file(looked / "tables.safetensors")["1.ffn.1.sum"].shape == (24,)
    assert (looked / "index.html").stat().st_size < 2_000_000


def test_rows_of_json_are_joined_by_the_end_of_a_document_and_no_more_is_read_than_asked_for(folder, tmp_path):
    rows = [{"content": "Das Café in 北京."}, {"content": "¿Qué?"}] * 40
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b"no JSON"
    (tmp_path / "rows.jsonl").write_bytes(lines)
    words = ["explore", str(folder / "model"), "--text", str(tmp_path / "rows.jsonl"), "--field", "content"]
    words += ["--tokens", "480", "--sample", "30", "--switch-off", "900", "--out", str(tmp_path / "looked")]
    assert main(words) == 0
    text = "\0".join(row["content"] for row in rows).encode()[:480]
    page = (tmp_path / "looked" / "index.html").read_text().split('type="application/json">')[1].split("</script>")[0]
    data = json.loads(page)
    ids = np.frombuffer(base64.b64decode(data["text"]["data"]), np.uint32)
    assert bytes(ids.astype(np.uint8) - 1).replace(b"\xff", b"\0") == text
    assert data["view"]["off"] == data["view"]["count"] == 50 and data["row"] == 48
    for line in map(json.loads, (tmp_path / "looked" / "tokens.jsonl").read_text().splitlines()):
        for _, place, context in line["high"] + line["low"]:
            before, after = context.split("⟩")
            row = text[place - place % 48 : place + 1].decode(errors="ignore").replace("\0", "<|endoftext|>")
            assert row.endswith(before.lstrip("�")) and "�" not in before[1:] + after.lstrip("�")


def test_dead_tokens_are_removed_by_the_command(looked, folder, ids, capsys):
    out = folder / "smaller"
    assert (
        main(["shrink", str(folder / "model"), "--by", "explored", "--explored", str(looked), "--out", str(out)]) == 0
    )
    before, after = tokenformer.load(folder / "model"), tokenformer.load(out)
    assert after.cost().parameters == before.cost().parameters - 2 * 32 * 7
    logits, others = before(ids).logits, after(ids).logits
    assert (logits - others).abs().max() < 1e-6 * logits.abs().max()
    words = ["shrink", str(out), "--by", "explored", "--explored", str(looked), "--out", str(folder / "none")]
    assert main(words) == 2
    assert "is of another model" in capsys.readouterr().err
    for more in (["--across", "model"], ["--tokens", "100"], ["--ratio", "0.5"]):
        assert main([*words, *more]) == 2 and f"needs no {more[0]}: leave it out" in capsys.readouterr().err


def test_muting_a_token_changes_what_its_card_says_it_writes(looked, folder, ids, capsys):
    card = json.loads((looked / "tokens.jsonl").read_text().splitlines()[-1])
    name, out = card["token"], folder / "edited"
    source = str(folder / "model")
    assert main(["edit", source, "--mute", name, "--boost", "0:ffn:20=2", "--out", str(out)]) == 0
    edited, model = tokenformer.load(out), tokenformer.load(folder / "model")
    assert edited.history[-1]["factors"] == {name: 0.0, "0:ffn:20": 2.0}
    value = model.blocks[1].ffn.segments[1].value_tokens[-1]
    assert edited.blocks[1].ffn.segments[1].value_tokens[-1].abs().max() == 0 < value.abs().max()
    place = card["high"][0][1]
    seen = torch.tensor([[ord(c) + 1 for c in TEXT[place // 48 * 48 : place + 1]]])
    raised, lowered = (ByteTokenizer().encode(card[which][0])[0] for which in ("raises", "lowers"))
    with ablate(model, [Token(1, "ffn", 63)]):
        off = model(seen).logits[0, -1]
    on = model(seen).logits[0, -1]
    assert on[raised] - on[lowered] > off[raised] - off[lowered]
    mistakes = {"names no parameter token": ["--mute", f"{name}=3"], "write TOKEN=FACTOR": ["--boost", f"{name}=x"]}
    mistakes["is no finite number"] = ["--boost", f"{name}=1e39"]
    for said, words in {**mistakes, "nothing to edit": [], "has 64 tokens": ["--mute", "0:ffn:99"]}.items():
        assert main(["edit", source, *words, "--out", str(folder / "never")]) == 2
        assert said in capsys.readouterr().err and not (folder / "never").exists()


def test_killed_it_goes_on_and_ends_in_the_same_tables(folder, looked):
    out = folder / "again"
    words = [sys.executable, "-m", "tokenformer", "explore", str(folder / "model"), "--text", str(folder / "text.txt")]
    words += ["--tokens", "2000", "--sample", "40", "--batch", "4", "--save-every", "0", "--out", str(out)]
    state = out.with_name(".again.exploring")
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 100
    while not state.exists() and started.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not out.exists() and state.exists()
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "going on after" in said and not state.exists()
    first, second = (load_file(place / "tables.safetensors") for place in (looked, out))
    assert all(torch.equal(first[name], second[name]) for name in first)
