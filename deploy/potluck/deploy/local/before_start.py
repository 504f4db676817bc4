"""Checks of a run on this machine, before its processes start.

Each check finds a fault that would otherwise make the run fail only after the start.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings.plugins import create
from potluck.common.task import Task
from potluck.deploy.local.demo_files import DemoOptions, client_ranges, demo_run_file

_DEVICES: Final = r"auto|cpu|cuda:[0-9]{1,3}(,cuda:[0-9]{1,3})*"
"""Pattern of device names, as a host's configuration accepts them."""
_BUNDLED: Final = {"digits", "colored-digits"}
"""Tasks with bundled data. Creating another task imports torch, which takes seconds."""


def check_demo(options: DemoOptions) -> None:
    """Raise ConfigurationError or PluginError if a demo can't run with these options."""
    _, run_file = demo_run_file(options)
    client_ranges(options.clients, options.hosts)
    check_device(options.device)
    if options.data is not None and not options.data.is_dir():
        raise ConfigurationError(
            f"{options.data} is not a folder; name an existing folder with --data",
            path=options.data,
        )
    _check_hosts(run_file, options.hosts)
    task = run_file.task
    if task.name not in _BUNDLED:
        made = create(Task, task.name, task.options)
        check_data(
            made, task.name, options.data, remedy="name the folder that has these files with --data"
        )


def _check_hosts(run_file: RunFile, hosts: int) -> None:
    """Raise ConfigurationError if the run's secure sums need more hosts than the demo has."""
    needed = run_file.masking.fewest_hosts
    if run_file.secure_aggregation and hosts < needed:
        raise ConfigurationError(
            f"secure_aggregation needs clients on {needed} hosts, but the demo has {hosts}; add "
            f"--hosts {needed}",
            hosts=hosts,
            needed=needed,
        )


def check_device_names(device: object) -> None:
    """Raise ConfigurationError unless `device` names devices; these need not exist."""
    if not isinstance(device, str) or re.fullmatch(_DEVICES, device) is None:
        raise ConfigurationError(
            f"device is {device!r}; it must be 'cpu', 'auto', 'cuda:0' or 'cuda:0,cuda:1'"
        )


def check_device(device: str) -> None:
    """Raise ConfigurationError if hosts on this machine can't train on the device."""
    check_device_names(device)
    if not device.startswith("cuda"):
        return
    from potluck.client.training.device import resolve_device  # imports torch, which takes seconds

    for name in device.split(","):
        resolve_device(name)


def check_data(task: Task, name: str, data: Path | None, *, remedy: str) -> None:
    """Raise ConfigurationError if files that the task called `name` reads are missing.

    data: the folder of the files; None if no folder is given. remedy: text on how to name another
    folder.
    """
    if data is None and task.needs_data:
        raise ConfigurationError(
            f"task {name} reads its clients' data from files, but no folder with data is given; "
            f"{remedy}"
        )
    files = task.data_files() or ()
    missing = [each for each in files if data is None or not (data / each).exists()]
    if not missing:
        return
    with contextlib.suppress(OSError, TypeError, ValueError):  # not every task checks its files
        task.evaluation_data(data)  # its error usually states how to make the files
    where = "no folder with data is given" if data is None else f"the folder {data} lacks files"
    raise ConfigurationError(f"task {name} reads {', '.join(missing)}, but {where}; {remedy}")
