"""A connection to a machine's Docker engine.

Over ssh, OpenSSH's `ssh` forwards the engine's socket to a local socket. So ~/.ssh/config, agents,
jump hosts and known_hosts apply as in a terminal. The machine needs no `docker` command, and its
engine may listen at any socket.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import docker
from docker.errors import DockerException
from docker.models.containers import Container
from docker.tls import TLSConfig

from potluck.common.errors import ConfigurationError, UnreachableError
from potluck.deploy.machines.desired_state import FEDERATION_LABEL
from potluck.deploy.machines.inventory import MachineSettings

CONNECT_SECONDS = 20.0
CALL_SECONDS = 300.0
"""Maximum seconds without a byte of an answer; long enough to load an image of gigabytes."""

_ANY_VERSION = "1.41"  # not sent to the engine: its version is requested without one
_LOOK_SECONDS = 0.05
_SSH = (
    *("-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    *("-o", "StreamLocalBindUnlink=yes", "-o", "StreamLocalBindMask=0177"),
)


@contextlib.contextmanager
def connected(machine: MachineSettings) -> Iterator[docker.DockerClient]:
    """Connect to a machine's engine and check that it answers. Raises UnreachableError."""
    with contextlib.ExitStack() as stack:
        url = machine.engine
        tls: TLSConfig | bool = False
        if machine.engine.startswith("ssh://"):
            url = stack.enter_context(_forwarded_socket(machine))
        elif machine.tls is not None:
            tls = TLSConfig(
                client_cert=(str(machine.tls.certificate), str(machine.tls.key)),
                ca_cert=str(machine.tls.authority),
                verify=True,
            )
        try:
            client = open_engine(url, tls)
        except (DockerException, OSError) as error:
            raise unreachable(machine, error) from error
        stack.callback(client.close)
        yield client


def open_engine(url: str, tls: TLSConfig | bool = False) -> docker.DockerClient:
    """Return a client that uses the API version of the engine at `url`.

    Raises DockerException or OSError if no engine answers.
    """
    if url.startswith("unix://"):
        # Connect once before docker's client does, since the client leaves its socket open if it
        # can't connect.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(url.removeprefix("unix://"))
    # A separate client requests the version, and is closed in any case. If docker's client looks up
    # the version itself and fails, it leaves its socket open.
    asking = docker.DockerClient(url, version=_ANY_VERSION, tls=tls, timeout=int(CONNECT_SECONDS))
    try:
        version = asking.api.version(api_version=False)["ApiVersion"]
    finally:
        asking.close()
    return docker.DockerClient(url, version=version, tls=tls, timeout=int(CALL_SECONDS))


def containers_of(client: docker.DockerClient, federation: str) -> list[Container]:
    """Return all containers of a federation on an engine, running or not."""
    return list(
        client.containers.list(
            all=True,
            ignore_removed=True,
            filters={"label": f"{FEDERATION_LABEL}={federation}"},
        )
    )


def unreachable(machine: MachineSettings, error: Exception) -> UnreachableError:
    """Return the error to raise for an engine that did not answer, or stopped answering."""
    where = machine.engine
    if where.startswith("ssh://"):
        where = f"{machine.socket} on {where}"
    cause = " ".join(str(error).split())[:300]
    return UnreachableError(
        f"no Docker engine answers at {where} ({cause}); check that the engine runs, and that the "
        "user may use it",
        machine=machine.name,
    )


def ssh_command(machine: MachineSettings, *options: str) -> list[str]:
    """Return the ssh command line that reaches a machine, without the command to run there."""
    url = urlsplit(machine.engine)
    program = shutil.which("ssh")
    if program is None:
        raise ConfigurationError(
            "the program ssh is missing on this machine; install OpenSSH's client (Debian: "
            "openssh-client)"
        )
    user = ("-l", url.username) if url.username else ()
    port = ("-p", str(url.port)) if url.port else ()
    options = (*_SSH, *machine.ssh_options, *user, *port, *options)
    return [program, *options, "--", url.hostname or ""]


def _says(process: subprocess.Popen[bytes]) -> str:
    text = (process.stderr.read() if process.stderr else b"").decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


@contextlib.contextmanager
def _forwarded_socket(machine: MachineSettings) -> Iterator[str]:
    """Forward the engine's socket to this machine while the block runs; yields its URL."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        path = Path(folder) / "engine"
        command = ssh_command(machine, "-N", "-T", "-L", f"{path}:{machine.socket}")
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _await_socket(machine, process, path)
            yield f"unix://{path}"
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _is_listening(path: Path) -> bool:
    """Return whether a socket accepts connections; its file exists a little earlier."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


def _await_socket(machine: MachineSettings, process: subprocess.Popen[bytes], path: Path) -> None:
    deadline = time.monotonic() + CONNECT_SECONDS
    while not _is_listening(path):
        if process.poll() is not None:
            raise UnreachableError(
                f"can't reach {machine.engine} over ssh: {_says(process)}; add the machine's key "
                "to your ssh agent, then try "
                f"`{shlex.join(['ssh', *ssh_command(machine)[1:], 'true'])}`",
                machine=machine.name,
            )
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"{machine.engine} does not answer over ssh within {CONNECT_SECONDS:.0f} s",
                machine=machine.name,
            )
        time.sleep(_LOOK_SECONDS)
