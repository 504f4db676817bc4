"""The configuration of a relay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from potluck.common.monitoring.metrics_server import MetricsAddress, MetricsTlsOrNone
from potluck.common.net.listening import ListenAddress
from potluck.common.net.tls import TlsFiles
from potluck.common.process.logs import LogFormat, LogLevel
from potluck.common.real_time import Seconds
from potluck.common.settings.configuration import Settings, annotated_example, load
from potluck.common.settings.configuration_errors import RELAY

ENVIRONMENT_PREFIX = "POTLUCK_RELAY"


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
    listen: ListenAddress = Field(
        description="Address on which the relay listens for hosts, HOST:PORT; hosts name the\n"
        "relay as their `coordinator`. 0.0.0.0 for every interface, port 0 for any free port."
    )
    state_directory: Path = Field(
        description="Folder for files in transfer. The relay needs it again after a restart.\n"
        "Each relay needs its own folder."
    )
    revoked: Path | None = Field(
        default=None,
        description="The TLS authority's revocation list, revoked.pem, which `potluck pki\n"
        "revoke` creates. It is reloaded when it changes. The coordinator does not see the\n"
        "certificates of hosts behind a relay; only this list disconnects such a host when it is\n"
        "revoked.",
    )
    maximum_model_bytes: int = Field(
        default=4 << 30, ge=1, description="Maximum size of a model or update, in bytes."
    )
    cached_files: int = Field(
        default=4,
        ge=1,
        description="Number of recently used files that the relay keeps on disk for hosts:\n"
        "models, and files that strategies send with models.",
    )
    concurrent_transfers: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Maximum number of simultaneous transfers with the coordinator; further\n"
        "transfers wait. The coordinator's transfers_per_peer also limits them.",
    )
    transfers_per_peer: int = Field(
        default=8, ge=1, description="Maximum number of simultaneous transfers per host."
    )
    sum_wait_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds for which a host's sum of updates waits for the sums of hosts that\n"
        "still train. The relay then adds these sums up and sends the coordinator one sum; later\n"
        "sums are sent separately.",
    )
    stall_seconds: Seconds = Field(
        default=60.0,
        description="Seconds without progress after which a host's transfer is ended; the host\n"
        "resumes it.",
    )
    least_bytes_per_second: int = Field(
        default=10_000,
        ge=1,
        description="Minimum average speed of a host's upload in bytes per second, after the\n"
        "first stall_seconds. A slower upload is ended.",
    )
    reconnect_maximum_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Maximum pause between two attempts at a transfer, in seconds.",
    )
    metrics_address: MetricsAddress = ""
    metrics_tls: MetricsTlsOrNone = None
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="Format of log lines: auto (console on a terminal, else json), console or\n"
        "json.",
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="Minimum level of log lines: debug, info, warning or error.",
    )
    tls: TlsFiles = Field(
        description="Certificate and key of the relay, for the coordinator and for hosts, made\n"
        "by `potluck pki issue FOLDER relay NAME`."
    )


def load_config(path: Path, overrides: Mapping[str, object]) -> RelayConfig:
    """Load a configuration file. Flags win over the environment, which wins over the file.

    A relative path in the file is relative to the file's folder. A relative path from a flag or the
    environment is relative to the current folder.
    """
    return load(RelayConfig, path, environment_prefix=ENVIRONMENT_PREFIX, overrides=overrides)


def example_config() -> str:
    """Return the annotated example that `potluck-relay config` prints."""
    return annotated_example(RelayConfig, _EXAMPLES)
