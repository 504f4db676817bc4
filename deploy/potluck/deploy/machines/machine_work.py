"""Observes and changes one machine's containers. Calls block; each machine has its own thread."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.models.volumes import Volume

from potluck.common.errors import ConfigurationError, RunError, UnreachableError
from potluck.deploy.machines import machine_images
from potluck.deploy.machines.container_start import NotConnectedError, await_connected
from potluck.deploy.machines.deploy_plan import Observed, ObservedContainer, Step, StepKind
from potluck.deploy.machines.desired_state import (
    CONFIGURATION,
    CONFIGURATION_LABEL,
    DIGEST_LABEL,
    FEDERATION_LABEL,
    PARTY_LABEL,
    STATE,
    STATE_FOLDER,
    STOP_SECONDS,
    TLS_LABEL,
    DesiredContainer,
)
from potluck.deploy.machines.docker_engine import containers_of, ssh_command
from potluck.deploy.machines.inventory import MachineSettings
from potluck.deploy.machines.side_by_side import Say

# Files in volumes ---------------------------------------------------------------------------------

_FOLDER_MODE = 0o550
_FILE_MODE = 0o440


def write_files(container: Container, desired: DesiredContainer) -> None:
    """Write all files of a party, and create its state folder, which belongs to its user.

    Only root can change the files; the container's group can read them. Raises DockerException.
    """
    user, group = map(int, desired.user.split(":"))
    files = {
        **desired.files.others,
        **{f"tls/{name}": data for name, data in desired.files.tls.items()},
    }
    folders = sorted({name.rpartition("/")[0] for name in files if "/" in name})
    entries = [(_entry(each, _FOLDER_MODE, 0, group, tarfile.DIRTYPE), b"") for each in folders]
    entries += [
        (_entry(name, _FILE_MODE, 0, group, tarfile.REGTYPE), data) for name, data in files.items()
    ]
    state = _entry(STATE_FOLDER, 0o700, user, group, tarfile.DIRTYPE)
    _put(container, CONFIGURATION, _archive(entries))
    _put(container, STATE, _archive([(state, b"")]))


def saved_files(container: Container) -> bytes:
    """Return a party's current files as a tar for `restore_files`. Raises DockerException."""
    chunks, _ = container.get_archive(f"{CONFIGURATION}/.")
    return b"".join(chunks)


def restore_files(container: Container, archive: bytes) -> None:
    """Write back the files that `saved_files` returned."""
    _put(container, CONFIGURATION, archive)


def _archive(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Return a tar of folders and files, in the given order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry, data in entries:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _entry(name: str, mode: int, user: int, group: int, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid, entry.type = mode, user, group, kind
    return entry


def _put(container: Container, path: str, archive: bytes) -> None:
    if not container.put_archive(path, archive):
        raise UnreachableError(
            f"the Docker engine refused the files of container {container.name}; see the engine's "
            "log"
        )


# Work on a machine --------------------------------------------------------------------------------

_SSH_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class MachineWork:
    """Operations on the container engine of one machine. source: this machine's engine, from which
    images are streamed.
    """

    machine: MachineSettings
    federation: str
    client: docker.DockerClient
    source: docker.DockerClient | None
    say: Say

    # Looking ----------------------------------------------------------------------------------

    def check_engine(self, desired: Sequence[DesiredContainer]) -> None:
        """Raise ConfigurationError if the engine lacks a feature that the containers need."""
        information: dict[str, Any] = self.client.info()
        if information.get("OSType") != "linux":
            raise ConfigurationError(
                f"the engine of machine {self.machine.name} runs {information.get('OSType')} "
                "containers, but Potluck needs Linux containers"
            )
        wants_gpus = any("device_requests" in one.options for one in desired)
        runtimes = information.get("Runtimes") or {}
        if wants_gpus and "nvidia" not in runtimes and not information.get("CDISpecDirs"):
            raise ConfigurationError(
                f"hosts on machine {self.machine.name} need GPUs, but the machine's engine has no "
                f"NVIDIA runtime (only {', '.join(sorted(runtimes)) or 'none'}); install "
                "nvidia-container-toolkit on the machine, run `nvidia-ctk runtime configure`, "
                "and restart the engine"
            )

    def containers(self) -> list[Container]:
        """Return this federation's containers."""
        return containers_of(self.client, self.federation)

    def observe(self, desired: Sequence[DesiredContainer]) -> Observed:
        """Observe the machine. Raises ConfigurationError if a desired container's name is taken."""
        ours = {str(container.name): container for container in self.containers()}
        for one in desired:
            if one.name not in ours and self._find(one.name) is not None:
                raise ConfigurationError(
                    f"machine {self.machine.name} has a container {one.name} that does not belong "
                    "to this federation; remove or rename the container"
                )
        images: dict[str, str] = {}
        for name in {one.image for one in desired}:
            found = machine_images.find_image(self.client, name)
            if found is not None:
                images[name] = machine_images.fingerprint(found)
        labels = {str(v.name): v.attrs.get("Labels") or {} for v in self._volumes()}
        observed = {
            name: self._observe(container, labels.get(f"{name}-files", {}))
            for name, container in ours.items()
        }
        return Observed(containers=observed, images=images)

    def _find(self, name: str) -> Container | None:
        try:
            return self.client.containers.get(name)
        except NotFound:
            return None

    def _volumes(self) -> list[Volume]:
        found = {"label": f"{FEDERATION_LABEL}={self.federation}"}
        return list(self.client.volumes.list(filters=found))

    def _observe(self, container: Container, files: Mapping[str, str]) -> ObservedContainer:
        image = machine_images.find_image(self.client, str(container.attrs["Image"]))
        return ObservedContainer(
            name=str(container.name),
            party=container.labels.get(PARTY_LABEL, ""),
            digest=container.labels.get(DIGEST_LABEL, ""),
            image="" if image is None else machine_images.fingerprint(image),
            running=container.status in ("running", "restarting"),
            state=container.status,
            configuration_digest=files.get(CONFIGURATION_LABEL, ""),
            tls_digest=files.get(TLS_LABEL, ""),
        )

    # Doing ------------------------------------------------------------------------------------

    def put_images(self, steps: Sequence[Step]) -> None:
        """Put the images of a plan on the machine."""
        for step in steps:
            if step.kind is StepKind.PUT_IMAGE:
                self.say(str(step))
                self._put_image(step.subject)

    def carry_out(self, step: Step, one: DesiredContainer | None, seconds: float) -> None:
        """Carry out the step of one container, and wait until the container is connected.

        one: the desired container; None for a removal. If the container can't start, ends, or isn't
        connected within `seconds`, restore the previous state and raise RunError.
        """
        self.say(str(step))
        if one is None:
            self.remove(step.subject, keep_state=True)
        elif step.kind is StepKind.CREATE:
            self._create(one, seconds, "no container was left in its place")
        elif step.kind is StepKind.REPLACE:
            self._replace(one, seconds)
        else:
            self._change(step.kind, one, seconds)

    def _replace(self, one: DesiredContainer, seconds: float) -> None:
        old = self._find(one.before) or self.client.containers.get(one.name)
        files, labels = saved_files(old), self._labels(one.marker)
        try:
            self._set_aside(old, one)
            self._create(one, seconds, "the previous container was restored")
        except BaseException:
            restore_files(old, files)
            self._mark(one, labels)
            old.reload()
            if old.name != one.name:
                old.rename(one.name)
            with contextlib.suppress(APIError):  # the old container didn't run before either
                old.start()
            raise
        old.remove(force=True)

    def _set_aside(self, old: Container, one: DesiredContainer) -> None:
        """Stop the container that will be replaced, and keep it under another name."""
        if old.name == one.name:
            old.stop(timeout=STOP_SECONDS)
            old.rename(one.before)
        elif (unfinished := self._find(one.name)) is not None:
            unfinished.remove(force=True)

    def _change(self, kind: StepKind, one: DesiredContainer, seconds: float) -> None:
        """Write changed files into a container, or start a stopped container."""
        container = self.client.containers.get(one.name)
        runs = container.status == "running"
        if kind is StepKind.START:
            with self._watched(one, "the container was stopped again"):
                try:
                    container.start()
                    await_connected(container, one, seconds)
                except BaseException:
                    container.stop(timeout=STOP_SECONDS)
                    raise
            return
        files, labels = saved_files(container), self._labels(one.marker)
        with self._watched(one, "the container's previous files were restored"):
            try:
                self._write_files(container, one)
                if kind is StepKind.REFRESH and runs:
                    return  # the running program reloads certificates
                container.restart(timeout=STOP_SECONDS)
                await_connected(container, one, seconds)
            except BaseException:
                restore_files(container, files)
                self._mark(one, labels)
                container.restart(timeout=STOP_SECONDS)
                raise

    def _create(self, one: DesiredContainer, seconds: float, otherwise: str) -> None:
        """Create a container. otherwise: the state after a failure, as a clause for the error."""
        ours = {FEDERATION_LABEL: self.federation, PARTY_LABEL: one.party}
        for volume in one.volumes:
            self._make_volume(volume, ours)
        options = dict(one.options)
        labels = options.pop("labels") | ours | {DIGEST_LABEL: one.digest}
        with self._watched(one, otherwise):
            container = self.client.containers.create(
                one.image, name=one.name, labels=labels, **options
            )
            try:
                self._write_files(container, one)
                container.start()
                await_connected(container, one, seconds)
            except BaseException:
                container.remove(force=True)  # else it would look complete, without its files
                raise

    @contextlib.contextmanager
    def _watched(self, one: DesiredContainer, otherwise: str) -> Iterator[None]:
        """Raise RunError, with party and image, if a container can't start or doesn't connect."""
        subject = one.party if one.party == one.role else f"{one.role} {one.party}"
        try:
            yield
        except APIError as error:
            why = " ".join(str(error.explanation or error).split())
            exit_code = None
            said = f"{subject} can't start with image {one.image}: {why}"
        except NotConnectedError as error:
            exit_code = error.exit_code
            said = f"{subject} did not connect with image {one.image}: {error.why}"
            said += f"; its log ends with: {error.log or '(the log is empty)'}"
        else:
            return
        raise RunError(
            f"{said}; {otherwise}. Fix the image or the inventory, then run `potluck deploy up`",
            machine=self.machine.name,
            party=one.party,
            image=one.image,
            exit_code=exit_code,
        )

    def _write_files(self, container: Container, one: DesiredContainer) -> None:
        self._remove_volume(one.marker)  # a marker must exist only if all files are written
        write_files(container, one)
        self._mark(one, one.file_labels)

    def _mark(self, one: DesiredContainer, labels: Mapping[str, str]) -> None:
        """Record which files were written. labels: the files' digests."""
        self._remove_volume(one.marker)
        ours = {FEDERATION_LABEL: self.federation, PARTY_LABEL: one.party}
        self._make_volume(one.marker, {**labels, **ours})

    def _labels(self, volume: str) -> dict[str, str]:
        try:
            return dict(self.client.volumes.get(volume).attrs.get("Labels") or {})
        except NotFound:
            return {}

    def _make_volume(self, name: str, labels: dict[str, str]) -> None:
        self.client.volumes.create(name, labels=labels)
        # Read again: after a restart, an engine's answer lacks the labels of an existing volume.
        found = self._labels(name)
        if found.get(FEDERATION_LABEL) != self.federation:
            raise ConfigurationError(
                f"machine {self.machine.name} has a volume {name} that does not belong to this "
                "federation; remove the volume"
            )

    def _put_image(self, name: str) -> None:
        if self.source is None:
            machine_images.pull_image(self.client, name, self.say)
        else:
            size = int(machine_images.local_image(self.source, name).get("Size", 0))
            machine_images.check_room(self._free_bytes(), size, self.machine.name)
            machine_images.stream_image(self.source, self.client, name, self.say)
        if machine_images.find_image(self.client, name) is None:
            raise RunError(
                f"image {name} is missing on machine {self.machine.name}, although the "
                "image was sent"
            )
        marker = machine_images.marker_name(self.federation, name)
        labels = {FEDERATION_LABEL: self.federation, machine_images.MARKER_LABEL: name}
        self._make_volume(marker, labels)

    def _free_bytes(self) -> int | None:
        """Return the free bytes of the engine's image store; None if their number is unknown."""
        folder = self.client.info().get("DockerRootDir")
        if not isinstance(folder, str):
            return None
        if self.machine.engine.startswith("unix://"):
            try:
                space = os.statvfs(folder)
            except OSError:
                return None
            return space.f_bavail * space.f_frsize
        if not self.machine.engine.startswith("ssh://"):
            return None
        command = [*ssh_command(self.machine), "df", "-Pk", "--", folder]
        said = subprocess.run(
            command, capture_output=True, timeout=_SSH_SECONDS, check=False, text=True
        ).stdout.split()
        return int(said[-3]) << 10 if len(said) > 6 and said[-3].isdigit() else None

    # Undoing ----------------------------------------------------------------------------------

    def remove(self, name: str, *, keep_state: bool) -> None:
        """Remove a container of this federation and its volumes."""
        self._remove_container(name)
        for suffix in ("configuration", "files", *(() if keep_state else ("state",))):
            self._remove_volume(f"{name}-{suffix}")

    def remove_all(self, *, keep_state: bool) -> list[str]:
        """Remove everything this federation made on the machine. Return the removed names."""
        gone: list[str] = []
        for container in self.containers():  # signal all first; the next loop waits for each
            with contextlib.suppress(APIError):  # it is not running
                container.kill("SIGTERM")
        for container in self.containers():
            self.say(f"removing {container.name}")
            self._remove_container(str(container.name))
            gone.append(str(container.name))
        for volume in self._volumes():
            image = (volume.attrs.get("Labels") or {}).get(machine_images.MARKER_LABEL)
            if image is not None:
                self._remove_image(image)
            elif keep_state and volume.name is not None and volume.name.endswith("-state"):
                continue
            self._remove_volume(str(volume.name))
            gone.append(str(volume.name))
        return gone

    def _remove_container(self, name: str) -> None:
        try:
            container = self.client.containers.get(name)
            container.stop(timeout=STOP_SECONDS)
            container.remove(force=True)
        except NotFound:
            pass

    def _remove_volume(self, name: str) -> None:
        try:
            volume = self.client.volumes.get(name)
            if (volume.attrs.get("Labels") or {}).get(FEDERATION_LABEL) == self.federation:
                volume.remove()
        except NotFound:
            pass

    def _remove_image(self, name: str) -> None:
        try:
            self.client.images.remove(name)
        except NotFound:
            pass
        except APIError as error:
            if error.status_code != 409:  # the image is in use elsewhere: keep it
                raise
