"""The configuration of a relay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, field_validator

from potluck.common.monitoring.metrics_server import MetricsAddress
from potluck.common.monitoring.metrics_tls import MetricsTls
from potluck.common.net.tls import TlsFiles
from potluck.common.process.logs import LogFormat, LogLevel
from potluck.common.settings.configuration import Settings, annotated_example, load
from potluck.common.settings.configuration_errors import RELAY

ENVIRONMENT_PREFIX = "POTLUCK_RELAY"

_LAST_PORT = 65_535

_EXAMPLES = {
    "coordinator": '"coordinator.example:7443"',
    "listen": '"0.0.0.0:7443"',
    "state_directory": '"state/gate"',
    "tls.certificate": '"pki/gate.pem"',
    "tls.key": '"pki/gate.key"',
    "tls.authority": '"pki/authority.pem"',
}


class RelayConfig(Settings):
    """The settings of a relay: whom it dials, where it listens, what it keeps."""

    kind = RELAY

    coordinator: str = Field(description="Where the coordinator listens, HOST:PORT.")
    listen: str = Field(
        description="Where the hosts behind this relay dial: their `coordinator` setting. 0.0.0.0\n"
        "for every interface, port 0 for any free one."
    )
    state_directory: Path = Field(
        description="Files on their way down and up; survives a restart. Each relay needs its own."
    )
    revoked: Path | None = Field(
        default=None,
        description="The authority's revocation list, revoked.pem of `potluck pki revoke`. It is\n"
        "watched. The coordinator does not see the certificates of hosts behind a relay, so a\n"
        "host that is revoked is cut off by this list.",
    )
    maximum_model_bytes: int = Field(
        default=4 << 30, ge=1, description="No model or update may be larger than this."
    )
    cached_files: int = Field(
        default=4,
        ge=1,
        description="Files kept on disk for hosts to fetch, those used last: models, and what\n"
        "strategies send beside them.",
    )
    concurrent_transfers: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Files on their way to or from the coordinator at once; the others wait. The\n"
        "coordinator serves as many of one relay's as its transfers_per_peer allows.",
    )
    transfers_per_peer: int = Field(
        default=8, ge=1, description="Files on their way to or from one host at once."
    )
    sum_wait_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Where a run's hosts add up their clients' updates, their sums go on as one.\n"
        "So long the first of them waits for hosts that still train; later ones go by themselves.",
    )
    stall_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A host's transfer that makes no progress for so long is ended; it resumes it.",
    )
    least_bytes_per_second: int = Field(
        default=10_000,
        ge=1,
        description="A host's upload slower than this on average is ended as well, beyond\n"
        "stall_seconds of patience.",
    )
    reconnect_maximum_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="The longest pause between two attempts to transfer.",
    )
    metrics_address: MetricsAddress = Field(
        default="",
        description="Where /metrics, /healthz and /readyz are served: a port (on 127.0.0.1) or\n"
        "HOST:PORT; empty: nowhere. Over plain HTTP, unless there is metrics_tls.",
    )
    metrics_tls: MetricsTls | None = Field(
        default=None,
        description="Serve metrics over mutual TLS, to these scrapers only; for addresses that\n"
        "other machines reach. Its authority is not the federation's: `potluck pki init` makes\n"
        "one, in which each metrics address is a coordinator and each scraper an operator.",
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="auto (console on a terminal, else json), console or json.",
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="debug, info, warning or error.")
    tls: TlsFiles = Field(
        description="Who this relay is, to the coordinator and to its hosts; files made by\n"
        "`potluck pki issue FOLDER relay NAME`."
    )

    @field_validator("listen")
    @classmethod
    def _an_address(cls, listen: str) -> str:
        host, colon, port = listen.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
            raise ValueError(f"must be HOST:PORT, with a port from 0 to {_LAST_PORT}")
        return listen


def load_config(path: Path, overrides: Mapping[str, object]) -> RelayConfig:
    """Load a configuration file. Flags win over the environment, which wins over the file.

    A folder in the file is relative to the file; one from elsewhere is relative to the working
    directory.
    """
    return load(RelayConfig, path, environment_prefix=ENVIRONMENT_PREFIX, overrides=overrides)


def example_config() -> str:
    """Return the annotated example that `potluck-relay config` prints."""
    return annotated_example(RelayConfig, _EXAMPLES)
