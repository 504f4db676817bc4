"""The configuration of a client process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, field_validator

from potluck.client.base.availability_plan import AvailabilityPlan
from potluck.client.base.worker import CANCEL_TIMEOUT_SECONDS
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.monitoring.metrics_server import MetricsAddress, MetricsTlsOrNone
from potluck.common.names import ClientId, Tags
from potluck.common.net.identity import expand_clients
from potluck.common.net.tls import TlsFiles
from potluck.common.net.web_origin import web_origin
from potluck.common.process.logs import LogFormat, LogLevel
from potluck.common.settings.configuration import Settings, annotated_example, load
from potluck.common.settings.configuration_errors import HOST
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.tracing import TracingSettings

ENVIRONMENT_PREFIX = "POTLUCK_CLIENT"
MOST_WORKERS: Final = 256

_EXAMPLES = {
    "coordinator": '"127.0.0.1:7443"',
    "clients": '["client-0:5"]',
    "data_directory": '"data"',
    "state_directory": '"state/host-0"',
    "tls.certificate": '"pki/host-0.pem"',
    "tls.key": '"pki/host-0.key"',
    "tls.authority": '"pki/authority.pem"',
}


class ClientConfig(Settings):
    """The settings of a client process: its coordinator, its clients, the devices it may use."""

    kind = HOST
    old_keys: ClassVar[Mapping[str, str]] = {"patience_seconds": "cancel_timeout_seconds"}

    coordinator: str = Field(
        description="Address of the coordinator, HOST:PORT. The host opens the connection, so it\n"
        "needs no open port."
    )
    clients: tuple[str, ...] = Field(
        min_length=1,
        description="Clients of this host: ids, or ranges such as client-0:23. The host's\n"
        "certificate must list each of them.",
    )
    state_directory: Path = Field(
        description="Folder for fetched models and for updates that are not yet delivered. The\n"
        "host needs it again after a restart. Each host process needs its own folder."
    )
    data_directory: Path | None = Field(
        default=None,
        description="Folder in which tasks find the clients' data. The data never leave this\n"
        "host. Unset: only for tasks that need no data files.",
    )
    tags: Tags = Field(
        default_factory=dict,
        description="Properties of this host, by which a run can restrict or spread its\n"
        'cohorts, such as site = "north" or scanner = "3t". The coordinator learns them.',
    )
    device: str = Field(
        default="auto",
        description="Device for training: auto (a GPU if there is one), cpu, cuda:N, or several\n"
        "GPUs such as cuda:0,cuda:1. Several GPUs train different clients at the same time.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, use deterministic kernels only: results are then the same bit for\n"
        "bit, but training is slower, and an operation without a deterministic kernel fails.\n"
        "Training on a CPU is always deterministic.",
    )
    model_modules: tuple[str, ...] = Field(
        default=MODEL_MODULES,
        description="Python modules from which a run file may name a model, as MODULE:NAME. A\n"
        "run file can call any function in them. The host refuses models of other modules.",
    )
    threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of CPU threads of PyTorch. With the same number, results are the\n"
        "same bit for bit.",
    )
    workers: int | Literal["auto"] = Field(
        default=1,
        description="Number of trainings that each device runs in parallel, each in its own\n"
        "process. auto: on CPUs, the number of processors divided by `threads`, or fewer if the\n"
        "memory is small; on a GPU, as many as its memory holds, measured in the first training.\n"
        "Useful for hosts with many clients, as in simulations.",
    )
    choices_directory: Path | None = Field(
        default=None,
        description="Folder in which the host stores whether it trains clients together or one\n"
        'by one, if the run leaves this choice to the host (training.batched = "auto"). Hosts\n'
        "that share a folder make the same choice. Unset: a folder in the state directory.",
    )
    cancel_timeout_seconds: float = Field(
        default=CANCEL_TIMEOUT_SECONDS,
        gt=0,
        le=86_400,
        description="Seconds that a cancelled training has to stop. After that, the host\n"
        "abandons its thread and uses a new thread for the device.",
    )
    maximum_model_bytes: int = Field(
        default=4 * 2**30,
        ge=1,
        description="Maximum size of a model, in bytes; the host\nrefuses larger ones.",
    )
    concurrent_transfers: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Maximum number of models and updates in transfer at the same time; further\n"
        "transfers wait.",
    )
    object_stores: tuple[str, ...] = Field(
        default=(),
        description="Object stores from which this host may fetch models, and to which it may\n"
        "send updates: https://HOST or https://HOST:PORT. http:// is not encrypted. Empty: all\n"
        "files are exchanged with the coordinator directly.",
    )
    object_store_authority: Path | None = Field(
        default=None,
        description="File with the CA certificate with which the host checks the object stores'\n"
        "certificates. Unset: public CAs.",
    )
    cached_models: int = Field(
        default=2,
        ge=1,
        description="Number of recently used models that the host keeps on disk, so that it need\n"
        "not fetch them again.",
    )
    reconnect_maximum_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Maximum pause between two attempts to connect\n"
        "to the coordinator, in seconds.",
    )
    metrics_address: MetricsAddress = ""
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="Format of log lines: console, json, or auto (console on a terminal, else\n"
        "json).",
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="Minimum level of log lines:\ndebug, info, warning or error.",
    )
    member_key: Path | None = Field(
        default=None,
        description="File with the Ed25519 key that signs what the clients disclose, or a folder\n"
        "with a key CLIENT.key for each client. `potluck pki member` makes the keys. A folder\n"
        "`next` beside it may hold the keys that will replace them. Not needed in a federation\n"
        "without a federation root.",
    )
    members: Path | None = Field(
        default=None,
        description="File members.json, the signed list of the federation's members, from the\n"
        "operator. It is reloaded when it changes. If the coordinator has a newer version that\n"
        "the federation root has signed, the host uses that version. Unset: the host uses the\n"
        "coordinator's version.",
    )
    federation_root: Path | None = Field(
        default=None,
        description="File root.pub with the public key of the federation root. Secure sums\n"
        "accept only members that this key has signed. Get it from the operator, not from the\n"
        "coordinator.",
    )
    independent_root: bool = Field(
        default=False,
        description="True if the person who keeps the federation root does not run the\n"
        "coordinator. Only then do secure sums protect against a dishonest coordinator. The\n"
        "setting changes only the wording of reports.",
    )
    metrics_tls: MetricsTlsOrNone = None
    availability: AvailabilityPlan = Field(
        default=AvailabilityPlan(),
        description="When the clients are expected to be available. The host sends this only if\n"
        "the selector asks for it (refl) and `questions` of [disclosure] allows it.",
    )
    tracing: TracingSettings = Field(
        default=TracingSettings(),
        description="Collector that receives OpenTelemetry spans of the rounds that the\n"
        "coordinator traces.",
    )
    disclosure: DisclosurePolicy = Field(
        default=DisclosurePolicy(),
        description="What may leave this host. The host refuses requests for anything else.",
    )
    tls: TlsFiles = Field(
        description="Certificate and key of this host, made by `potluck pki\nissue`."
    )

    @field_validator("object_stores")
    @classmethod
    def _origins(cls, stores: tuple[str, ...]) -> tuple[str, ...]:
        for store in stores:
            if re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_-]+", store) is None:
                raise ValueError("each entry must be https://HOST or https://HOST:PORT")
        return tuple(web_origin(store) for store in stores)

    @field_validator("clients", "model_modules", "object_stores", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        """Split a text with commas, as flags and environment variables give it."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("workers", mode="before")
    @classmethod
    def _some_workers(cls, workers: object) -> object:
        """Convert a number given as text, by a flag or an environment variable."""
        text = str(workers)
        number = int(text) if re.fullmatch(r"[0-9]{1,3}", text) else 0
        if text != "auto" and not 1 <= number <= MOST_WORKERS:
            raise ValueError(f"must be auto, or a whole number from 1 to {MOST_WORKERS}")
        return workers

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda:[0-9]{1,3}(,cuda:[0-9]{1,3})*", device) is None:
            raise ValueError("must be auto, cpu, cuda:N, or several GPUs such as cuda:0,cuda:1")
        names = device.split(",")
        if len(set(names)) < len(names):
            raise ValueError("must name each GPU only once")
        return device

    def client_ids(self) -> list[ClientId]:
        """Return all client ids. Raises ConfigurationError if one is malformed or repeated."""
        return expand_clients(self.clients)


def load_config(path: Path, overrides: Mapping[str, object]) -> ClientConfig:
    """Load a configuration file; flags override the environment, which overrides the file.

    A relative path in the file is relative to the file's folder. A relative path from a flag or
    the environment is relative to the current folder.
    """
    return load(ClientConfig, path, environment_prefix=ENVIRONMENT_PREFIX, overrides=overrides)


def example_config() -> str:
    """Return the annotated example that `potluck-client config` prints."""
    return annotated_example(ClientConfig, _EXAMPLES)
