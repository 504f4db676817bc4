"""The coordinator's configuration file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from potluck.common.monitoring.metrics_server import MetricsAddress, MetricsTlsOrNone
from potluck.common.net.listening import ListenAddress
from potluck.common.net.tls import TlsFiles
from potluck.common.net.web_origin import web_origin
from potluck.common.process.logs import LogFormat, LogLevel
from potluck.common.real_time import Seconds
from potluck.common.settings.configuration import Settings, annotated_example
from potluck.common.settings.configuration_errors import COORDINATOR
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.tracing import TracingSettings

_STORE = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/(?!\.)[\w.-]+)*)/?", re.ASCII
)


class FilesSettings(Settings):
    """Transfer of models and updates between coordinator and hosts."""

    store: str = Field(
        default="",
        description="Object store through which models and updates are sent, s3://BUCKET or\n"
        "s3://BUCKET/PREFIX. Each coordinator needs its own bucket or prefix. Empty: coordinator\n"
        "and hosts send them directly.",
    )
    endpoint: str = Field(
        default="",
        description="Address at which coordinator and hosts reach the object store, such as\n"
        "https://minio.example.org:9000. Empty: the environment variable AWS_ENDPOINT_URL, or\n"
        "else Amazon's address in the region.",
    )
    region: str = Field(
        default="",
        description="Region of the object store. Empty: the environment variable\n"
        "AWS_REGION, or else us-east-1.",
    )
    credentials: Path | None = Field(
        default=None,
        description="File with aws_access_key_id and aws_secret_access_key under [default]; it\n"
        "is read again at each use. Unset: the environment variables with these names in\n"
        "capitals.",
    )
    authority: Path | None = Field(
        default=None,
        description="File with the CA certificate with which the object store's certificate is\n"
        "checked. Unset: public CAs.",
    )
    fallback: bool = Field(
        default=True,
        description="True: files are sent directly to hosts that can't use the object store, and\n"
        "to all hosts while the object store is unavailable. False: rounds wait for the object\n"
        "store, and hosts that can't use it are excluded.",
    )
    url_seconds: int = Field(
        default=900,
        ge=10,
        le=604_800,
        description="Seconds for which a host can start a transfer with a signed URL of the\n"
        "object store; started transfers may continue.",
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
        return web_origin(endpoint) if endpoint else ""

    @property
    def bucket(self) -> str:
        """Name of the bucket; empty without an object store."""
        found = _STORE.fullmatch(self.store)
        return found["bucket"] if found else ""

    @property
    def prefix(self) -> str:
        """Common prefix of all keys, with a slash at its end; empty if there is none."""
        found = _STORE.fullmatch(self.store)
        return f"{found['prefix'].strip('/')}/" if found and found["prefix"] else ""


class CoordinatorConfig(Settings):
    """Settings of a coordinator's machine. Run files define the trainings."""

    kind = COORDINATOR

    listen: ListenAddress = Field(
        default="127.0.0.1:7443",
        description="Address on which the coordinator listens for hosts and operators,\n"
        "HOST:PORT; 0.0.0.0 for every interface, port 0 for any free port.",
    )
    state_directory: Path = Field(
        description="Folder for runs, models and updates. Each coordinator needs its own folder."
    )
    database: str = Field(
        default="",
        repr=False,
        description="URL of the database for runs, such as\n"
        "postgresql+psycopg://user@host/potluck. Empty: SQLite in the state\n"
        "directory.",
    )
    data_directory: Path | None = Field(
        default=None,
        description="Folder of the coordinator's own held-out data, for tasks that need it.",
    )
    heartbeat_seconds: float = Field(
        default=2.0, gt=0, le=60, description="Seconds between progress reports of hosts."
    )
    maximum_model_bytes: int = Field(
        default=4 << 30, gt=0, description="Maximum size of a model or an update, in bytes."
    )
    concurrent_transfers: int = Field(
        default=32,
        ge=1,
        description="Maximum number of simultaneous transfers; further transfers wait.",
    )
    calls_per_peer: int = Field(
        default=300,
        ge=8,
        description="Maximum number of simultaneous calls per certificate. Further calls are\n"
        "refused, so that one host can't fill the coordinator's memory.",
    )
    transfers_per_peer: int = Field(
        default=8,
        ge=1,
        description="Maximum number of simultaneous transfers per host. Further transfers wait,\n"
        "so that one host can't block the others.",
    )
    stall_seconds: Seconds = Field(
        default=60.0,
        description="Seconds without progress after which a transfer is ended; the host resumes\n"
        "it.",
    )
    least_bytes_per_second: int = Field(
        default=10_000,
        ge=1,
        description="Minimum average speed of an upload in bytes per second, after the first\n"
        "stall_seconds. A slower upload is ended, so that it can't occupy a transfer forever.",
    )
    model_modules: tuple[str, ...] = Field(
        default=MODEL_MODULES,
        description="Python modules from which a run file may name a model, as MODULE:NAME. A\n"
        "run file can call any function in them. Models of other modules are refused.",
    )
    threads: int = Field(
        default=1,
        ge=1,
        description="Number of CPU threads of PyTorch for evaluation. Another number may change\n"
        "the last digits of results.",
    )
    metrics_address: MetricsAddress = ""
    metrics_tls: MetricsTlsOrNone = None
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="Minimum level of logged messages: debug, info, warning or error.",
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="Format of log lines: auto (console on a terminal, else json), console or\n"
        "json.",
    )
    federation_root: Path | None = Field(
        default=None,
        description="The federation root's public key, root.pub. If set, only profiles signed by\n"
        "members are accepted. Keep the root's private key on another machine.",
    )
    members: Path | None = Field(
        default=None,
        description="File members.json, the signed list of the federation's members, which\n"
        "`potluck pki member` creates. It is reloaded when it changes, and sent to hosts.\n"
        "`potluck pki publish` sends a newer list to the coordinator.",
    )
    epsilon_over_runs: float | None = Field(
        default=None,
        gt=0,
        description="Maximum privacy loss ε of a client over all runs in which the coordinator\n"
        'adds the noise (noise = "coordinator"), with the δ of the newest run. A client at the\n'
        "limit is excluded from further runs. Unset: each run has only its own limit.",
    )
    independent_root: bool = Field(
        default=False,
        description="True if the coordinator's operator does not hold the federation root. Only\n"
        "then do secure sums protect against a dishonest coordinator. The setting\n"
        "changes only the wording of reports and audits.",
    )
    revoked: Path | None = Field(
        default=None,
        description="The TLS authority's revocation list, revoked.pem, which `potluck pki revoke`\n"
        "creates. It is reloaded when it changes: revoked peers are disconnected\n"
        "without a restart. Lists sent with `potluck pki push` are kept in the state\n"
        "directory and need no setting.",
    )
    files: FilesSettings = Field(
        default=FilesSettings(),
        description="Transfer of models and updates through an object store, if `store` is set.",
    )
    tracing: TracingSettings = Field(
        default=TracingSettings(), description="Export of OpenTelemetry spans of rounds."
    )
    sinks: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        repr=False,
        description="Further places that record runs, such as MLflow: one table per sink, such\n"
        "as [sinks.mlflow], with the sink's options. `plugin` names the kind of sink if the\n"
        "table has another name. docs/guides/trackers.md lists all sinks.",
    )
    tls: TlsFiles = Field(
        description="Certificate and key of the coordinator, made by `potluck pki issue`."
    )

    @field_validator("model_modules", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        """Split a text at commas, because flags and environment variables contain lists as
        texts."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    def database_url(self) -> str:
        """Return the SQLAlchemy URL of the store."""
        return self.database or f"sqlite:///{self.state_directory / 'potluck.sqlite3'}"


_EXAMPLES = {
    "state_directory": '"coordinator"',
    "tls.certificate": '"pki/coordinator.pem"',
    "tls.key": '"pki/coordinator.key"',
    "tls.authority": '"pki/authority.pem"',
}


def example_config() -> str:
    """Return the annotated example that `potluck-server config` prints."""
    return annotated_example(CoordinatorConfig, _EXAMPLES)
