"""A Ray cluster of two nodes on this host, with a made-up GPU each.

Prints its address; kills the second node at a first line of input, and ends at a second one.
"""

import sys
from typing import Any

from ray.cluster_utils import Cluster

GPUS: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args=GPUS)
    node = cluster.add_node(**GPUS)
    print(f"address {cluster.address}", flush=True)
    sys.stdin.readline()
    cluster.remove_node(node, allow_graceful=False)
    print("killed", flush=True)
    sys.stdin.readline()
    cluster.shutdown()
