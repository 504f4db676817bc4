"""The coordinator's state directory, which only one process at a time may change."""

from __future__ import annotations

from pathlib import Path

from potluck.common.errors import StorageError
from potluck.common.process.folder_lock import FolderLock
from potluck.server.config import CoordinatorConfig

MODELS = "models"
"""Name of the folder of model files in a state directory."""


def locked_state(config: CoordinatorConfig) -> FolderLock:
    """Create the state directory if it is missing, and lock it so that no coordinator can use it.

    Raises ConfigurationError if a coordinator uses it already, StorageError if the disk fails.
    """
    # The store's own lock is not enough, because the store may be outside the state directory.
    return FolderLock(
        made_folder(config.state_directory),
        holder="coordinator",
        remedy="stop that process, or give each coordinator its own state_directory and database",
    )


def models_folder(config: CoordinatorConfig) -> Path:
    """Return the folder of the model files. Create it if it is missing. Raises StorageError."""
    return made_folder(config.state_directory / MODELS)


def made_folder(path: Path) -> Path:
    """Return a folder of the state. Create it if it is missing. Raises StorageError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"can't use {path} as a state directory: {error.strerror}; choose another "
            "`state_directory`, or change its permissions",
            path=path,
        ) from error
    return path
