"""Runs one function in several processes that form a world, as `torchrun` would start them."""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def environment(rank=0, size=1, port=0, **extra):
    """The variables that a launcher sets, over those of this process."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


def run_processes(function, size, *arguments, seconds=120):
    """What `module:function` returns on each of `size` processes, as JSON; it is called with the given text.

    A process that does not end in time fails the test, and so does one that raises.
    """
    started = start_processes(function, size, *arguments)
    try:
        answers = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, answers, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in answers]


def start_processes(function, size, *arguments):
    """The processes themselves, with pipes for what they say."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.processes", function, *arguments],
            env=environment(rank, size, port),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*sys.argv[2:])))
