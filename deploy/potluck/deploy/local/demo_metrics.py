"""Metrics of a federation on this machine: one port per process, and a file for Prometheus."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tomlkit

from potluck.common.errors import StorageError
from potluck.deploy.local.demo_files import LOOPBACK, DemoFiles, reserved_port

_HEAD = """\
# Scrapes this federation: prometheus --config.file={path}
# The rules and alerts of Potluck are in deploy/assets/prometheus of its sources.
global:
  scrape_interval: 2s
  evaluation_interval: 2s

scrape_configs:
"""


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Reserve ports of the loopback interface while the block runs."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(reserved_port()) for _ in range(count)]


def serve_metrics(files: DemoFiles, ports: Sequence[int]) -> Path:
    """Configure the coordinator and each host to serve metrics on these loopback ports.

    ports: the coordinator's, then one per host. Return the path of a Prometheus configuration that
    scrapes them. Raises StorageError.
    """
    path = files.folder / "prometheus.yml"
    paths = [files.coordinator, *files.hosts]
    addresses = [f"{LOOPBACK}:{port}" for port in ports]
    try:
        for file, address in zip(paths, addresses, strict=True):
            document = tomlkit.parse(file.read_text())
            document["metrics_address"] = address
            file.write_text(tomlkit.dumps(document))
        targets = dict(zip([file.stem for file in paths], addresses, strict=True))
        path.write_text(_HEAD.format(path=path) + _jobs(targets))
    except OSError as error:
        raise StorageError(
            f"can't write {error.filename or files.folder}: {error.strerror}"
        ) from error
    return path


def _jobs(targets: dict[str, str]) -> str:
    """Return two scrape jobs as YAML, one for the coordinator and one for the hosts.

    Entries are written as JSON, which is valid YAML. targets: address by process name.
    """
    lines: list[str] = []
    for job, names in (
        ("potluck-coordinator", [name for name in targets if name == "coordinator"]),
        ("potluck-host", [name for name in targets if name != "coordinator"]),
    ):
        lines += [f"  - job_name: {job}", "    static_configs:"]
        lines += [
            f"      - {json.dumps({'targets': [targets[name]], 'labels': {'instance': name}})}"
            for name in names
        ]
    return "\n".join(lines) + "\n"
