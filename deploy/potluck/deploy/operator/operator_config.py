"""The coordinator that `potluck` connects to, from flags, environment or operator.toml."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from potluck.common.errors import ConfigurationError
from potluck.common.net.tls import TlsFiles
from potluck.common.settings.configuration import (
    Settings,
    annotated_example,
    environment,
    load,
    validate,
)
from potluck.common.settings.configuration_errors import OPERATOR

ENVIRONMENT_PREFIX = "POTLUCK"
FILE_NAME = "operator.toml"

_TLS_FIELDS = ("certificate", "key", "authority")
_EXAMPLES = {
    "coordinator": '"127.0.0.1:7443"',
    "tls.certificate": '"pki/operator.pem"',
    "tls.key": '"pki/operator.key"',
    "tls.authority": '"pki/authority.pem"',
}


class OperatorConfig(Settings):
    """operator.toml."""

    kind = OPERATOR

    coordinator: str = Field(description="Address of the coordinator, HOST:PORT.")
    server_name: str | None = Field(
        default=None,
        description="Name that the coordinator's certificate must have instead of HOST; for\n"
        "tunnels.",
    )
    tls: TlsFiles = Field(
        description="Files with the operator's certificate and key, made by `potluck pki issue`."
    )


@dataclass(frozen=True, kw_only=True)
class OperatorFlags:
    """Flags of the command line; None for a flag that is not set."""

    coordinator: str | None = None
    server_name: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    config: Path | None = None


def default_files() -> list[Path]:
    """Return the paths at which operator.toml is looked for, in this order."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [Path(FILE_NAME), base / "potluck" / FILE_NAME]


def load_operator_config(
    flags: OperatorFlags, candidates: Sequence[Path] | None = None
) -> OperatorConfig:
    """Load the configuration from flags, the environment (POTLUCK_*) and a file, in this order.

    candidates: paths of possible files, used if no flag or variable names a file. The first that
    exists is read; none has to exist. Raises ConfigurationError.
    """
    values = _from_environment_and_flags(flags)
    path = flags.config or _environment_path("config")
    if path is None:
        candidates = default_files() if candidates is None else candidates
        path = next((candidate for candidate in candidates if candidate.exists()), None)
    if path is None:
        return _without_file(values, candidates or [])
    tls = {name: values.pop(name) for name in _TLS_FIELDS if name in values}
    if len(tls) == len(_TLS_FIELDS):
        values["tls"] = tls
        return load(OperatorConfig, path, environment_prefix=ENVIRONMENT_PREFIX, overrides=values)
    config = load(OperatorConfig, path, environment_prefix=ENVIRONMENT_PREFIX, overrides=values)
    return config.model_copy(update={"tls": config.tls.model_copy(update=tls)})


def _from_environment_and_flags(flags: OperatorFlags) -> dict[str, Any]:
    values: dict[str, Any] = dict(environment(OperatorConfig, ENVIRONMENT_PREFIX))
    for name in _TLS_FIELDS:
        path = getattr(flags, name) or _environment_path(name)
        if path is not None:
            values[name] = path
    for name in ("coordinator", "server_name"):
        if getattr(flags, name) is not None:
            values[name] = getattr(flags, name)
    return values


def _environment_path(name: str) -> Path | None:
    text = os.environ.get(f"{ENVIRONMENT_PREFIX}_{name.upper()}")
    return Path(text) if text else None


def _without_file(values: dict[str, Any], looked_for: Sequence[Path]) -> OperatorConfig:
    missing = [name for name in ("coordinator", *_TLS_FIELDS) if name not in values]
    if missing:
        flags = ", ".join(f"--{name}" for name in missing)
        places = [_shown(path) for path in looked_for]
        if len(places) > 1:
            where = f"in neither {' nor '.join(places)}"
        else:
            where = f"not in {places[0]}" if places else "not set"
        raise ConfigurationError(
            "can't find a coordinator: the coordinator's address and the operator's certificate "
            f"are {where}; write a file (`potluck config operator > {FILE_NAME}`, then edit it), "
            f"name a file with --config, or give {flags}; without a federation, try `potluck demo`"
        )
    values["tls"] = {name: values.pop(name) for name in _TLS_FIELDS}
    return validate(OperatorConfig, values, source="the command line and the environment")


def _shown(path: Path) -> str:
    """Return a path as people write it: relative to the current or the home folder."""
    if not path.is_absolute():
        return f"./{path}"
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def example_operator_config() -> str:
    """Return the annotated example that `potluck config operator` prints."""
    return annotated_example(OperatorConfig, _EXAMPLES)
