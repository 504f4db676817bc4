"""Fingerprints of images, and the transfer of images to a machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import docker
from docker.errors import ImageNotFound

from potluck.common.errors import ConfigurationError, StorageError

MARKER_LABEL = "potluck.image"
"""Label of an empty volume; it marks an image that `potluck deploy` put on the machine."""

_CHUNK = 1 << 20
_SPARE_BYTES = 1 << 30


def fingerprint(attributes: dict[str, Any]) -> str:
    """Return a digest that is the same for an image on every engine.

    An image's id can't be used: it differs between kinds of image store.
    """
    settings = attributes.get("Config") or {}
    said = [
        (attributes.get("RootFS") or {}).get("Layers"),
        [settings.get(key) for key in ("Env", "Entrypoint", "Cmd", "User", "WorkingDir")],
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def find_image(client: docker.DockerClient, name: str) -> dict[str, Any] | None:
    """Return an image's attributes on an engine; None if it is missing. Raises DockerException."""
    try:
        return dict(client.images.get(name).attrs)
    except ImageNotFound:
        return None


def local_image(client: docker.DockerClient, name: str) -> dict[str, Any]:
    """Return the attributes of an image to stream. Raises ConfigurationError if it is missing."""
    found = find_image(client, name)
    if found is None:
        raise ConfigurationError(
            f"this machine's engine lacks the image {name}, which should be streamed to other "
            'machines; build or pull the image, or set image.source = "registry"',
            image=name,
        )
    return found


def stream_image(
    source: docker.DockerClient,
    target: docker.DockerClient,
    name: str,
    progress: Callable[[str], None],
) -> None:
    """Send an image from one engine to another, without storing it in a file in between."""
    size = int(local_image(source, name).get("Size", 0))
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for chunk in source.images.get(name).save(chunk_size=_CHUNK, named=name):
            sent += len(chunk)
            progress(f"sending {name}: {sent >> 20} of about {size >> 20} MiB")
            yield chunk

    target.images.load(chunks())  # type: ignore[arg-type]  # the stubs want bytes; requests streams


def pull_image(target: docker.DockerClient, name: str, progress: Callable[[str], None]) -> None:
    """Make a machine's engine pull an image from its registry."""
    progress(f"pulling {name}")
    if "@" in name:
        target.images.pull(name)
        return
    repository, _, tag = name.rpartition(":")
    if not repository or "/" in tag:
        repository, tag = name, "latest"
    target.images.pull(repository, tag=tag)


def check_room(free: int | None, needed: int, where: str) -> None:
    """Raise StorageError unless there is space for an image and one gigabyte more."""
    if free is not None and free < needed + _SPARE_BYTES:
        raise StorageError(
            f"machine {where} has {free >> 20} MiB free, but the image needs {needed >> 20} MiB "
            "and one more gigabyte; free disk space (`docker image prune`)"
        )


def marker_name(federation: str, image: str) -> str:
    """Return the name of the volume that marks an image as put there by `potluck deploy`."""
    return f"potluck-{federation}-image-{hashlib.sha256(image.encode()).hexdigest()[:12]}"
