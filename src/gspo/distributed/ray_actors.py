"""One actor of a Ray cluster for each process of a job: where they run, under what, and what happens to them.

Each actor gets a bundle of one placement group and starts the very process that `torchrun` would start, under the same
variables. Nothing else imports Ray.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gspo.distributed.supervised import Said, SupervisedProcess
from gspo.errors import BadInputError, GspoError
from gspo.imports import describe

PLACEMENT_SECONDS = 30.0
"""How long room that other jobs hold is waited for."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is: the machine's Ray id and address, and the GPUs it was given ("" without)."""

    node: str
    address: str
    gpus: str = ""


def import_ray() -> Any:
    """The module; it reports no usage unless the user turned that on. Raises BadInputError where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise BadInputError("--processes: needs Ray, which is not installed; pip install 'gspo[ray]'") from None
    return ray


@contextmanager
def connected(ray: Any, address: str | None, cpus: int) -> Iterator[None]:
    """Connects to a cluster, or starts a Ray on this machine that has at least so many CPUs and ends afterwards.

    Raises:
        BadInputError: there is no cluster, or it does not take this program's Ray, Python or token.
        GspoError: an actor could not be started.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if "://" in address:
        raise BadInputError(f"--address {address}: a Ray client cannot start this; run it on a machine of the cluster")
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    own: dict[str, Any] = {}
    if address == "local":
        # CPUs are only counted. The token would otherwise be written to the home directory.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        own = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False, "object_store_memory": 10**8}
    try:
        if ":" in address:  # Ray itself takes a minute and a half to give up
            socket.create_connection(_host_and_port(address), timeout=5).close()
        ray.init(
            address=address,
            runtime_env={"env_vars": variables},
            log_to_driver=False,
            logging_level="ERROR",
            **own,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise BadInputError(f"--address {address}: no Ray to connect to ({describe(error)})") from None
    try:
        yield
    except ray.exceptions.RayError as error:
        raise GspoError(
            f"Ray could not start an actor ({describe(error)}); is gspo installed on every machine?"
        ) from None
    finally:
        ray.shutdown()


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def bundle_of(ray: Any, device: str, cpus: int) -> dict[str, int]:
    """What one process asks for. Without GPUs in the cluster `model.device = "auto"` means CPUs."""
    on_gpu = device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return {"CPU": cpus, "GPU": 1} if on_gpu else {"CPU": cpus}


def check_room(ray: Any, bundle: Mapping[str, int], processes: int) -> None:
    """Raises BadInputError if the cluster could never hold so many bundles, however idle it is."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(has.get(name, 0) // amount) for name, amount in bundle.items()) for has in nodes)
    if room < processes:
        totals = [f"{sum(has.get(name, 0) for has in nodes):g} {name}" for name in bundle]
        without = ', or set model.device = "cpu" to train without GPUs' if "GPU" in bundle else ""
        raise BadInputError(
            f"--processes {processes}: each asks for {_text(bundle)}, and Ray has room for {room}, with "
            f"{' and '.join(totals)} on {len(nodes)} machine(s); lower --processes or --cpus-per-process{without}"
        )


def _text(bundle: Mapping[str, int]) -> str:
    return " and ".join(f"{amount} {name}" for name, amount in bundle.items())


@contextmanager
def actors_on(ray: Any, bundle: dict[str, int], processes: int) -> Iterator[list[tuple[Any, Place]]]:
    """An actor on each bundle of one placement group, in the order of the ranks; all of them are gone afterwards.

    Ranks of a machine follow one another, those of this machine first: the main process writes the run folder.
    """
    from ray.util import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actors: list[Any] = []
    group = placement_group([bundle] * processes, strategy="PACK")
    try:
        if not group.wait(PLACEMENT_SECONDS):
            free = {name: ray.available_resources().get(name, 0) for name in bundle}
            raise GspoError(
                f"{processes} processes with {_text(bundle)} each found no room in {PLACEMENT_SECONDS:g} s, "
                f"{' and '.join(f'{n:g} {name}' for name, n in free.items())} free; start again when other jobs end"
            )
        on_node = placement_group_table(group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        actors += [
            ray.remote(SupervisedProcess)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=3,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote()
            for index in range(processes)
        ]
        gpus = ray.get([actor.visible_gpus.remote() for actor in actors]) if "GPU" in bundle else [""] * processes
        places = [Place(on_node[i], addresses[on_node[i]], gpus[i]) for i in range(processes)]
        here = ray.get_runtime_context().get_node_id()
        order = sorted(range(processes), key=lambda i: (places[i].node != here, places[i].node, i))
        yield [(actors[i], places[i]) for i in order]
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def start_processes(ray: Any, placed: Sequence[tuple[Any, Place]], words: Sequence[str]) -> None:
    """Starts `gspo` with these words on every actor, in this program's working directory and with its variables.

    Variables that a machine sets itself stay as they are there, except PYTHONPATH and OMP_NUM_THREADS.
    """
    places = [place for _, place in placed]
    main = placed[0][0]
    port = ray.get(main.open_store.remote(places[0].address)) if len(placed) > 1 else 0
    common = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    folder = os.getcwd()
    started = ray.get(
        [
            actor.start.remote(words, folder, common, threads | own)
            for (actor, _), own in zip(placed, variables(places, port), strict=True)
        ]
    )
    if not all(started):
        without = places[started.index(False)].address
        raise BadInputError(
            f"{folder}: not on {without}; start the job in a folder that all machines of the cluster see under one path"
        )


def variables(places: Sequence[Place], port: int) -> list[dict[str, str]]:
    """What `torchrun` sets, for each rank: ranks of one machine count up in LOCAL_RANK.

    Ray shows each actor its own GPU alone. A process gets to see those of all ranks on its machine, in their order: so
    the GPU of its own number is its own, and NCCL reaches its neighbours'.
    """
    found = []
    for rank, place in enumerate(places):
        beside = [other for other in places if other.node == place.node]
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(sum(other.node == place.node for other in places[:rank])),
        }
        if len(places) > 1:
            own |= {
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
        if place.gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(other.gpus for other in beside)
        found.append(own)
    return found


class RayProcesses:
    """What happens to the actors' processes: one call to each is always under way, and returns with the next event."""

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray, self._actors = ray, actors
        self._awaited = {actor.follow.remote(): rank for rank, actor in enumerate(actors)}

    def next_event(self, seconds: float) -> tuple[int, Said | int | str] | None:
        ready, _ = self._ray.wait(list(self._awaited), timeout=seconds)
        if not ready:
            return None
        rank = self._awaited.pop(ready[0])
        try:
            event: Said | int = self._ray.get(ready[0])
        except self._ray.exceptions.RayActorError as error:
            return rank, f"lost with its Ray actor ({describe(error)})"
        if isinstance(event, tuple):
            self._awaited[self._actors[rank].follow.remote()] = rank
        return rank, event

    def interrupt(self) -> None:
        for actor in self._actors:
            actor.interrupt.remote()
