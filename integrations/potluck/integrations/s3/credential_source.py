"""Reads the object store's credentials from a file or the environment."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

from potluck.common.errors import ConfigurationError
from potluck.integrations.s3.presigning import Credentials

_NAMES = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


def read_credentials(file: Path | None) -> Credentials:
    """Read credentials from a file, or from the environment if `file` is None.

    `file`: in the format of AWS's tools, with a profile `default`. It is read again at each call,
    so that temporary credentials may be replaced. Raises ConfigurationError.
    """
    found = dict(os.environ) if file is None else _read(file)
    access_key, secret_key, token = (found.get(name.upper(), "") for name in _NAMES)
    if not access_key or not secret_key:
        where = "the environment" if file is None else str(file)
        raise ConfigurationError(
            f"{where} has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the object store; "
            "set them, or set `credentials` in [files] to a file that has them"
        )
    return Credentials(access_key=access_key, secret_key=secret_key, session_token=token)


def _read(file: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text(encoding="utf-8"))
        return {name.upper(): value for name, value in parser["default"].items()}
    except OSError as error:
        raise ConfigurationError(f"{file} can't be read: {error.strerror}", path=file) from error
    except (configparser.Error, KeyError, UnicodeDecodeError):  # their texts would show secrets
        raise ConfigurationError(
            f"{file} is not a credentials file; it must have a section [default] with "
            "aws_access_key_id and aws_secret_access_key",
            path=file,
        ) from None
