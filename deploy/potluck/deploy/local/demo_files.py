"""The files of a throwaway federation; for a real one, an operator writes them by hand."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import tomlkit

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles
from potluck.common.process import folder_lock
from potluck.common.process.folder_lock import FolderLock
from potluck.common.run_file.runfile import RunFile, parse_run_file
from potluck.common.settings.plugins import (
    SELECTORS,
    STRATEGIES,
    TASKS,
    create,
    find,
    installed,
)
from potluck.deploy.operator.operator_config import FILE_NAME, OperatorConfig
from potluck.deploy.operator.run_overrides import override
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.federation_root import add_members, create_root
from potluck.deploy.view.readable import natural_order

LOOPBACK = "127.0.0.1"
_ROOT = "root"
"""The folder of the federation root."""

_SPLITTABLE = {"digits", "colored-digits"}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of a demo."""

    task: str
    selector: str
    strategy: str
    clients: int
    hosts: int
    count: int
    rounds: int
    seed: int
    device: str
    workers: int | str = 1
    """Number of worker processes of each host; see `workers` in a host's configuration."""
    choices: Path | None = None
    """Folder for the hosts' measured training settings; see `choices_directory` of a host."""
    data: Path | None = None
    """Folder with the tasks' data."""
    assignments: Sequence[str] = ()
    root: bool = False
    """True to make a federation root, which secure sums need."""
    disclosure: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the hosts' [disclosure] table."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task, in addition to its number of clients."""
    name: str = "demo"
    """Name of the run."""


@dataclass(frozen=True, kw_only=True)
class DemoFiles:
    """Paths of a demo's files."""

    folder: Path
    coordinator: Path
    hosts: tuple[Path, ...]
    operator: OperatorConfig
    run_file: str

    @property
    def ready(self) -> Path:
        """File that the coordinator writes once it accepts connections."""
        return self.folder / "coordinator.ready"

    @property
    def model(self) -> Path:
        """File of the last model."""
        return self.folder / "model.safetensors"

    @property
    def summary(self) -> Path:
        """File with the summary of the run."""
        return self.folder / "summary.json"

    @property
    def plot(self) -> Path:
        """File with the plot of the run."""
        return self.folder / "run.png"

    def model_of(self, name: str) -> Path:
        """Return the path for the last model of the run called `name`, one of several runs."""
        return self.folder / f"model-{name}.safetensors"

    def log(self, name: str) -> Path:
        """Return the path of the log with the output of the process called `name`."""
        return self.folder / f"{name}.log"


def choices_of_user() -> Path | None:
    """Return the folder where hosts of throwaway federations store measured training settings.

    All these federations share the folder, so that they use the same settings. Return None if this
    user has no home directory or can't write to the folder.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # this user has no home directory
        return None
    folder = cache / "potluck" / "choices"
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return folder if os.access(there, os.W_OK) else None


def client_ranges(clients: int, hosts: int) -> list[range]:
    """Split clients 0 … `clients` - 1 over hosts, in contiguous ranges.

    The ranges' sizes differ by at most one.
    Raises ConfigurationError if a host would get none.
    """
    if hosts > clients:
        raise ConfigurationError(
            f"{clients} clients can't be split over {hosts} hosts; use at most {clients} --hosts",
            clients=clients,
            hosts=hosts,
        )
    bounds = [host * clients // hosts for host in range(hosts + 1)]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


def demo_run_file(options: DemoOptions) -> tuple[str, RunFile]:
    """Return the run file of a demo, as text and parsed. Raises ConfigurationError, and PluginError
    if it names a plug-in that is not installed."""
    table = {
        "name": options.name,
        "rounds": options.rounds,
        "clients_per_round": options.count,
        "expected_clients": options.clients,
        "seed": options.seed,
        "task": {"name": options.task, **_split(options), **options.task_options},
        "selector": {"name": options.selector},
        "strategy": {"name": options.strategy},
    }
    text = override(tomlkit.dumps(table), options.assignments, source="the demo's run file")
    run_file = parse_run_file(text, source="the demo's run file")
    if run_file.clients_per_round > options.clients:
        raise ConfigurationError(
            f"{run_file.clients_per_round} clients a round can't be chosen from "
            f"{options.clients}; lower --clients-per-round or raise --clients",
            clients_per_round=run_file.clients_per_round,
            clients=options.clients,
        )
    for group, name in (
        (TASKS, run_file.task.name),
        (SELECTORS, run_file.selector.name),
        (STRATEGIES, run_file.strategy.name),
    ):
        if name not in installed(group):  # check the name only: importing the plug-in imports torch
            find(group, name)
    return text, run_file


def _split(options: DemoOptions) -> dict[str, int]:
    """Return the task's option `clients` for a demo; empty if the task has no such option."""
    return {"clients": options.clients} if options.task in _SPLITTABLE else {}


def new_folder(parent: Path, now: datetime) -> Path:
    """Make a new folder, named after the time; a number is added if the name exists.

    Raises StorageError.
    """
    name = now.strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                folder = parent / (name if number == 1 else f"{name}-{number}")
                folder.mkdir()
                return folder
    except OSError as error:
        raise StorageError(
            f"can't create a folder in {parent}: {error.strerror}; name another folder with "
            "--folder",
            path=parent,
        ) from error
    raise AssertionError("unreachable: the loop has no end")


def hold(folder: Path) -> FolderLock:
    """Make the folder of a demo, and lock it against other demos while this one runs.

    Raises ConfigurationError if another demo uses the folder, StorageError if it can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"can't create the folder {folder}: {error.strerror}; name another folder with "
            "--folder",
            path=folder,
        ) from error
    return FolderLock(folder, holder="demo", remedy="name another folder with --folder")


def write_demo_files(
    folder: Path, options: DemoOptions, port: int, *, more_runs: Sequence[RunFile] = ()
) -> DemoFiles:
    """Make the certificates and configuration files of a federation on this machine.

    more_runs: run files of further runs, which the hosts allow as well. Raises ConfigurationError
    if the folder holds a demo already, StorageError if it can't be written.
    """
    text, run_file = demo_run_file(options)
    machines = Machines(
        clients=options.clients,
        hosts=options.hosts,
        device=options.device,
        workers=options.workers,
        choices=options.choices,
        data=options.data,
        root=options.root,
        disclosure=_allowed([run_file, *more_runs]) | dict(options.disclosure),
    )
    return write_federation_files(folder, text, machines, port)


def _allowed(run_files: Sequence[RunFile]) -> dict[str, Any]:
    """Return the hosts' [disclosure] table of a demo.

    A demo's data need no protection. So the table allows everything that the demo's runs ask for,
    and any number of masked runs.
    """
    from potluck.server.selection import Selector  # imported late: only starting a run needs it

    asks: set[str] = set()
    for each in run_files:
        asks |= create(Selector, each.selector.name, each.selector.options).asks_questions
    return {"questions": sorted(asks), "held_out_counts": True, "masked_runs": 1000}


@dataclass(frozen=True, kw_only=True)
class Machines:
    """A federation on this machine: its clients, client-0 …, are split over `hosts` hosts.

    workers, choices: settings of each host; see `workers` and `choices_directory` in a host's
    configuration. data: folder with the tasks' data, for the coordinator and all hosts. disclosure:
    the hosts' [disclosure] table; None for the default policy. root: True to make a federation
    root. The root is in the same folder as the other files, so signatures prove nothing against the
    folder's owner. address: this machine's address on which the coordinator listens; by default the
    loopback address, which hosts on other machines can't reach. availability: probability that a
    client is available, by client, for the hosts' [availability] table.
    """

    clients: int
    hosts: int
    device: str = "cpu"
    workers: int | str = 1
    choices: Path | None = None
    data: Path | None = None
    disclosure: Mapping[str, Any] | None = None
    root: bool = False
    address: str = LOOPBACK
    availability: Mapping[str, float] = field(default_factory=dict)


def write_federation_files(folder: Path, run_file: str, machines: Machines, port: int) -> DemoFiles:
    """Make the certificates and configuration files of a federation that will run `run_file`.

    Raises as `write_demo_files` does.
    """
    ranges = client_ranges(machines.clients, machines.hosts)
    authority = folder / "pki"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.name != folder_lock.NAME for path in folder.iterdir()):
            raise ConfigurationError(
                f"the folder {folder} is not empty; remove the folder, or name another folder "
                "with --folder",
                folder=folder,
            )
        pki.create_authority(authority, "demo")
        address = f"{machines.address}:{port}"
        coordinator = folder / "coordinator.toml"
        issued = pki.issue(authority, Role.COORDINATOR, "coordinator", hosts=[machines.address])
        values = {"listen": address, "state_directory": "coordinator"}
        if machines.root:
            create_root(folder / _ROOT, "demo")
            values |= {"federation_root": f"{_ROOT}/root.pub", "members": f"{_ROOT}/members.json"}
        _write(coordinator, {**values, **_data(machines), "tls": _tls(issued)})
        hosts = tuple(
            _write_host(folder, f"host-{number}", clients, address, machines)
            for number, clients in enumerate(ranges)
        )
        issued = pki.issue(authority, Role.OPERATOR, "operator")
        _write(folder / FILE_NAME, {"coordinator": address, "tls": _tls(issued)})
        (folder / "run.toml").write_text(run_file)
    except OSError as error:
        raise StorageError(
            f"can't write {error.filename or folder}: {error.strerror}; name another folder with "
            "--folder"
        ) from error
    tls = TlsFiles(certificate=issued.certificate, key=issued.key, authority=issued.authority)
    return DemoFiles(
        folder=folder,
        coordinator=coordinator,
        hosts=hosts,
        operator=OperatorConfig(coordinator=address, tls=tls),
        run_file=run_file,
    )


def opened_files(folder: Path, port: int) -> DemoFiles:
    """Return the files of a federation that exists already, with `port` as its new port.

    The port is written into the configuration files. Raises StorageError if they can't be read or
    written.
    """
    address = f"{LOOPBACK}:{port}"
    coordinator, operator = folder / "coordinator.toml", folder / FILE_NAME
    hosts = tuple(sorted(folder.glob("host-*.toml"), key=lambda path: natural_order(path.name)))
    try:
        for path in (coordinator, operator, *hosts):
            values = tomlkit.parse(path.read_text())
            values["listen" if path == coordinator else "coordinator"] = address
            partial = path.with_suffix(".partial")
            partial.write_text(tomlkit.dumps(values))
            partial.replace(path)
        run_file = (folder / "run.toml").read_text()
        tls = tomllib.loads(operator.read_text())["tls"]
    except OSError as error:
        raise StorageError(
            f"can't write {error.filename or folder}: {error.strerror}", path=folder
        ) from error
    return DemoFiles(
        folder=folder,
        coordinator=coordinator,
        hosts=hosts,
        operator=OperatorConfig(
            coordinator=address, tls=TlsFiles(**{name: folder / path for name, path in tls.items()})
        ),
        run_file=run_file,
    )


def _write_host(folder: Path, name: str, clients: range, address: str, machines: Machines) -> Path:
    ids = f"client-{clients[0]}:{clients[-1]}" if len(clients) > 1 else f"client-{clients[0]}"
    issued = pki.issue(folder / "pki", Role.HOST, name, clients=[ids])
    path = folder / f"{name}.toml"
    values: dict[str, Any] = {
        "coordinator": address,
        "clients": [ids],
        "state_directory": name,
        "device": machines.device,
        **_membership(folder, ids, name, machines),
        **_data(machines),
        "tls": _tls(issued),
    }
    if machines.choices is not None:
        values["choices_directory"] = str(machines.choices)
    if machines.workers != 1:
        values["workers"] = machines.workers
    if machines.disclosure is not None:
        values["disclosure"] = dict(machines.disclosure)
    if machines.availability:
        values["availability"] = {"clients": dict(machines.availability)}
    _write(path, values)
    return path


def _membership(folder: Path, ids: str, host: str, machines: Machines) -> dict[str, str]:
    """Make a host's clients members, and return its membership settings; none without a root."""
    if not machines.root:
        return {}
    add_members(folder / _ROOT, [ids], host)
    files = {"member_key": "members", "members": "members.json", "federation_root": "root.pub"}
    return {key: f"{_ROOT}/{file}" for key, file in files.items()}


def _data(machines: Machines) -> dict[str, str]:
    return {} if machines.data is None else {"data_directory": str(machines.data.resolve())}


def _tls(issued: pki.IssuedFiles) -> dict[str, str]:
    """Return TLS settings with paths relative to their file, so that the folder can be moved."""
    return {
        name: f"pki/{path.name}"
        for name, path in (
            ("certificate", issued.certificate),
            ("key", issued.key),
            ("authority", issued.authority),
        )
    }


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(tomlkit.dumps(values))


@contextlib.contextmanager
def reserved_port(address: str = LOOPBACK) -> Iterator[int]:
    """Reserve a free port of an address of this machine while the block runs.

    So hosts know the coordinator's address before the coordinator listens, and all processes can
    start at once. On Linux, a socket that is bound but does not listen reserves the port. A
    listener with SO_REUSEADDR, such as gRPC's, can still use it. On other systems the port is
    released at once.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def program(name: str) -> str:
    """Return the path of this installation's console script `name`. Raises ConfigurationError."""
    path = Path(sys.executable).with_name(name)
    if not os.access(path, os.X_OK):
        raise ConfigurationError(
            f"the program {name} is not installed next to {sys.executable}; install potluck in "
            "this environment",
            path=path,
        )
    return str(path)
