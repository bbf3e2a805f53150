"""Write text with a model: from a prompt, a file of prompts, without a prompt, or in conversation.

example: tokenformer generate my-folder --prompt "Once upon a time" --tokens 100 --temperature 0.8
         tokenformer generate my-folder --input-file in.txt --output-file out.txt
         tokenformer generate my-folder --interactive
         tokenformer generate runs/captions --image fox.png --prompt "Is it an animal?"
         tokenformer generate 150M_eval.yml text_generation.yml

MODEL is a folder, a run, official weights or a hub name. Official config files (.yml) may stand beside it or instead:
their generation settings hold (options given here win), and eval_ckpt or load names the weights. What --prompt asks
for is shown as text; other results, and those of --output-file and --logprobs, are JSON lines of context, text, length,
finished, message, duration_seconds. A model that reads images (`model.of: caption`) says what is on those of --image,
or continues the prompts, such as questions, after each. In conversation /new forgets what was said, /quit leaves,
Ctrl-C stops an answer.
"""

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from tokenformer.errors import UserError

# keys of the official generation files → our options, where these have other names
OPTIONS = {"sample_input_file": "input_file", "sample_output_file": "output_file", "maximum_tokens": "tokens"}
COMMANDS = "/new forgets what was said, /quit leaves"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="+", metavar="MODEL", help="weights, and official config files")
    add("--prompt", action="append", help="a prompt; may be given several times")
    add("--image", action="append", default=[], metavar="FILE", help="an image to write about; likewise, and folders")
    add("--input-file", help="prompts, one per line, or JSON lines (.jsonl); - reads lines from standard input")
    add("--output-file", help="where the JSON lines go (default: they are shown)")
    add("--force", action="store_true", help="replace a file of that name")
    add("--num-samples", type=int, help="texts without a prompt")
    add("--interactive", action="store_true", help="a conversation; text comes as it is made")
    add("--no-history", action="store_true", help="in conversation: forget earlier prompts and texts")
    add("--tokens", type=int, help="new tokens at most (default 64)")
    add("--temperature", type=float, help="0 = the most likely token (default)")
    add("--top-k", type=int, help="only the k most likely tokens")
    add("--top-p", type=float, help="only the most likely tokens of this probability in total")
    add("--min-p", type=float, help="only tokens of at least this share of the highest probability")
    add("--repetition-penalty", type=float, help="against tokens that were there before")
    add("--seed", type=int, default=0, help="prompt i is drawn with seed + i")
    add("--stop", action="append", default=[], help="a text that ends a result; may be given several times")
    add("--stop-token", action="append", default=[], help="a token (its id or text) that ends a result; likewise")
    add("--adapter", action="append", default=[], metavar="FOLDER[=WEIGHT]", help="attach an adapter; likewise")
    add("--logprobs", action="store_true", help="JSON lines, with the log-probability of each new token")
    add("--batch", type=int, default=32, help="prompts at a time")
    add("--tokenizer", help="a name, tokenizer.json or folder (default: the model's own)")
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16, float16 (default: bfloat16 on cuda, else as stored)")
    add("--weights", choices=["fp8"], help="fp8: round them to 8 bits; on a GPU a step then reads half the bytes")
    add("--skip", type=float, metavar="SHARE", help="do not read this share of value tokens; one prompt at a time")


def run(args: argparse.Namespace) -> int | None:
    from tokenformer.adapters import attach_all
    from tokenformer.files import check_writable
    from tokenformer.hub.open import open_model, split_words
    from tokenformer.infer.engine import Engine
    from tokenformer.infer.requests import Prompt, Request, stop_token
    from tokenformer.strict import build

    source, configs, official = split_words(args.source)
    options = {field.name: getattr(args, OPTIONS.get(field.name, field.name), None) for field in fields(Request)}
    given = {name: value for name, value in options.items() if value is not None}
    kinds = {"interactive": args.interactive, "input-file": args.input_file, "unconditional": args.num_samples}
    asked = [kind for kind, wanted in kinds.items() if wanted]
    if len(asked) + bool(args.prompt) > 1:
        raise UserError("give one of --prompt, --input-file, --num-samples and --interactive")
    if args.image and not asked and not args.prompt:
        args.prompt = [""]
    if asked or args.prompt:
        given["text_gen_type"] = asked[0] if asked else "unconditional"
    settings = {**official.settings, **given}
    if settings.get("text_gen_type") is None:
        raise UserError("there is nothing to write: give --prompt, --input-file, --num-samples or --interactive")
    request: Request = build(Request, settings)
    talks = request.text_gen_type == "interactive"
    if talks and (args.logprobs or args.output_file):
        raise UserError("a conversation is shown as text: leave --logprobs and --output-file out")
    if talks and sys.stdin is None:
        raise UserError("standard input is closed, and a conversation reads it: leave --interactive out, or open it")
    if not talks and request.sample_output_file is not None:
        check_writable(request.sample_output_file, args.force)
    named = [Prompt(text, f"prompt {i}") for i, text in enumerate(args.prompt or [], 1)]
    prompts = [] if talks else named or request.prompts()
    if "" in args.stop:
        raise UserError("--stop is empty: give the text that ends a result, or leave it out")
    if args.skip is not None:
        args.batch = 1
    if args.batch < 1:
        raise UserError(f"--batch is {args.batch}: give a number above 0")
    opened = open_model(source, configs, tokenizer=args.tokenizer, device=args.device, dtype=args.dtype)
    opened.prepare = partial(attach_all, words=args.adapter)
    if args.image and opened.config.of == "language":
        raise UserError(f"{args.source[0]} is a language model, which reads no images: leave --image out")
    if args.image:
        opened.need("caption")
    tokenizer = opened.tokenizer
    engine = Engine(opened.language, vocab=tokenizer.vocab_size, weights=args.weights, skip=args.skip)
    for sentence in engine.said:
        print(sentence, file=sys.stderr)
    stop_ids = [stop_token(tokenizer, word) for word in args.stop_token]
    do = partial(converse if talks else write, engine, request=request, stop_ids=stop_ids, args=args)
    do = do if talks else partial(do, prompts=prompts)
    if args.image:
        lines = not talks and (args.logprobs or bool(request.return_logits))
        return about_images(engine, opened, do, args, talks or request.sample_output_file is not None, lines)
    do(tokenizer)


def about_images(engine, opened, do: Callable, args: argparse.Namespace, one: bool, lines: bool) -> int:
    """Write about each image of the command line; a damaged one is named, and the exit code is then 2.

    `one`: there may be one image alone. `lines`: results are JSON lines, which name their image.
    """
    import dataclasses

    from tokenformer.data.images.folders import find_images
    from tokenformer.data.images.samples import batches
    from tokenformer.infer.captions import Beginning, look_at
    from tokenformer.infer.images import reading

    images = find_images(args.image)
    if one and len(images) > 1:
        raise UserError("a conversation, and --output-file, are about one image: give --image once")
    settings, size = reading(opened.model)
    damaged = 0
    for number, pixels, _, damage in batches(images, dataclasses.replace(settings, damaged="skip"), size, 1):
        if damage:
            what = "left out" if len(images) > 1 else "give another file"
            print(f"tokenformer: {images.name(number)} is damaged ({damage[0]}): {what}", file=sys.stderr)
            damaged += 1
            continue
        look_at(engine, opened.model, pixels[0], settings)
        if len(images) > 1 and not lines:
            print(f"{images.name(number)}: ", end="", flush=True)
        do(Beginning(opened.text_tokenizer), **({"image": images.name(number)} if lines else {}))
    return 2 if damaged else 0


def write(
    engine, tokenizer, request, stop_ids: list[int], args: argparse.Namespace, prompts: list, image: str | None = None
) -> None:
    """Write all texts, to the screen or a file. Those of --prompt are shown as text, a single one as it is made.

    `image`: what they are about, which JSON lines name.
    """
    import json

    from tokenformer.files import write_text
    from tokenformer.infer.requests import record, token_logits
    from tokenformer.infer.text import LIVE, write_texts
    from tokenformer.terminal import progress

    shown = request.sample_output_file is None
    plain = shown and bool(args.prompt) and not args.logprobs and not request.return_logits
    alone = plain and len(prompts) == 1

    def show(_: int, piece: str) -> None:
        print(piece, end="", flush=True)

    results = write_texts(
        engine,
        tokenizer,
        [prompt.text for prompt in prompts],
        request.maximum_tokens,
        request,
        seeds=range(args.seed, args.seed + len(prompts)),
        stops=args.stop,
        batch=args.batch,
        every=LIVE if alone else None,
        logprobs=args.logprobs,
        on_piece=show if alone else None,
        stop_ids=stop_ids,
        names=[prompt.name for prompt in prompts],
        switches=[prompt.switches(engine) for prompt in prompts],
    )
    if alone:
        print(prompts[0].text, end="", flush=True)
    records = []
    with contextlib.ExitStack() as stack:
        # no progress bar while texts are shown: it would overwrite them
        advance = None if shown else stack.enter_context(progress("generating", len(prompts)))
        for prompt, result in zip(prompts, results, strict=True):
            one = record(result) if image is None else {"image": image, **record(result)}
            if args.logprobs:
                one["logprobs"] = result.logprobs
            if request.return_logits:
                one["logits"] = token_logits(engine, tokenizer, result, prompt.switches(engine))
            if plain:
                print("" if alone else result.context + result.text, flush=True)
                if one["message"]:
                    print(f"{prompt.name}: {one['message']}", file=sys.stderr)
            elif shown:
                print(json.dumps(one, ensure_ascii=False), flush=True)
            else:
                records.append(json.dumps(one, ensure_ascii=False))
            if advance:
                advance(1)
    if not shown:
        write_text(request.sample_output_file, "".join(line + "\n" for line in records))
        print(f"{request.sample_output_file}: {len(records)} texts")


def converse(engine, tokenizer, request, stop_ids: list[int], args: argparse.Namespace) -> None:
    """Read prompts from the terminal (or a pipe) until /quit or its end, and continue each."""
    from tokenformer.infer.text import Session

    session = Session(
        engine,
        tokenizer,
        request.maximum_tokens,
        request,
        seed=args.seed,
        stops=args.stop,
        remember=not args.no_history,
        stop_ids=stop_ids,
    )
    if sys.stdin.isatty():
        import readline  # noqa: F401 (arrow keys and earlier lines)

        print(f"write, and the model continues; {COMMANDS}, Ctrl-C stops an answer", file=sys.stderr)
    while (text := read_prompt(request.prompt_end)) is not None and text.rstrip() != "/quit":
        if text.rstrip() == "/new":
            session.history = ""
        elif re.match(r"/[A-Za-z]+(\s|$)", text):
            print(f"{text.split()[0]} is no command: {COMMANDS}; a space before it makes it text", file=sys.stderr)
        elif text:
            with stoppable() as stopped:
                result = session.say(text, lambda piece: print(piece, end="", flush=True), stopped)
            print(flush=True)
            if stopped():
                print("stopped; Ctrl-C again leaves", file=sys.stderr)
            elif result.full:
                print("the model's context is full: /new begins anew, fewer --tokens leave more room", file=sys.stderr)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed in this block; a second one interrupts as everywhere."""
    came = []

    def hear(*_: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(True)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


def read_prompt(end: str) -> str | None:
    """Return what was typed up to `end` (a line, unless the config has another); None when there is no more."""
    text = ""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return text or None
        except UnicodeDecodeError:
            raise UserError("standard input is not UTF-8 text: convert it") from None
        if end == "\n":
            return line
        before, found, _ = line.partition(end)
        text += before
        if found:
            return text
        text += "\n"
