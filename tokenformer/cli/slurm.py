"""Write a Slurm script that trains on many nodes, and submit it if asked.

example: tokenformer slurm lm/1.5b data.path=prepared/pile batch=512 parallel.shard=64 \\
           --nodes 8 --gpus-per-node 8 --out runs/pile --time 48:00:00 --submit

The job saves when Slurm signals the end of its time or a preemption, requeues itself and resumes.
"""

import argparse
import subprocess
from pathlib import Path

from tokenformer.cli.main import split_settings
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="config file, preset, or run folder")
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="a.b=c", help="keys laid over the config; more config files"
    )
    parser.add_argument("--nodes", type=int, help="machines (default: an official file's num_nodes)")
    parser.add_argument("--gpus-per-node", type=int, help="0: the CPU (default: an official file's num_gpus)")
    parser.add_argument("--out", metavar="RUN", help="run folder, the script beside it (default: the config's `out`)")
    parser.add_argument("--time", default="24:00:00", help="time limit of one job (default: 24:00:00)")
    parser.add_argument("--partition", help="partition of the cluster")
    parser.add_argument("--account", help="account to charge")
    parser.add_argument("--cpus-per-gpu", type=int, help="cores for each process")
    parser.add_argument("--name", default="tokenformer", help="name of the job (default: tokenformer)")
    for name, about in {
        "mem": "memory of a node, such as 500G",
        "qos": "quality of service",
        "constraint": "features that nodes must have",
        "gres": "generic resources, in place of --gpus-per-node's own",
    }.items():
        parser.add_argument(f"--{name}", help=about)
    parser.add_argument("--exclusive", action="store_true", help="ask for whole nodes")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY=VALUE", help="any other option of sbatch; may be repeated"
    )
    parser.add_argument("--setup", metavar="FILE", help="file that the job sources first: modules, NCCL variables")
    parser.add_argument(
        "--prelude", action="append", default=[], metavar="COMMAND", help="command that it then runs; may be repeated"
    )
    parser.add_argument(
        "--srun", action="append", default=[], metavar="OPTION", help="option of srun: --srun=--container-image=IMAGE"
    )
    parser.add_argument("--container", metavar="WORDS", help="before python: 'apptainer exec --nv image.sif'")
    parser.add_argument("--signal-before", type=int, default=120, help="seconds to save before the end (default: 120)")
    parser.add_argument("--restarts", type=int, default=3, help="restarts after a dead worker (default: 3)")
    parser.add_argument("--force", action="store_true", help="replace another script of this name")
    parser.add_argument("--submit", action="store_true", help="submit it with sbatch")


def run(args: argparse.Namespace) -> int:
    from tokenformer.files import check_writable, write_text
    from tokenformer.hub.official_config import launch_of
    from tokenformer.hub.open import means_weights, read_config
    from tokenformer.parallel.mesh import check, degrees
    from tokenformer.parallel.slurm import Job, renewed, script
    from tokenformer.parsing import is_folder, read_text
    from tokenformer.train.run import with_batch_sizes

    source = Path(args.config)
    inside = is_folder(source / "checkpoints") and args.out in (None, args.config)  # a run to resume
    more, settings = split_settings(args.settings)
    files = [source / "config.yml" if inside else args.config, *more]
    config = read_config(*files, overrides=settings, training=True)
    nodes, gpus = launch_of(*(name for name in files if not means_weights(name)))
    nodes = nodes if args.nodes is None else args.nodes
    gpus = gpus if args.gpus_per_node is None else args.gpus_per_node
    out = args.out or (args.config if inside else config.out)
    if nodes is None or gpus is None or out is None:
        raise UserError("say how many nodes and GPUs, and where to: --nodes N --gpus-per-node G --out RUN")
    if args.setup and not Path(args.setup).is_file():
        raise UserError(f"--setup {args.setup} is no file: give one that bash can source")
    same = ("time", "partition", "account", "name", "cpus_per_gpu", "signal_before", "restarts", "mem", "exclusive")
    same += ("qos", "constraint", "gres", "setup", "container")
    many = {"more": tuple(args.sbatch), "prelude": tuple(args.prelude), "srun": tuple(args.srun)}
    job = Job(nodes, gpus, **{name: getattr(args, name) for name in same}, **many)
    text = script(job, out, [args.config, *args.settings])
    laid = degrees(config.parallel, nodes * max(1, gpus))
    check(config.model, laid, config.parallel)
    with_batch_sizes(config, laid.replicate * laid.shard, laid.pipeline)
    if not config.data.path:
        raise UserError("data.path is missing: name a set made by `tokenformer prepare`")
    path = Path(f"{out}.sbatch")
    check_writable(path)
    if path.exists() and not args.force and (old := read_text(path)) != text:
        kept = renewed(old, text)
        if kept is None:
            raise UserError(
                f"{path} is there already and differs inside of what this command writes: move your lines between the "
                "marked blocks, give another --out, or --force to replace it"
            )
        text = kept
    write_text(path, text)
    print(f"{path}: {nodes} nodes × {max(1, gpus)} processes, {laid}")
    if args.cpus_per_gpu is None:
        print("it asks for no CPUs, so a cluster may give one per node: --cpus-per-gpu N asks for more")
    if not args.submit:
        print(f"submit it with: sbatch {path}")
        return 0
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("there is no sbatch here: submit from the cluster, or leave --submit out") from None
    if done.returncode:
        raise UserError(f"sbatch refused {path}: {done.stderr.strip()}")
    print(done.stdout.strip())
    return 0
