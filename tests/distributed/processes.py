"""Runs one function in several processes that form a world, as `torchrun` would start them."""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
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
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"{rank}.json" for rank in range(size)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.processes", str(answer), function, *arguments],
                env=environment(rank, size, port),
                cwd=REPOSITORY,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, answer in enumerate(answers)
        ]
        try:
            errors = [process.communicate(timeout=seconds)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, said in zip(started, errors, strict=True):
            assert process.returncode == 0, said
        return [json.loads(answer.read_text()) for answer in answers]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    module, _, name = sys.argv[2].partition(":")
    Path(sys.argv[1]).write_text(json.dumps(getattr(importlib.import_module(module), name)(*sys.argv[3:])))
    # After a collective that was given up, gloo's threads are still there, and Python's own way out may abort on them.
    os._exit(0)
