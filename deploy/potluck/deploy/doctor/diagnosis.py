"""The checks of `potluck doctor`, as findings: a fact, a verdict and a remedy each."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from potluck.client.config import ClientConfig
from potluck.common.errors import PotluckError
from potluck.common.monitoring.metrics_server import parse_address
from potluck.common.net.build_version import software_version
from potluck.common.net.identity import parse_certificates
from potluck.common.net.protocol import VERSIONS, differences
from potluck.common.net.revocation import Revocations, read_revocations
from potluck.common.net.tls import TlsFiles
from potluck.deploy.operator.run_view import lacks_clients, waiting_text
from potluck.deploy.view.readable import (
    natural_order,
    readable_age,
    readable_bytes,
    readable_count,
    readable_seconds,
)
from potluck.rpc.v1 import operator_pb2
from potluck.server.config import CoordinatorConfig
from potluck.server.service.revocations import KEPT

EXPIRES_SOON = timedelta(days=14)
LEAST_FREE_SHARE = 0.1
FULL_SHARE = 0.01
FULL_BYTES = 1 << 30
"""Free space in bytes below which a disk counts as full, as it also does below the share
FULL_SHARE.

Models and updates are written as whole files, so they need space for another copy.
"""
_PROBE_BYTES = 1 << 16
MOST_SKEW_SECONDS = 60.0
LEAST_PYTHON = (3, 11)
_HOSTS_NAMED = 5


class Verdict(StrEnum):
    """Outcome of a check: fine, a warning, or an error."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """Result of one check. remedy: the action to take; empty if nothing is wrong."""

    about: str
    verdict: Verdict
    found: str
    remedy: str = ""


def software() -> list[Finding]:
    """Check this Python and the packages that Potluck needs."""
    found = f"Potluck {software_version()} on Python {platform.python_version()}"
    if sys.version_info < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        return [Finding("software", Verdict.ERROR, found, f"install Python {wanted} or newer")]
    troubles = sorted(filter(None, map(_why_unmet, requires("potluck") or ())))
    if troubles:
        remedy = "reinstall Potluck, in a separate environment"
        return [Finding("software", Verdict.ERROR, f"{found}; {', '.join(troubles)}", remedy)]
    return [Finding("software", Verdict.OK, found)]


def _why_unmet(text: str) -> str:
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return ""
    try:
        here = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    met = requirement.specifier.contains(here, prereleases=True)
    return "" if met else f"{requirement.name} is {here}, but Potluck needs {requirement.specifier}"


def certificates(tls: TlsFiles, now: datetime) -> Finding:
    """Check that a party's certificate, key and authority are usable, and for how long."""
    try:
        material = tls.load(now=now)
    except PotluckError as error:
        found, _, remedy = error.message.partition("; ")
        return Finding("certificate", Verdict.ERROR, found, remedy)
    who = (
        f"{material.identity.role} '{material.identity.name}' of federation "
        f"{material.identity.federation}"
    )
    found = f"{who}, valid until {material.expires:%Y-%m-%d}"
    if tls.key.stat().st_mode & 0o027:  # as in the systemd units, the service's group may read it
        return Finding(
            "certificate",
            Verdict.WARNING,
            f"{found}; other users may read the key {tls.key}",
            f"chmod 600 {tls.key}",
        )
    return _expiry("certificate", found, material.expires, now)


def _unless_revoked(good: Finding, config: CoordinatorConfig) -> Finding:
    """Check a coordinator's certificate against the revocation lists that it uses."""
    if good.verdict is Verdict.ERROR:
        return good
    revocations = Revocations()
    try:
        for path in (config.state_directory / KEPT, config.revoked):
            if path is not None and path.exists():
                revocations.add(read_revocations(path, config.tls.authority))
        material = config.tls.load()
        serial = parse_certificates(material.certificate)[0].serial_number
        revocations.check(serial, f"the coordinator '{material.identity.name}'")
    except PotluckError as error:
        found, _, remedy = error.message.partition("; ")
        return Finding("certificate", Verdict.ERROR, found, remedy)
    return good


def _expiry(about: str, found: str, expires: datetime, now: datetime) -> Finding:
    if expires - now < EXPIRES_SOON:
        return Finding(
            about, Verdict.WARNING, found, "renew the certificate with `potluck pki renew`"
        )
    return Finding(about, Verdict.OK, found)


def disk(about: str, free: int, size: int) -> Finding:
    """Return the finding on the free space of the disk of a state directory."""
    found = f"{readable_bytes(free)} of {readable_bytes(size)} free"
    if size and free < min(FULL_BYTES, FULL_SHARE * size):
        remedy = (
            "free disk space, then `potluck resume` the runs that failed because the disk was full"
        )
        return Finding(about, Verdict.ERROR, f"full: {found}", remedy)
    if size and free / size < LEAST_FREE_SHARE:
        remedy = "free disk space; `retention` of run files limits the number of stored models"
        return Finding(about, Verdict.WARNING, found, remedy)
    return Finding(about, Verdict.OK, found)


def state_directory(folder: Path) -> Finding:
    """Check the free space of a process's state directory, and that a file can be written there."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        usage = shutil.disk_usage(nearest)
        _write_a_little(nearest)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Finding("disk", Verdict.ERROR, f"{nearest}: {error.strerror}", "free disk space")
        remedy = "set state_directory to a folder this user may write to"
        return Finding("disk", Verdict.ERROR, f"{nearest}: {error.strerror}", remedy)
    found = disk("disk", usage.free, usage.total)
    return Finding(found.about, found.verdict, f"{folder}: {found.found}", found.remedy)


def _write_a_little(folder: Path) -> None:
    """Write a nameless file as a test: a disk with free space may refuse it (quota, inodes)."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def port(about: str, host: str, number: int, setting: str) -> Finding:
    """Check that a process can listen on a port of this machine."""
    address = f"{host}:{number}"
    try:
        with socket.create_server((host, number)):
            return Finding(about, Verdict.OK, f"{address} is free")
    except OSError as error:
        found = f"{address} can't be listened on: {error.strerror}"
        if error.errno == errno.EACCES:
            remedy = f"run the program with CAP_NET_BIND_SERVICE, or choose another `{setting}`"
            return Finding(about, Verdict.WARNING, found, remedy)
        remedy = f"if another program than Potluck uses the address, choose another `{setting}`"
        return Finding(about, Verdict.WARNING, found, remedy)


def device(wanted: str) -> Finding:
    """Check the device on which a host will train."""
    from potluck.client.training.device import resolve_device  # imports torch, which takes seconds

    try:
        found = resolve_device(wanted)
    except PotluckError as error:
        return Finding("device", Verdict.ERROR, error.message, 'set device = "auto" or "cpu"')
    if found == "cpu":
        if wanted == "cpu":
            return Finding("device", Verdict.OK, "cpu, as configured")
        remedy = "on a machine with a GPU, install the GPU's driver and a torch with CUDA"
        return Finding(
            "device", Verdict.WARNING, "torch finds no GPU, so the host trains on the CPU", remedy
        )
    import torch

    return Finding("device", Verdict.OK, f"{found}: {torch.cuda.get_device_name(found)}")


def coordinator_files(config: CoordinatorConfig, now: datetime) -> Iterable[Finding]:
    """Return the findings on a coordinator's machine."""
    yield _unless_revoked(certificates(config.tls, now), config)
    yield state_directory(config.state_directory)
    host, _, number = config.listen.rpartition(":")
    yield port("port", host.strip("[]"), int(number), "listen")
    if config.metrics_address:
        yield port("metrics", *parse_address(config.metrics_address), "metrics_address")


def host_files(config: ClientConfig, now: datetime) -> Iterable[Finding]:
    """Return the findings on a host's machine."""
    yield certificates(config.tls, now)
    yield state_directory(config.state_directory)
    yield device(config.device)
    if config.metrics_address:
        yield port("metrics", *parse_address(config.metrics_address), "metrics_address")


def federation(
    described: operator_pb2.DescribeCoordinatorResponse,
    clients: Sequence[operator_pb2.ClientStatus],
    seconds: float,
    now: datetime,
) -> Iterable[Finding]:
    """Return the findings on a coordinator that answered after `seconds`, at `now`.

    clients: all clients that ever connected to the coordinator.
    """
    yield Finding("coordinator", Verdict.OK, f"answered within {readable_seconds(seconds)}")
    yield _versions(described)
    yield _clock(described.time.ToDatetime(tzinfo=now.tzinfo), now, seconds)
    expires = described.certificate_expires_at.ToDatetime(tzinfo=now.tzinfo)
    yield _expiry("its certificate", f"until {expires:%Y-%m-%d}", expires, now)
    yield disk("its disk", described.disk_free_bytes, described.disk_size_bytes)
    if described.object_store:
        yield _object_store(described)
    yield _hosts(described, clients, now)
    yield from _waiting_runs(described, now)


def _hosts(
    described: operator_pb2.DescribeCoordinatorResponse,
    clients: Sequence[operator_pb2.ClientStatus],
    now: datetime,
) -> Finding:
    """Check that all hosts are connected that were connected before.

    A host whose clients are all in quarantine does not count, so that the warning can be ended for
    a host that won't return.
    """
    hosts = readable_count(described.hosts_attending, "host")
    attending = readable_count(described.clients_attending, "client")
    runs = readable_count(described.runs_under_way, "run")
    found = f"{hosts} connected with {attending}; {runs} under way"
    away = _disconnected(clients, now)
    if away:
        shown = [f"{host} (last heard of {age})" for host, age in list(away.items())[:_HOSTS_NAMED]]
        more = f" and {len(away) - len(shown)} more" if len(away) > len(shown) else ""
        found += f"; {readable_count(len(away), 'host')} disconnected: {', '.join(shown)}{more}"
        remedy = (
            f"start {'it' if len(away) == 1 else 'them'}: `potluck-client --config FILE`; the log "
            "shows why a host can't connect. If a host won't return, exclude its clients: `potluck "
            "clients quarantine ID`"
        )
        return Finding("hosts", Verdict.WARNING, found, remedy)
    if described.hosts_attending:
        return Finding("hosts", Verdict.OK, found)
    remedy = "start hosts: `potluck-client --config FILE`; their logs show why they can't connect"
    return Finding("hosts", Verdict.WARNING, found, remedy)


def _disconnected(clients: Sequence[operator_pb2.ClientStatus], now: datetime) -> dict[str, str]:
    """Return the disconnected hosts in natural order, each with the time since its last contact."""
    connected = {client.host_id for client in clients if client.attending}
    heard = {
        client.host_id: client.last_seen.ToDatetime(tzinfo=now.tzinfo)
        for client in clients
        if client.host_id and client.host_id not in connected and not client.quarantined
    }
    return {host: readable_age(heard[host], now) for host in sorted(heard, key=natural_order)}


def _object_store(described: operator_pb2.DescribeCoordinatorResponse) -> Finding:
    trouble = described.object_store_trouble
    if not trouble:
        return Finding("object store", Verdict.OK, f"{described.object_store} answers")
    remedy = (
        "start the object store, or check its proxies, bucket, credentials and address in "
        "[files] of the coordinator"
    )
    return Finding("object store", Verdict.ERROR, trouble, remedy)


def _waiting_runs(
    described: operator_pb2.DescribeCoordinatorResponse, now: datetime
) -> Iterable[Finding]:
    for status in described.runs:
        if lacks_clients(status):
            found = f"{status.name} ({status.run_id}): {waiting_text(status.waiting, now)}"
            remedy = "start these hosts, or run `potluck clients` to see why they can't connect"
            yield Finding("run", Verdict.WARNING, found, remedy)


def _versions(described: operator_pb2.DescribeCoordinatorResponse) -> Finding:
    found = f"Potluck {described.software_version}, protocol {described.protocol_version}"
    theirs = {"protocol": described.protocol_version, **described.versions}
    differing = differences(theirs, VERSIONS)
    if differing:
        parts = ", ".join(f"{part} {there or 'none'}" for part, (there, _) in differing.items())
        here = ", ".join(f"{part} {here or 'none'}" for part, (_, here) in differing.items())
        found = (
            f"the coordinator has Potluck {described.software_version} with {parts}; this "
            f"machine has {here}"
        )
        remedy = "install the same release on the coordinator, the hosts and this machine"
        return Finding("its version", Verdict.ERROR, found, remedy)
    if described.software_version != software_version():
        found = f"the coordinator has {found}; this machine has {software_version()}"
        return Finding(
            "its version", Verdict.WARNING, found, "install the same build on this machine"
        )
    return Finding("its version", Verdict.OK, found)


def _clock(theirs: datetime, ours: datetime, seconds: float) -> Finding:
    skew = (theirs - ours).total_seconds()
    if abs(skew) <= MOST_SKEW_SECONDS + seconds:
        return Finding(
            "clock", Verdict.OK, "this machine's clock agrees with the coordinator's clock"
        )
    ahead = "ahead of" if skew < 0 else "behind"
    found = f"this machine's clock is {readable_seconds(abs(skew))} {ahead} the coordinator's clock"
    return Finding(
        "clock",
        Verdict.ERROR,
        found,
        "synchronise both clocks by NTP: certificates depend on correct clocks",
    )
