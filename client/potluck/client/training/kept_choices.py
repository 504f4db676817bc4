"""Choices that a host made once by measuring, stored as small JSON files.

A stored choice makes repeated runs on this machine equal, bit for bit. Several processes may share
a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.client.base.state_directory import storage_error


class KeptChoice(BaseModel):
    """A stored choice. subject: everything that the choice depends on, as text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str


Choice = TypeVar("Choice", bound=KeptChoice)


def read_choice(folder: Path | None, kind: type[Choice], subject: str) -> Choice | None:
    """Return a stored choice; None if its file is missing, damaged or of another kind."""
    if folder is None:
        return None
    try:
        found = kind.model_validate_json(_path(folder, subject).read_bytes())
    except (OSError, ValidationError):
        return None
    return found if found.subject == subject else None


def keep_choice(folder: Path | None, choice: Choice) -> Choice:
    """Store a choice and return it. If another process has stored one before, return that one.

    Raises StorageError."""
    if folder is None:
        return choice
    path = _path(folder, choice.subject)
    # A random name: process ids may be equal in two containers that share the folder.
    mine = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine.write_text(choice.model_dump_json(indent=2) + "\n", encoding="utf-8")
        try:
            os.link(mine, path)
        except OSError:  # the file exists, or the disk has no hard links
            first = read_choice(folder, type(choice), choice.subject)
            if first is not None:
                return first
            mine.replace(path)
        return choice
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)


def _path(folder: Path, subject: str) -> Path:
    return folder / f"{hashlib.sha256(subject.encode()).hexdigest()[:40]}.json"
