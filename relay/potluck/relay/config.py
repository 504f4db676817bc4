"""The configuration of a relay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, field_validator

from potluck.common.monitoring.metrics_server import MetricsAddress, MetricsTls
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
    """The settings of a relay: its coordinator, the address that it listens on, the files it
    stores."""

    kind = RELAY

    coordinator: str = Field(description="Address of the coordinator, HOST:PORT.")
    listen: str = Field(
        description="Where the hosts behind this relay dial: their `coordinator` setting. 0.0.0.0\n"
        "for every interface, port 0 for any free one."
    )
    state_directory: Path = Field(
        description="Folder for files in transfer; needed after a restart. Each relay needs\n"
        "its own."
    )
    revoked: Path | None = Field(
        default=None,
        description="The authority's revocation list, revoked.pem of `potluck pki revoke`. It is\n"
        "watched. The coordinator does not see the certificates of hosts behind a relay, so a\n"
        "host that is revoked is cut off by this list.",
    )
    maximum_model_bytes: int = Field(
        default=4 << 30, ge=1, description="Maximum size of a model or update, in bytes."
    )
    cached_files: int = Field(
        default=4,
        ge=1,
        description="Number of files kept on disk for hosts, the last used ones: models, and\n"
        "files that strategies send with them.",
    )
    concurrent_transfers: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Maximum number of transfers with the coordinator at once; others wait. The\n"
        "coordinator's transfers_per_peer limits them, too.",
    )
    transfers_per_peer: int = Field(
        default=8, ge=1, description="Maximum number of transfers with one host at once."
    )
    sum_wait_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds for which a host's sum of updates waits for the sums of other hosts\n"
        "that still train; the relay sends them as one. Later sums are sent by themselves.",
    )
    stall_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without progress after which a host's transfer is ended; the host\n"
        "resumes it.",
    )
    least_bytes_per_second: int = Field(
        default=10_000,
        ge=1,
        description="Minimum average rate of a host's upload; a slower one is ended after another\n"
        "stall_seconds.",
    )
    reconnect_maximum_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Maximum seconds between two attempts at a transfer.",
    )
    metrics_address: MetricsAddress = Field(
        default="",
        description="Address of /metrics, /healthz and /readyz: a port (on 127.0.0.1) or\n"
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
        description="Certificate of this relay for the coordinator and its hosts; files made by\n"
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

    A relative path in the file is relative to the file's folder. A relative path from a flag or the
    environment is relative to the current folder.
    """
    return load(RelayConfig, path, environment_prefix=ENVIRONMENT_PREFIX, overrides=overrides)


def example_config() -> str:
    """Return the annotated example that `potluck-relay config` prints."""
    return annotated_example(RelayConfig, _EXAMPLES)
