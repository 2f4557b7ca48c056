"""`python -m gspo.distributed.ray_launch`: the processes of one `gspo train`, as actors of a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gspo.cli import Parser, read_arguments
from gspo.distributed.job import follow
from gspo.distributed.launch import status_of
from gspo.distributed.ray_actors import (
    RayProcesses,
    actors_on,
    bundle_of,
    check_room,
    connected,
    import_ray,
    start_processes,
)
from gspo.errors import BadInputError
from gspo.training.command import plan_run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is that of `gspo`: 0, 1 (the job cannot go on), 2 (bad input), 130 (Ctrl-C)."""
    given = list(sys.argv[1:] if argv is None else argv)
    return status_of(lambda: _main(given))


def _main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    for name, value in (("--processes", options.processes), ("--cpus-per-process", options.cpus_per_process)):
        if value < 1:
            raise BadInputError(f"{name}: found {value}, should be 1 or more")
    if options.command[:1] != ["train"]:
        found = options.command[0] if options.command else "nothing"
        raise BadInputError(f"{found}: on Ray runs gspo train; give train CONFIG.toml, or train --resume RUN")
    arguments, overrides = read_arguments(options.command)
    config, _ = plan_run(arguments.config, overrides, resume=arguments.resume)
    ray = import_ray()
    with connected(ray, options.address, options.processes * options.cpus_per_process):
        bundle = bundle_of(ray, config.model.device, options.cpus_per_process)
        check_room(ray, bundle, options.processes)
        with actors_on(ray, bundle, options.processes) as placed:
            start_processes(ray, placed, options.command)
            return follow(RayProcesses(ray, [actor for actor, _ in placed]), [place.address for _, place in placed])


def _parser() -> Parser:
    parser = Parser(
        prog="python -m gspo.distributed.ray_launch",
        description="Trains one policy with several processes on Ray, as torchrun does on one machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many; each gets one GPU")
    parser.add_argument(
        "--cpus-per-process", type=int, default=1, metavar="C", help="CPUs to reserve for each process (default 1)"
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help='the cluster, "auto" for the one that this machine belongs to; default: RAY_ADDRESS, else a Ray of its '
        "own on this machine, for as long as the job runs",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="train CONFIG.toml ...",
        help="as after gspo: see gspo train --help",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
