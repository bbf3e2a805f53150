"""Answer requests for texts over HTTP: the OpenAI protocol, and a page to write with in the browser.

example: tokenformer serve my-folder
         tokenformer serve my-folder --adapter poems --port 8080
         tokenformer serve my-folder --host 0.0.0.0 --api-key "$KEY"

MODEL is a folder, a run, official weights or a hub name. The page is at http://127.0.0.1:8000/, for other programs
http://127.0.0.1:8000/v1 is the address of an OpenAI server with /v1/completions, /v1/models and, where the folder has a
chat template, /v1/chat/completions. Adapters are models of their own there, by the name of their folder. /health and
/metrics (Prometheus) tell how it goes. SIGTERM and Ctrl-C let it finish what it has begun.
"""

import argparse

from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="+", metavar="MODEL", help="weights, and official config files")
    add("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, help="the port (default 8000; 0: a free one)")
    add("--api-key", help="what clients must send, also by the environment variable TOKENFORMER_API_KEY")
    add("--no-auth", action="store_true", help="let anybody who reaches another address than loopback use it")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="FOLDER[=WEIGHT]",
        help="an adapter; may be repeated",
    )
    add("--name", help="what clients call the model (default: the name of its folder)")
    add("--rows", type=int, help="texts at a time, each with its part of the cache (default: 64 on a GPU, else 16)")
    add("--queue", type=int, default=512, help="texts that may wait; more get status 429 (default 512)")
    add("--max-tokens", type=int, help="new tokens of a text, at most (default: the model's context)")
    add("--tokenizer", help="a name, tokenizer.json or folder (default: the model's own)")
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16, float16 (default: bfloat16 on cuda, else as stored)")
    add("--weights", choices=["fp8"], help="fp8: round them to 8 bits; on a GPU a step then reads half the bytes")


def run(args: argparse.Namespace) -> int:
    import os

    from tokenformer.serve.run import Address, open_service, serve

    key = args.api_key if args.api_key is not None else os.environ.get("TOKENFORMER_API_KEY")
    if key == "":
        raise UserError("the API key is empty: give one, or leave --api-key out")
    for name in ("rows", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: give a number above 0")
    if "" in args.source:
        raise UserError("the name of the model is empty: give a folder, a run, official weights or a hub name")
    if args.queue < 0:
        raise UserError(f"--queue is {args.queue}: give 0 or more")
    address = Address(args.host, args.port, key, args.no_auth)  # is checked before the model is read
    return serve(open_service(args, address), address)
