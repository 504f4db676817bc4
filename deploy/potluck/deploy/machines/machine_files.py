"""Files put into a container's volumes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable

from docker.models.containers import Container

from potluck.common.errors import UnreachableError
from potluck.deploy.machines.desired_state import (
    CONFIGURATION,
    STATE,
    STATE_FOLDER,
    DesiredContainer,
)

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
        raise UnreachableError(f"the engine did not take files for {container.name}")
