"""Write text with a model: one prompt, a file of prompts, from nothing, or in conversation.

example: tokenformer generate my-folder --prompt "Once upon a time" --tokens 100 --temperature 0.8
         tokenformer generate my-folder --input-file in.txt --output-file out.txt
         tokenformer generate my-folder --interactive
         tokenformer generate 150M_eval.yml text_generation.yml

MODEL is a folder, a run, official weights or a hub name. Official config files (.yml) may stand beside it or instead:
their generation settings hold (options given here win), and eval_ckpt or load names the weights. Results are JSON lines
of context, text, length, finished, message, duration_seconds. In conversation /new forgets what was said, /quit leaves.
"""

import argparse
import sys
from pathlib import Path

from tokenformer.errors import UserError

# our options → keys of the official generation files
OPTIONS = {
    "input_file": "sample_input_file",
    "output_file": "sample_output_file",
    "num_samples": "num_samples",
    "tokens": "maximum_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="+", metavar="MODEL", help="weights, and official config files")
    add("--prompt", action="append", help="a prompt; may be given several times")
    add("--input-file", help="prompts, one a line, or JSON lines (.jsonl)")
    add("--output-file", help="where the JSON lines go (default: texts are shown)")
    add("--num-samples", type=int, help="texts from nothing")
    add("--interactive", action="store_true", help="a conversation; text comes as it is made")
    add("--no-history", action="store_true", help="in conversation: every prompt stands alone")
    add("--tokens", type=int, help="new tokens at most (default 64)")
    add("--temperature", type=float, help="0 = the most likely token (default)")
    add("--top-k", type=int, help="only the k most likely tokens")
    add("--top-p", type=float, help="only the most likely tokens of this probability together")
    add("--min-p", type=float, help="only tokens this many times as likely as the most likely")
    add("--repetition-penalty", type=float, help="against tokens that were there before")
    add("--seed", type=int, default=0, help="prompt i is drawn with seed + i")
    add("--stop", action="append", default=[], help="a text that ends a result; may be given several times")
    add("--batch", type=int, default=32, help="prompts at a time")
    add("--tokenizer", help="a name, tokenizer.json or folder (default: the model's own)")
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16, float16 (default: bfloat16 on cuda, else as stored)")


def run(args: argparse.Namespace) -> None:
    from tokenformer.eval.source import open_model
    from tokenformer.hub.official_config import load_config, read_generation
    from tokenformer.infer.engine import Engine
    from tokenformer.infer.requests import Request
    from tokenformer.strict import build

    configs = [word for word in args.source if Path(word).suffix in (".yml", ".yaml")]
    weights = [word for word in args.source if word not in configs]
    if len(weights) > 1:
        raise UserError(f"{weights[1]} is one model too many: give one, and config files that end in .yml")
    official = read_generation(*configs)
    given = {name: getattr(args, option) for option, name in OPTIONS.items() if getattr(args, option) is not None}
    kinds = {"interactive": args.interactive, "input-file": args.input_file, "unconditional": args.num_samples}
    asked = [kind for kind, wanted in kinds.items() if wanted]
    if len(asked) + bool(args.prompt) > 1:
        raise UserError("give one of --prompt, --input-file, --num-samples and --interactive")
    if asked or args.prompt:
        given["text_gen_type"] = asked[0] if asked else "unconditional"
    settings = {**official.settings, **given}
    if settings.get("text_gen_type") is None:
        raise UserError("there is nothing to write: give --prompt, --input-file, --num-samples or --interactive")
    request: Request = build(Request, settings)
    prompts = [] if request.text_gen_type == "interactive" else args.prompt or request.prompts()
    source = weights[0] if weights else official.weights
    if source is None:
        raise UserError(f"{' + '.join(configs)} names no weights: set eval_ckpt or load, or give a model first")
    if args.batch < 1:
        raise UserError(f"--batch is {args.batch}: give a number above 0")
    model, tokenizer = open_model(
        source,
        config=load_config(*configs).model if official.has_model else None,
        tokenizer=args.tokenizer,
        vocab_file=official.vocab_file,
        device=args.device,
        dtype=args.dtype,
    )
    engine = Engine(model, vocab=tokenizer.vocab_size)
    if request.text_gen_type == "interactive":
        converse(engine, tokenizer, request, args)
    else:
        write(engine, tokenizer, request, prompts, args)


def write(engine, tokenizer, request, prompts: list[str], args: argparse.Namespace) -> None:
    """All texts, shown or into a file; a single one is shown as it is made."""
    from tokenformer.infer.requests import record, token_logits, write_records
    from tokenformer.infer.text import write_texts
    from tokenformer.terminal import progress

    shown = request.sample_output_file is None
    alone = shown and len(prompts) == 1

    def said(_: int, piece: str) -> None:
        print(piece, end="", flush=True)

    if alone:
        print(prompts[0], end="", flush=True)
    records = []
    with progress("generating", len(prompts)) as advance:
        for result in write_texts(
            engine,
            tokenizer,
            prompts,
            request.maximum_tokens,
            request.sampling,
            seeds=range(args.seed, args.seed + len(prompts)),
            stops=args.stop,
            batch=args.batch,
            every=4 if alone else None,
            said=said if alone else None,
        ):
            extra = {"logits": token_logits(engine, tokenizer, result)} if request.return_logits else {}
            records.append(record(result) | extra)
            advance(1)
    if not shown:
        write_records(request.sample_output_file, records)
        print(f"{request.sample_output_file}: {len(records)} texts")
    elif alone:
        print()
    else:
        import json

        for one in records:
            print(json.dumps(one, ensure_ascii=False))


def converse(engine, tokenizer, request, args: argparse.Namespace) -> None:
    """Reads prompts from the terminal (or a pipe) until /quit or its end."""
    from tokenformer.infer.session import Session

    session = Session(
        engine,
        tokenizer,
        request.maximum_tokens,
        request.sampling,
        seed=args.seed,
        stops=args.stop,
        remember=not args.no_history,
    )
    if sys.stdin.isatty():
        import readline  # noqa: F401 (arrow keys and earlier lines)

        print("write, and the model goes on; /new forgets what was said, /quit leaves", file=sys.stderr)
    while (text := read_prompt(request.prompt_end)) is not None and text.strip() != "/quit":
        if text.strip() == "/new":
            session.clear()
        elif text:
            session.say(text, lambda piece: print(piece, end="", flush=True))
            print(flush=True)


def read_prompt(end: str) -> str | None:
    """What was typed up to `end` (a line, unless the config has another); None when there is no more."""
    text = ""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return text or None
        if end == "\n":
            return line
        before, found, _ = line.partition(end)
        text += before
        if found:
            return text
        text += "\n"
