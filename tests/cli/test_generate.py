"""The verb generate: prompts, files, conversation, and the official generation settings as they are."""

import functools
import json
import os
import signal
import subprocess
import sys
from io import StringIO

import pytest
import torch

from tokenformer.cli.generate import stoppable
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.hub import save
from tokenformer.infer.quantised import rounded
from tokenformer.models import LanguageModel

KEYS = ["context", "text", "length", "finished", "message", "duration_seconds"]
OFFICIAL = """\
# the settings of the official file, in its dialect
{
  "text_gen_type": "unconditional",
  "maximum_tokens": 102,
  "prompt_end": "\\n",
  "temperature": 1.0,
  "top_p": 0.0,
  "top_k": 0,
  "recompute": false,
  "num_samples": 10,
  "sample_input_file": "sample_input.txt",
  "sample_output_file": "sample_output.txt",
}
"""


def make(context: int = 160) -> LanguageModel:
    shape = {"layers": 2, "dim": 32, "heads": 4, "qkv_tokens": 12, "proj_tokens": 8, "ffn_tokens": 24, "vocab": 384}
    model = LanguageModel(ModelConfig(**shape, context=context))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
        letters = [i for i in range(384) if 97 < i <= 123]
        model.embedding.weight[[i for i in range(384) if i not in letters]] *= 0.1  # texts are letters, mostly
    return model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Ours and official, with a tokenizer beside each."""
    root = tmp_path_factory.mktemp("models")
    save(model, root / "ours", tokenizer_json=ByteTokenizer().to_json())
    save(model, root / "official", format="official", tokenizer_json=ByteTokenizer().to_json())
    return root


def greedy(model: LanguageModel, prompt: str, n: int) -> str:
    """By the reference; the padded part of the vocabulary cannot be chosen."""
    ids = ByteTokenizer().encode(prompt) or [0]
    with torch.no_grad():
        for _ in range(n):
            ids.append(model(torch.tensor([ids])).logits[0, -1, :257].argmax().item())
            if ids[-1] == 0:
                return ByteTokenizer().decode(ids[len(prompt.encode()) or 1 : -1])
    return ByteTokenizer().decode(ids[len(prompt.encode()) or 1 :])


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_prompt_is_continued_as_the_reference_does(model, folder, capsys):
    assert main(["generate", str(folder / "ours"), "--prompt", "Once upon", "--tokens", "24"]) == 0
    assert capsys.readouterr().out == "Once upon" + greedy(model, "Once upon", 24) + "\n"


def test_weights_in_fp8_write_what_the_rounded_model_does_and_say_so(model, folder, capsys):
    command = ["generate", str(folder / "ours"), "--prompt", "Once upon", "--tokens", "24", "--weights", "fp8"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out == "Once upon" + greedy(rounded(model), "Once upon", 24) + "\n"
    assert "rounded to 8 bits, and computed in float32 without kernels, since dim is 32" in shown.err


def test_values_are_skipped_for_prompts_one_after_another_and_it_is_said(folder, capsys):
    command = ["generate", str(folder / "ours"), "--prompt", "Once upon", "--prompt", "Twice", "--tokens", "24"]
    assert main([*command, "--skip", "0.5"]) == 0
    skipped = capsys.readouterr()
    assert "50% of the value tokens are skipped, by ranges found on 159 tokens of the model: nothing is" in skipped.err
    assert main(command) == 0
    assert len(skipped.out.splitlines()) == 2 and capsys.readouterr().out != skipped.out


def test_a_file_of_prompts_becomes_json_lines_in_order(model, folder, tmp_path, capsys):
    prompts = ["first", "a second prompt", "é"]
    (tmp_path / "in.txt").write_text("first\n\n  a second prompt \né\n")
    rows = [json.dumps("first"), json.dumps({"prompt": "a second prompt"}), json.dumps({"context": "é"})]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    for name in ("in.txt", "in.jsonl"):
        out = tmp_path / f"out-{name}"
        arguments = ["--input-file", str(tmp_path / name), "--output-file", str(out), "--tokens", "20", "--batch", "2"]
        assert main(["generate", str(folder / "ours"), *arguments]) == 0
        records = lines(out)
        assert [list(r) for r in records] == [KEYS] * 3
        assert [r["context"] for r in records] == prompts
        assert [r["text"] for r in records] == [greedy(model, p, 20) for p in prompts]
        assert all(r["length"] <= 20 and r["message"] is None and r["duration_seconds"] > 0 for r in records)
    assert "3 texts" in capsys.readouterr().out


def official(tmp_path, folder, text: str = OFFICIAL):
    config = (folder / "official" / "config.yml").read_text()
    config += f"eval_ckpt: {folder / 'official' / 'pytorch_model.bin'}\nload: nowhere\n"
    (tmp_path / "model.yml").write_text(config)
    (tmp_path / "text_generation.yml").write_text(text)
    return [str(tmp_path / "model.yml"), str(tmp_path / "text_generation.yml")]


def check_official_samples(records: list[dict]) -> None:
    assert [list(r) for r in records] == [KEYS] * 10
    assert all(r["context"] == "" for r in records)
    assert len({r["text"] for r in records}) == 10  # sampled at temperature 1, each with its own seed
    for r in records:
        assert r["length"] == 102 or r["finished"]
        assert r["length"] <= 102


def test_the_official_settings_are_honoured_and_so_is_their_output(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = official(tmp_path, folder)
    assert main(["generate", *files]) == 0
    first = lines(tmp_path / "sample_output.txt")
    check_official_samples(first)
    assert main(["generate", *files, "--force"]) == 0  # the same seed
    again = lines(tmp_path / "sample_output.txt")
    assert [r["text"] for r in again] == [r["text"] for r in first]


def test_the_official_file_itself_is_honoured_as_it_is(shared, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, _ = official(tmp_path, folder)
    assert main(["generate", model, str(shared / "golden" / "configs" / "text_generation.yml")]) == 0
    check_official_samples(lines(tmp_path / "sample_output.txt"))


def test_official_input_files_end_prompts_by_their_own_mark_and_options_win(model, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = OFFICIAL.replace("unconditional", "input-file").replace('"\\n"', '"###"')
    files = official(tmp_path, folder, text.replace('"recompute": false', '"recompute": true, "return_logits": true'))
    (tmp_path / "sample_input.txt").write_text("one\nprompt### another \n###\n")
    assert main(["generate", *files, "--temperature", "0", "--tokens", "9"]) == 0
    records = lines(tmp_path / "sample_output.txt")
    assert [r["context"] for r in records] == ["one\nprompt", "another"]
    assert [r["text"] for r in records] == [greedy(model, p, 9) for p in ("one\nprompt", "another")]
    for r in records:  # the logits that each token was the best of
        assert [max(range(257), key=row.__getitem__) - 1 for row in r["logits"]] == list(r["text"].encode())


def test_a_text_that_ends_at_once_says_so_in_its_message(model, folder, tmp_path):
    stop = greedy(model, "first", 1)
    out = tmp_path / "out.jsonl"
    arguments = ["--prompt", "first", "--stop", stop, "--output-file", str(out), "--tokens", "9"]
    assert main(["generate", str(folder / "ours"), *arguments]) == 0
    (record,) = lines(out)
    assert record["text"] is None and record["length"] == 0 and record["finished"]
    assert "no text was made" in record["message"]


def test_a_conversation_remembers_until_it_is_told_not_to(model, folder, monkeypatch, capsys):
    def talk(*words: str, options=()) -> list[str]:
        monkeypatch.setattr(sys, "stdin", StringIO("\n".join(words) + "\n"))
        arguments = ["generate", str(folder / "ours"), "--interactive", "--tokens", "8", *options]
        assert main(arguments) == 0
        return capsys.readouterr().out.split("\n")[:-1]

    first = greedy(model, "abc", 8)
    second = greedy(model, "abc" + first + "def", 8)
    assert (first + second).isalpha() and second != greedy(model, "def", 8)  # the test can fail
    assert talk("abc", "def", "/new", "abc", "/quit", "never") == [first, second, first]
    assert talk("abc", "def", options=["--no-history"]) == [first, greedy(model, "def", 8)]
    long = "x" * 150  # more than the context: the oldest is forgotten
    assert talk(long, long)[1] == greedy(model, (long + greedy(model, long, 8) + long)[-152:], 8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to write"),
        (["--prompt", "a", "--interactive"], "give one of --prompt"),
        (["--input-file", "missing.txt"], "'missing.txt' cannot be read"),
        (["--prompt", "a", "--top-p", "7"], "top_p is 7.0: give at most 1"),
        (["--prompt", "a", "--top-p", "0.9"], "top_p is 0.9, but temperature 0 takes the most likely token"),
        (["--prompt", "a", "--top-k", "5", "--temperature", "0"], "top_k is 5, but temperature 0"),
        (["--interactive", "--min-p", "0.1"], "min_p is 0.1, but temperature 0"),
        (["--prompt", "a", "--stop", "b", "--stop", ""], "--stop is empty: give the text that ends a result"),
        (["--prompt", "a", "--tokens", "0"], "maximum_tokens is 0"),
        (["--prompt", "a", "--tokenizer", "gpt-neox-20b"], "has 50,277 ids but the model"),
        (["--prompt", "a" * 200], "prompt 1 has 200 tokens, the model's context is 160"),
        (["--prompt", "a", "--stop-token", "257"], "--stop-token 257 is no id: give 0 to 256"),
        (["--prompt", "a", "--stop-token", "ab"], "--stop-token 'ab' is not one token"),
        (["--interactive", "--logprobs"], "a conversation is shown as text"),
        (["--prompt", "a", "--dtype", "int8"], "dtype is 'int8'"),
        (["--prompt", "a", "--dtype", "float16", "--weights", "fp8"], "weights in fp8 are not computed in float16"),
        (["--prompt", "a", "--skip", "2"], "skip is 2: give the share of value tokens that is not read"),
        (["another-model", "--prompt", "a"], "one model too many"),
        (["--image", "a.png"], "is a language model, which reads no images: leave --image out"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", str(folder / "ours"), *arguments, "--output-file", "out.jsonl"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_conversation_needs_an_open_standard_input(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it after `<&-`
    assert main(["generate", str(folder / "ours"), "--interactive"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--top-p", "1.5"], ["--prompt", "a" * 200], ["--seed", str(1 << 63)]])
def test_nothing_is_shown_before_everything_is_checked(folder, capsys, wrong):
    prompt = [] if "--prompt" in wrong else ["--prompt", "x"]
    assert main(["generate", str(folder / "ours"), *prompt, *wrong]) == 2
    assert capsys.readouterr().out == ""


def process(*arguments: object, **keys) -> subprocess.Popen:
    """As from a terminal: where the tests run in the background, Ctrl-C is ignored and would be so in the process."""
    words = [sys.executable, "-m", "tokenformer", "generate", *arguments]
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=listen, **keys)


def test_bytes_that_are_no_text_are_one_sentence(folder, tmp_path, capsys):
    out, error = process(folder / "ours", "--prompt", b"a\xff").communicate(timeout=300)
    assert out == b"" and error == b"tokenformer: prompt 1 is not UTF-8 text ('\\udcff' is no character): convert it\n"
    (tmp_path / "in.jsonl").write_text('"a"\n"\\ud800"\n')
    assert main(["generate", str(folder / "ours"), "--input-file", str(tmp_path / "in.jsonl")]) == 2
    assert "in.jsonl, line 2 is not UTF-8 text" in capsys.readouterr().err
    talk = process(folder / "ours", "--interactive", env={**os.environ, "PYTHONUTF8": "1"})
    assert talk.communicate(b"a\xff\n", timeout=300)[1].endswith(b"is no character): convert it\n")
    assert talk.returncode == 2


def test_the_kind_of_input_says_what_is_shown_whatever_the_count(model, folder, tmp_path, capsys):
    def shown(*arguments: str) -> str:
        assert main(["generate", str(folder / "ours"), *arguments, "--tokens", "9"]) == 0
        return capsys.readouterr().out

    both = ["one" + greedy(model, "one", 9), "two" + greedy(model, "two", 9)]
    assert shown("--prompt", "one") == both[0] + "\n"
    assert shown("--prompt", "one", "--prompt", "two") == "\n".join(both) + "\n"
    for prompts in (["one"], ["one", "two"]):
        (tmp_path / "in.txt").write_text("\n".join(prompts))
        records = [json.loads(line) for line in shown("--input-file", str(tmp_path / "in.txt")).splitlines()]
        assert [list(r) for r in records] == [KEYS] * len(prompts)
        assert [r["context"] + r["text"] for r in records] == both[: len(prompts)]
    for count in (1, 2):
        records = [json.loads(line) for line in shown("--num-samples", str(count)).splitlines()]
        assert [r["text"] for r in records] == [greedy(model, "", 9)] * count


@pytest.mark.parametrize("kind", [["--prompt", "one"], ["--num-samples", "2"]])
def test_what_is_shown_is_the_same_with_a_terminal_beside_it(folder, capsys, kind):
    """A progress bar on it must not swallow what goes into a pipe."""
    arguments = [str(folder / "ours"), *kind, "--tokens", "9"]
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "tokenformer", "generate", *arguments]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}, text=True)
    os.close(theirs)
    os.close(ours)
    assert main(["generate", *arguments]) == 0
    expected = capsys.readouterr().out
    if "--prompt" in kind:
        assert done.stdout == expected
    else:
        assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == [
            json.loads(line)["text"] for line in expected.splitlines()
        ]


def test_log_probabilities_stand_in_the_json_lines(model, folder, capsys):
    assert main(["generate", str(folder / "ours"), "--prompt", "one", "--tokens", "9", "--logprobs"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record) == [*KEYS, "logprobs"]
    ids = ByteTokenizer().encode("one" + record["text"])
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)[2:-1].gather(1, torch.tensor([ids[3:]]).T)[:, 0]
    assert len(record["logprobs"]) == record["length"] == 9
    assert torch.allclose(torch.tensor(record["logprobs"]), expected, atol=1e-4)


def test_a_stop_token_ends_a_text_by_its_id_or_its_text(model, folder, monkeypatch, capsys):
    text = greedy(model, "one", 9)
    stop = next(letter for letter in text if letter != text[0])
    cut = text[: text.index(stop)]
    for word in (stop, str(ord(stop) + 1)):
        for more in ([], ["--stop-token", "0"]):
            arguments = ["--prompt", "one", "--tokens", "9", "--stop-token", word, *more]
            assert main(["generate", str(folder / "ours"), *arguments]) == 0
            assert capsys.readouterr().out == "one" + cut + "\n"
    monkeypatch.setattr(sys, "stdin", StringIO("one\n"))
    assert main(["generate", str(folder / "ours"), "--interactive", "--tokens", "9", "--stop-token", stop]) == 0
    assert capsys.readouterr().out == cut + "\n"


def test_a_full_context_says_so(folder, tmp_path, capsys):
    message = "the model's context is full: no more than 10 new tokens fit behind this prompt"
    assert main(["generate", str(folder / "ours"), "--prompt", "a" * 150, "--tokens", "1000"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"prompt 1: {message}\n" and shown.out.startswith("a" * 150)
    (tmp_path / "in.txt").write_text("a" * 150 + "\n")
    for tokens, said in (("10", None), ("11", message)):
        assert (
            main(["generate", str(folder / "ours"), "--input-file", str(tmp_path / "in.txt"), "--tokens", tokens]) == 0
        )
        record = json.loads(capsys.readouterr().out)
        assert (record["length"], record["finished"], record["message"]) == (10, False, said)


def test_a_prompt_of_a_file_is_called_by_its_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    long = "a" * 200
    (tmp_path / "in.txt").write_text(f"first\n\n{long}\n")
    (tmp_path / "in.jsonl").write_text(f'"a\u2028b"\n\n{json.dumps(long)}\n')
    for name in ("in.txt", "in.jsonl"):
        arguments = ["--input-file", name, "--batch", "1", "--output-file", "out"]
        assert main(["generate", str(folder / "ours"), *arguments]) == 2
        assert f"tokenformer: {name}, line 3 has 200 tokens" in capsys.readouterr().err
    (tmp_path / "in.txt").write_text(f"one\nprompt###\n\n{long}###")
    (tmp_path / "mark.yml").write_text("prompt_end: '###'\n")
    assert main(["generate", str(folder / "ours"), "mark.yml", "--input-file", "in.txt"]) == 2
    assert "tokenformer: in.txt, line 4 has 200 tokens" in capsys.readouterr().err


def test_prompts_come_from_standard_input_too_and_a_byte_order_mark_is_none_of_them(model, folder, tmp_path, capsys):
    text = "\ufefffirst\r\né\n".encode()
    reader = process(folder / "ours", "--input-file", "-", "--tokens", "9")
    out, error = reader.communicate(text, timeout=300)
    assert (reader.returncode, error) == (0, b"")
    records = [json.loads(line) for line in out.decode().splitlines()]
    assert [r["context"] for r in records] == ["first", "é"]
    assert [r["text"] for r in records] == [greedy(model, p, 9) for p in ("first", "é")]
    (tmp_path / "in.txt").write_bytes(text)
    (tmp_path / "in.jsonl").write_bytes('\ufeff"first"\n'.encode())
    for name in ("in.txt", "in.jsonl"):
        assert main(["generate", str(folder / "ours"), "--input-file", str(tmp_path / name), "--tokens", "9"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[0])["text"] == records[0]["text"]
    _, error = process(folder / "ours", "--input-file", "-").communicate(b"\n", timeout=300)
    assert error == b"tokenformer: standard input holds no prompt: write one per line\n"


def test_a_key_that_generation_does_not_know_is_refused(folder, tmp_path, capsys):
    (tmp_path / "settings.yml").write_text("top_q: 0.5\n")
    assert main(["generate", str(folder / "ours"), str(tmp_path / "settings.yml"), "--prompt", "a"]) == 2
    assert "'top_q' is not one that we know (did you mean 'top_p'?)" in capsys.readouterr().err
    (tmp_path / "settings.yml").write_text("min_p: 7\n")  # ours, but settings all the same
    assert main(["generate", str(folder / "ours"), str(tmp_path / "settings.yml"), "--prompt", "a"]) == 2
    assert "min_p is 7.0: give at most 1" in capsys.readouterr().err


def test_words_after_a_slash_are_commands_and_paths_are_text(model, folder, monkeypatch, capsys):
    words = ["/help", "/set top_p", "/usr/bin", " /help", "// no", "/quit"]
    monkeypatch.setattr(sys, "stdin", StringIO("\n".join(words) + "\n"))
    assert main(["generate", str(folder / "ours"), "--interactive", "--tokens", "8", "--no-history"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split("\n")[:-1] == [greedy(model, text, 8) for text in words[2:5]]
    known = "is no command: /new forgets what was said, /quit leaves; a space before it makes it text"
    assert shown.err.splitlines() == [f"/help {known}", f"/set {known}"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that goes on for very long."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    save(make(context=200_000), folder, tokenizer_json=ByteTokenizer().to_json())
    return folder


@pytest.mark.parametrize("leave", [True, False])
def test_ctrl_c_stops_an_answer_and_leaves_between_two(endless, leave):
    talk = process(endless, "--interactive", "--tokens", "100000")
    assert talk.stdin and talk.stdout and talk.stderr
    try:
        for turn in ("abc", "def"):
            talk.stdin.write(f"{turn}\n".encode())
            talk.stdin.flush()
            assert talk.stdout.read(20).isalpha()  # the answer is under way
            talk.send_signal(signal.SIGINT)
            assert talk.stderr.readline() == b"stopped; Ctrl-C again leaves\n"
            assert len(talk.stdout.readline()) < 50_000  # what is left of it
        if leave:
            talk.send_signal(signal.SIGINT)
        out, error = talk.communicate(None if leave else b"/quit\n", timeout=300)
        assert (talk.returncode, out) == (130 if leave else 0, b"")
        assert error == (b"tokenformer: interrupted\n" if leave else b"")
    finally:
        talk.kill()


def test_a_second_ctrl_c_in_one_answer_interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), stoppable() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGINT)
            assert stopped()
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
