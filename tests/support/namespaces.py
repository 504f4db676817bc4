"""Network namespaces: a test can silently drop a host's packets, in one or both directions."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Direction in which packets are lost."""

    UP = "to the coordinator"
    DOWN = "to the host"
    BOTH = "either way"


def why_not() -> str:
    """Return the reason why namespaces are unavailable; "" if they are available."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None or shutil.which("iptables") is None:
        return "ip or iptables is missing (Debian: apt-get install iproute2 iptables)"
    tried = subprocess.run(
        ["unshare", "--net", "iptables", "-A", "INPUT", "-j", "DROP"],
        capture_output=True,
        text=True,
        check=False,
    )
    return " ".join(tried.stderr.split())


@dataclass(frozen=True)
class Namespace:
    """A namespace with one cable to this one. `here`: this side's address."""

    name: str
    here: str

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command inside the namespace."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self, direction: Direction) -> None:
        """Start to drop packets silently, in the given direction."""
        for chain in ("OUTPUT", "INPUT"):
            if direction in (_LOSES[chain], Direction.BOTH):
                _run(*self.command("iptables", "--append", chain, "--jump", "DROP"))

    def heal(self) -> None:
        """Forward all packets again."""
        _run(*self.command("iptables", "--flush"))


_LOSES = {"OUTPUT": Direction.UP, "INPUT": Direction.DOWN}


@contextlib.contextmanager
def namespace(number: int) -> Iterator[Namespace]:
    """Create a namespace. number: 0 to 63, different for each namespace of a test."""
    mark = f"{os.getpid() % 100_000}-{number}"
    name, cable = f"potluck-{mark}", f"pl{mark}"
    network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    here, there = f"{network}.{4 * number + 1}", f"{network}.{4 * number + 2}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "address", "add", f"{here}/30", "dev", cable)
        _run("ip", "link", "set", cable, "up")
        for words in (
            ("address", "add", f"{there}/30", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-netns", name, *words)
        yield Namespace(name, here)
    finally:
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
