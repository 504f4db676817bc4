"""The connection to a Ray cluster; its problems become one-line errors."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from potluck.common.errors import ConfigurationError, UnreachableError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports its use
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray prints a warning

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from potluck.experiments.cluster.cell_needs import Resources
from potluck.experiments.cluster.cell_report import THE_SAME, check_software, software

AUTO = "auto"
"""Address that stands for the cluster of this machine."""

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_REMEDY = "start a cluster with `ray start --head`, or name the HOST:PORT of another cluster"


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect this process to a cluster that includes this machine, while the block runs.

    Call it in the main thread and before signals are handled: Ray sets its own handlers. Raises
    UnreachableError if the cluster doesn't exist, ConfigurationError if it can't be used.
    """
    if address.startswith("ray://"):
        raise ConfigurationError(
            f"{address} is an address for Ray's client; run this command on a machine of the "
            "cluster, with HOST:PORT or without an address",
            address=address,
        )
    where = "on this machine" if address == AUTO else f"at {address}"
    if address != AUTO:
        _knock(address)
    _silence()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
    except ConnectionError:
        raise UnreachableError(
            f"no Ray cluster found {where}; {_REMEDY}", address=address
        ) from None
    except (RuntimeError, ValueError, RayError) as error:
        cause = " ".join(str(error).split())
        raise ConfigurationError(
            f"can't use the Ray cluster {where}: {cause}", address=address
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _silence() -> None:
    """Keep Ray from printing messages about its machines.

    Ray has no setting for that. It would print them on standard output, between the command's own
    lines.
    """
    worker: Any = import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _knock(address: str) -> None:
    """Raise UnreachableError if no program listens at `address`.

    Otherwise Ray would try to connect for a long time and then end the process.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"--ray needs HOST:PORT, not '{address}'", address=address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UnreachableError(
            f"no Ray cluster found at {address}: {getattr(error, 'strerror', None) or error}; "
            f"{_REMEDY}",
            address=address,
        ) from None


def machines() -> list[tuple[str, str, Resources]]:
    """Return one entry per connected machine: Ray's node id, the address, all resources."""
    untyped: Any = ray
    return [
        (node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in untyped.nodes()
        if node["Alive"]
    ]


def resources() -> list[Resources]:
    """Return all resources of each machine."""
    return [each for _, _, each in machines()]


def check_machines() -> None:
    """Raise ConfigurationError if a machine lacks Potluck, or its versions differ from ours."""
    ours = software()
    # Pickle the function by value: a machine without Potluck can't import it.
    probe: Any = ray.remote(num_cpus=0)(_probe())
    asked = {
        address: probe.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(THE_SAME)
        for node_id, address, _ in machines()
    }
    for address, answer in asked.items():
        try:
            found: Mapping[str, str] = ray.get(answer, timeout=_ANSWER_SECONDS)
        except RayError as error:
            raise UnreachableError(
                f"machine {address} of the cluster does not answer ({type(error).__name__}); "
                "check `ray status`",
                machine=address,
            ) from None
        check_software(ours, found, machine=f"machine {address}")


def _probe() -> Callable[[tuple[str, ...]], dict[str, str]]:
    def versions(names: tuple[str, ...]) -> dict[str, str]:
        import platform
        from contextlib import suppress
        from importlib.metadata import PackageNotFoundError, version

        found = {"Python": ".".join(platform.python_version_tuple()[:2])}
        for name in names:
            try:
                found[name] = version(name).partition("+")[0]
            except PackageNotFoundError:
                continue
        with suppress(ImportError):
            from potluck.common.net.build_version import software_version

            found["potluck"] = software_version()
        return found

    return versions
