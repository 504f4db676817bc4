"""A Ray cluster of several nodes on this machine, by `ray.cluster_utils.Cluster`.

The nodes belong to a process of their own, run as `python ray_cluster.py CPUS…`: Ray's libraries
and their warnings stay there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STORE_BYTES = 80 * 2**20
"""Size of each node's object store; the minimum that Ray accepts."""


class RayCluster:
    """Ray nodes, one per number in `cpus`, with that many processors each. Context manager.

    Their temporary files are in `folder`. The first is the head and can't be killed.
    """

    def __init__(self, folder: Path, cpus: Sequence[int]) -> None:
        self.folder = folder / f"potluck-{os.getuid()}"
        self._sockets = tempfile.TemporaryDirectory(prefix="ray-")  # socket paths must be short
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # else other tests get the processors first
            "RAY_TMPDIR": self._sockets.name,
            "TMPDIR": str(folder),
        }
        self._nodes = subprocess.Popen(
            [sys.executable, __file__, *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | settings,
        )
        self.address = self._line()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.communicate()
        self._sockets.cleanup()

    def kill_a_node(self) -> None:
        """Send SIGKILL to the processes of a node that is not the head."""
        assert self._nodes.stdin is not None
        self._nodes.stdin.write("kill\n")
        self._nodes.stdin.flush()
        assert self._line() == "killed"

    def _line(self) -> str:
        assert self._nodes.stdout is not None
        return self._nodes.stdout.readline().strip()

    def processes(self) -> list[int]:
        """Return the ids of federations' processes, found by the folder in their command lines."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
            except OSError:
                continue
            if b"fork_server" in command and str(self.folder).encode() in command:
                found.append(int(path.parent.name))
        return found

    def is_idle(self) -> bool:
        """Return True if no process and no folder of a cell is left."""
        return not self.processes() and not [
            each for each in (self.folder / "cells").glob("*") if each.is_dir()
        ]


def main() -> None:
    from ray.cluster_utils import Cluster

    untyped: Any = Cluster
    cluster: Any = untyped()
    nodes = [
        cluster.add_node(
            num_cpus=int(each), object_store_memory=STORE_BYTES, include_dashboard=False
        )
        for each in sys.argv[1:]
    ]
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
