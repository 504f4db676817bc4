"""The coordinator's configuration file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from potluck.common.monitoring.metrics_server import MetricsAddress
from potluck.common.monitoring.metrics_tls import MetricsTls
from potluck.common.net.tls import TlsFiles
from potluck.common.process.logs import LogFormat, LogLevel
from potluck.common.settings.configuration import Settings, annotated_example
from potluck.common.settings.configuration_errors import COORDINATOR
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.tracing.tracing_settings import TracingSettings

_LAST_PORT = 65_535
_STORE = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/(?!\.)[\w.-]+)*)/?", re.ASCII
)


class FilesSettings(Settings):
    """How models and updates move between coordinator and hosts."""

    store: str = Field(
        default="",
        description="An object store that they go through, s3://BUCKET or s3://BUCKET/PREFIX;\n"
        "empty: straight from one to the other. No two coordinators may have the same.",
    )
    endpoint: str = Field(
        default="",
        description="Its address as coordinator and hosts reach it, such as\n"
        "https://minio.example.org:9000; empty: AWS_ENDPOINT_URL, or Amazon's of the region.",
    )
    region: str = Field(default="", description="Its region; empty: AWS_REGION, or else us-east-1.")
    credentials: Path | None = Field(
        default=None,
        description="A file with aws_access_key_id and aws_secret_access_key under [default],\n"
        "read whenever they are needed; without it they come from the environment.",
    )
    authority: Path | None = Field(
        default=None,
        description="The certificate of the authority of its address, where that is not public.",
    )
    fallback: bool = Field(
        default=True,
        description="Whether files go straight to and from hosts that can't use the store, and\n"
        "while it can't be used. If not, rounds wait for it, and other hosts are left out.",
    )
    url_seconds: int = Field(
        default=900,
        ge=10,
        le=604_800,
        description="How long a URL given to a host is good; a transfer that has begun may go on.",
    )

    @field_validator("store")
    @classmethod
    def _a_store(cls, store: str) -> str:
        if store and _STORE.fullmatch(store) is None:
            raise ValueError("must be s3://BUCKET or s3://BUCKET/PREFIX")
        return store

    @field_validator("endpoint")
    @classmethod
    def _an_endpoint(cls, endpoint: str) -> str:
        if endpoint and re.fullmatch(r"https?://[^/?#@]+/?", endpoint) is None:
            raise ValueError("must be https://HOST or https://HOST:PORT")
        return endpoint.rstrip("/")

    @property
    def bucket(self) -> str:
        """The name of the bucket; empty without a store."""
        found = _STORE.fullmatch(self.store)
        return found["bucket"] if found else ""

    @property
    def prefix(self) -> str:
        """Common prefix of all keys, with a slash at its end; empty for none."""
        found = _STORE.fullmatch(self.store)
        return f"{found['prefix'].strip('/')}/" if found and found["prefix"] else ""


class CoordinatorConfig(Settings):
    """Settings of a coordinator on its machine. Run files define what it trains."""

    kind = COORDINATOR

    listen: str = Field(
        default="127.0.0.1:7443",
        description="Address hosts and operators connect to; 0.0.0.0 for every interface,\n"
        "port 0 for any free one.",
    )
    state_directory: Path = Field(
        description="Where runs, models and updates are kept; one coordinator at a time uses it."
    )
    database: str = Field(
        default="",
        repr=False,
        description="Where runs are recorded: empty for SQLite in the state directory, or a URL\n"
        "such as postgresql+psycopg://user@host/potluck.",
    )
    data_directory: Path | None = Field(
        default=None,
        description="Where tasks find the coordinator's own held-out data, if they need it.",
    )
    heartbeat_seconds: float = Field(
        default=2.0, gt=0, le=60, description="How often hosts report their progress."
    )
    maximum_model_bytes: int = Field(
        default=4 << 30, gt=0, description="No model or update may be larger than this."
    )
    concurrent_transfers: int = Field(
        default=32, ge=1, description="Transfers served at once; further ones wait their turn."
    )
    calls_per_peer: int = Field(
        default=300,
        ge=8,
        description="Calls one certificate may have under way at once; further ones are refused,\n"
        "so that one host can't fill the coordinator's memory.",
    )
    transfers_per_peer: int = Field(
        default=8,
        ge=1,
        description="Of the transfers served at once, how many may be one host's; further ones\n"
        "wait, so that one host can't keep the others out.",
    )
    stall_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A transfer that makes no progress for so long is ended; the host resumes it.",
    )
    least_bytes_per_second: int = Field(
        default=10_000,
        ge=1,
        description="An upload slower than this on average is ended as well, beyond stall_seconds\n"
        "of patience: trickling bytes must not hold a place for ever.",
    )
    model_modules: tuple[str, ...] = Field(
        default=MODEL_MODULES,
        description="Python modules from which a run file may name a model, MODULE:NAME; whatever\n"
        "they offer can be called. Others are refused.",
    )
    threads: int = Field(
        default=1,
        ge=1,
        description="Threads torch evaluates with; another number may change last digits.",
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
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="Least important messages logged: debug, info, warning or error.",
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="auto (console on a terminal, else json), console or json.",
    )
    federation_root: Path | None = Field(
        default=None,
        description="The federation root's public key, root.pub; with it only profiles signed by\n"
        "members are accepted. The root itself belongs elsewhere.",
    )
    members: Path | None = Field(
        default=None,
        description="The members, members.json; made by `potluck pki member`. It is followed when\n"
        "it changes, and hosts get it from here; `potluck pki publish` sends a newer one.",
    )
    independent_root: bool = Field(
        default=False,
        description="Whether whoever keeps the federation root is somebody else than who runs the\n"
        "coordinator. Nothing depends on it but what is said: secure sums hold against a lying\n"
        "coordinator only where it is so.",
    )
    revoked: Path | None = Field(
        default=None,
        description="The authority's revocation list, revoked.pem of `potluck pki revoke`. It is\n"
        "watched: who is revoked is cut off without a restart. Lists that an operator sends with\n"
        "`potluck pki push` are kept in the state directory and need no setting.",
    )
    files: FilesSettings = Field(
        default=FilesSettings(), description="How models and updates move."
    )
    tracing: TracingSettings = Field(
        default=TracingSettings(), description="Where spans of OpenTelemetry go."
    )
    sinks: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        repr=False,
        description="Where runs are recorded besides: a table for each sink, [sinks.mlflow] for\n"
        "one, with its options; `plugin` names its kind where the table is named otherwise.\n"
        "docs/guides/trackers.md has them all.",
    )
    tls: TlsFiles = Field(description="The coordinator's certificate; made by `potluck pki`.")

    @field_validator("model_modules", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        """From a flag or the environment they come as one text with commas."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("listen")
    @classmethod
    def _an_address(cls, listen: str) -> str:
        host, colon, port = listen.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
            raise ValueError(f"must be HOST:PORT, with a port from 0 to {_LAST_PORT}")
        return listen

    def database_url(self) -> str:
        """The SQLAlchemy URL of the store."""
        return self.database or f"sqlite:///{self.state_directory / 'potluck.sqlite3'}"


_EXAMPLES = {
    "state_directory": '"coordinator"',
    "tls.certificate": '"pki/coordinator.pem"',
    "tls.key": '"pki/coordinator.key"',
    "tls.authority": '"pki/authority.pem"',
}


def example_config() -> str:
    """The annotated example that `potluck-server config` prints."""
    return annotated_example(CoordinatorConfig, _EXAMPLES)
