"""Two Docker engines behind two ssh servers, on this machine: "two machines" for the tests.

The first engine is this machine's own. The second is started with its own data root and socket.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException

from potluck.deploy.machines.docker_engine import open_engine

REPOSITORY = Path(__file__).resolve().parents[2]
FIRST_SOCKET = Path("/var/run/docker.sock")
START_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_BRIDGE = "potluck-test"
_SUBNET = "198.18.77.1/24"  # in the range that is reserved for network tests

_PLACES = tuple(sorted({REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path("/usr")}))
IMAGES = ("potluck-test/coordinator:1", "potluck-test/client:1", "potluck-test/relay:1")
_STATE = "var/lib/potluck"
_LABEL = "potluck-test"


def why_no_engines() -> str | None:
    """Return why the tests with two engines can't run here; None if they can."""
    if os.geteuid() != 0:
        return "only root can start a second Docker engine"
    for program in ("dockerd", "ip", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    written = {"etc", "tmp", "var", "proc", "sys", "dev", "data"}
    if taken := [place for place in _PLACES if place.parts[1] in written]:
        return f"{taken[0]} lies where an engine writes in a container: move the checkout"
    if not Path("/usr/sbin/sshd").exists():
        return "sshd is not installed"
    try:
        client = open_engine(f"unix://{FIRST_SOCKET}")
        client.close()
    except (DockerException, OSError) as error:
        return f"no Docker engine answers at {FIRST_SOCKET}: {error}"
    return None


def require_engines() -> None:
    """Skip the test with a reason if engines can't be started."""
    reason = why_no_engines()
    if reason is not None:
        pytest.skip(reason)


@dataclass
class SecondEngine:
    """An engine that a test may kill."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "docker.sock"

    def client(self) -> docker.DockerClient:
        return open_engine(f"unix://{self.socket}")

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["dockerd", "--data-root", str(self.folder / "data")]
        command += ["--exec-root", str(self.folder / "exec")]
        command += ["--host", f"unix://{self.socket}"]
        command += ["--pidfile", str(self.folder / "pid"), "--bridge", _BRIDGE]
        command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        command += ["--containerd-namespace", "second"]
        command += ["--containerd-plugins-namespace", "second-plugins"]
        self._launch(command)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                client = self.client()
                client.close()
                return
            except (DockerException, OSError):
                self._stay_up(command)
                assert time.monotonic() < deadline, "the second engine does not come up"
                time.sleep(_LOOK_SECONDS)

    def _launch(self, command: list[str]) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _stay_up(self, command: list[str]) -> None:
        """Start the engine again if it has exited, as a service manager would. After a kill,
        containerd may need longer to inspect the remaining containers than the engine waits."""
        assert self.process is not None
        if self.process.poll() is not None:
            said = (self.folder / "log").read_text()[-2000:]
            assert "timeout waiting for containerd" in said, said
            self._launch(command)

    def kill(self) -> None:
        """Send SIGKILL to engine and containerd, as in a crash; containers may continue."""
        assert self.process is not None
        containerd = int((self.folder / "exec/containerd/containerd.pid").read_text())
        for kill, pid in ((os.killpg, self.process.pid), (os.kill, containerd)):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        self.process.wait()
        # Wait for containerd's end: a new engine would otherwise use the dying one, and wait for it
        # in vain.
        deadline = time.monotonic() + START_SECONDS
        while _is_alive(containerd):
            assert time.monotonic() < deadline, "containerd does not die"
            time.sleep(_LOOK_SECONDS)
        self.socket.unlink(missing_ok=True)

    def stop(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def second_engine() -> Iterator[SecondEngine]:
    """Run a second engine, in a folder with a short name: the paths of its sockets must be
    short."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir="/var/tmp"))  # a disk, not tmpfs
    engine = SecondEngine(folder)
    try:
        # Without its own bridge, the second engine would take over the first one's.
        subprocess.run(["ip", "link", "add", _BRIDGE, "type", "bridge"], check=True, timeout=60)
        subprocess.run(["ip", "addr", "add", _SUBNET, "dev", _BRIDGE], check=True, timeout=60)
        engine.start()
        yield engine
    finally:
        engine.stop()
        subprocess.run(["ip", "link", "delete", _BRIDGE], check=False, timeout=60)
        _unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _unmount_below(folder: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((p for p in mounted if p.startswith(str(folder))), reverse=True):
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


@dataclass(frozen=True)
class SshServer:
    """An ssh server on the loopback interface, and the files with which to log in."""

    port: int
    options: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}"


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Run an ssh server with a host key and one authorised key, both in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True, timeout=60)
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\n"
        f"AuthorizedKeysFile {folder / 'authorized'}\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\n"
    )
    known = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(f"[127.0.0.1]:{port} {' '.join(known)}\n")
    command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "config")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _await_port(port, server, folder / "log")
        identity = ("-i", str(folder / "user"), "-o", "IdentitiesOnly=yes", "-F", "/dev/null")
        yield SshServer(port, (*identity, "-o", f"UserKnownHostsFile={folder / 'known'}"))
    finally:
        server.terminate()
        server.wait(20)


def _await_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def installation_folder() -> Iterator[Path]:
    """Mount this installation in a folder: the interpreter, its libraries, and this tree.

    The images of `make_images` use the folder as data directory. So they run the tested code
    without an hour of building and a gigabyte per machine. A relay has no data directory; it uses
    the folder as the volume of its state (`show_as_state`).
    """
    folder = Path(tempfile.mkdtemp(prefix="installation-", dir="/var/tmp"))
    try:
        for place in _PLACES:
            shown = folder / place.relative_to("/")
            shown.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", str(place), str(shown)], check=True)
        for name in ("bin", "lib", "lib64"):
            (folder / name).symlink_to(f"usr/{name}")
        yield folder
    finally:
        _unmount_below(folder)
        shutil.rmtree(folder)


def make_images(client: docker.DockerClient) -> None:
    """Make images of a few kilobytes with links to programs in the mounted installation."""
    for name in IMAGES:
        client.api.import_image_from_data(
            _links(_STATE if "relay" in name else "data"),
            repository=name.partition(":")[0],
            tag=name.partition(":")[2],
            changes=[
                f"ENV PATH={Path(sys.prefix) / 'bin'}:/usr/bin",
                *("ENV PYTHONUNBUFFERED=1", f"LABEL {_LABEL}=1"),
            ],
        )


def make_broken_image(client: docker.DockerClient, name: str, script: str) -> None:
    """Replace an image by one whose program is `script`; by one without a program if empty."""
    program = script.encode()
    buffer = io.BytesIO(_links("data"))
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        entry = tarfile.TarInfo("broken/potluck-client" if script else "broken/nothing")
        entry.size, entry.mode = len(program), 0o755
        archive.addfile(entry, io.BytesIO(program))
    repository, _, tag = name.partition(":")
    client.api.import_image_from_data(
        buffer.getvalue(),
        repository=repository,
        tag=tag,
        changes=["ENV PATH=/broken:/usr/bin", f"LABEL {_LABEL}=1"],
    )


def remove_images(client: docker.DockerClient) -> None:
    for name in IMAGES:
        with contextlib.suppress(DockerException):
            client.images.remove(name, force=True)
    client.images.prune({"dangling": True, "label": _LABEL})  # remove images that were replaced


def show_as_state(
    client: docker.DockerClient, volume: str, folder: Path, labels: dict[str, str]
) -> None:
    """Create a volume that is a bind mount of this folder."""
    options = {"type": "none", "o": "rbind", "device": str(folder)}
    client.volumes.create(volume, driver="local", driver_opts=options, labels=labels)


def _links(shown: str) -> bytes:
    """Return an archive of links to the place where an installation is shown, except the files that
    the engine itself writes."""
    tops = {place.parts[1] for place in _PLACES} | {"bin", "lib", "lib64"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("etc", "tmp", "var", "var/lib", "data", "proc", "sys", "dev"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name in sorted(tops):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"{shown}/{name}"
            archive.addfile(entry)
        users = b"root:x:0:0:root:/var/lib/potluck/state:/bin/sh\n"
        entry = tarfile.TarInfo("etc/passwd")
        entry.size = len(users)
        archive.addfile(entry, io.BytesIO(users))
    return buffer.getvalue()
