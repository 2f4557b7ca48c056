"""A Ray cluster of two machines with one CPU each, both of them this one; it lasts until standard input is closed."""

import sys

from ray.cluster_utils import Cluster

MACHINE = {"num_cpus": 1, "object_store_memory": 10**8}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
    cluster.add_node(**MACHINE)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
