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
from potluck.common.monitoring.metrics_server import MetricsAddress
from potluck.common.monitoring.metrics_tls import MetricsTls
from potluck.common.names import ClientId
from potluck.common.net.identity import expand_clients
from potluck.common.net.tls import TlsFiles
from potluck.common.process.logs import LogFormat, LogLevel
from potluck.common.settings.configuration import Settings, annotated_example, load
from potluck.common.settings.configuration_errors import HOST
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.tags import Tags
from potluck.common.tracing.tracing_settings import TracingSettings

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
    """The settings of a client process: the coordinator, the clients, what it may use."""

    kind = HOST
    old_keys: ClassVar[Mapping[str, str]] = {"patience_seconds": "cancel_timeout_seconds"}

    coordinator: str = Field(
        description="Where the coordinator listens, HOST:PORT. Hosts dial, so no port needs to be\n"
        "opened here."
    )
    clients: tuple[str, ...] = Field(
        min_length=1,
        description="The clients this host answers for: ids, or ranges such as client-0:23. Its\n"
        "certificate must allow each.",
    )
    state_directory: Path = Field(
        description="Models already fetched and updates not yet delivered; survives a restart.\n"
        "Each client process needs its own."
    )
    data_directory: Path | None = Field(
        default=None, description="Where tasks find the clients' data; it never leaves this host."
    )
    tags: Tags = Field(
        default_factory=dict,
        description="What this host is, for runs that choose or spread by it: words such as\n"
        'site = "north" or scanner = "3t". The coordinator learns them.',
    )
    device: str = Field(
        default="auto",
        description="What to train on: auto (a GPU if there is one), cpu, cuda:N, or several GPUs\n"
        "such as cuda:0,cuda:1, which then train side by side, each for another client.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, use deterministic kernels only: the same bits each time, slower,\n"
        "and an operation that has none fails. On a CPU the bits are the same anyway.",
    )
    model_modules: tuple[str, ...] = Field(
        default=MODEL_MODULES,
        description="Python modules from which a run file may name a model, MODULE:NAME; whatever\n"
        "they offer can be called. Others are refused, whatever the coordinator says.",
    )
    threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="CPU threads of PyTorch; the same number gives the same result bit for bit.",
    )
    workers: int | Literal["auto"] = Field(
        default=1,
        description="Trainings that go on side by side on each device, each in a process of its\n"
        "own; auto: one for each processor that `threads` leave, as far as memory goes; on a GPU\n"
        "no more than its memory is enough for, which the host's first training shows. For hosts\n"
        "with many clients, as in simulations.",
    )
    choices_directory: Path | None = Field(
        default=None,
        description="Where it is kept whether clients are trained together or one by one, where a\n"
        "run leaves that to the host; by default in the state directory. Hosts with the same one\n"
        "choose alike.",
    )
    cancel_timeout_seconds: float = Field(
        default=CANCEL_TIMEOUT_SECONDS,
        gt=0,
        le=86_400,
        description="How long a cancelled task may continue. Then its thread is abandoned,\n"
        "and the device gets a new one.",
    )
    maximum_model_bytes: int = Field(
        default=4 * 2**30, ge=1, description="A model announced as larger than this is refused."
    )
    concurrent_transfers: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Models and updates on their way at once; the others wait.",
    )
    object_stores: tuple[str, ...] = Field(
        default=(),
        description="Object stores that this host may fetch models from and put updates to where\n"
        "the coordinator names one: https://HOST or https://HOST:PORT; http:// is not encrypted.\n"
        "Files go straight from and to the coordinator where there are none.",
    )
    object_store_authority: Path | None = Field(
        default=None,
        description="The certificate of the authority of these, where that is not public.",
    )
    cached_models: int = Field(
        default=2,
        ge=1,
        description="Models kept on disk, those used last; one that is here is not fetched again.",
    )
    reconnect_maximum_seconds: float = Field(
        default=5.0, gt=0, le=3600, description="The longest pause between two attempts to connect."
    )
    metrics_address: MetricsAddress = Field(
        default="",
        description="Where /metrics, /healthz and /readyz are served: a port (on 127.0.0.1) or\n"
        "HOST:PORT; empty: nowhere. Over plain HTTP, unless there is metrics_tls.",
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="auto (console on a terminal, else json), console or json.",
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="debug, info, warning or error.")
    member_key: Path | None = Field(
        default=None,
        description="The clients' Ed25519 key, or a folder with CLIENT.key for each: what they\n"
        "disclose is signed with it. A key that is to replace it lies in `next` beside it. Made\n"
        "by `potluck pki member`; not needed where the federation has no root.",
    )
    members: Path | None = Field(
        default=None,
        description="members.json as the operator gives it; one that is put in its place is\n"
        "followed. Without it, and where theirs are newer, members come from the coordinator.",
    )
    federation_root: Path | None = Field(
        default=None,
        description="The federation root's public key, root.pub: in secure sums only members that\n"
        "it signed count. Get it from the operator, not from the coordinator.",
    )
    independent_root: bool = Field(
        default=False,
        description="Set it to true if the federation root is kept by someone who does not run\n"
        "the coordinator. Secure sums hold against a lying coordinator only in that case. It\n"
        "changes only what reports state.",
    )
    metrics_tls: MetricsTls | None = Field(
        default=None,
        description="Serve metrics over mutual TLS, to these scrapers only; for addresses that\n"
        "other machines reach. Its authority is not the federation's: `potluck pki init` makes\n"
        "one, in which each metrics address is a coordinator and each scraper an operator.",
    )
    availability: AvailabilityPlan = Field(
        default=AvailabilityPlan(),
        description="When the clients are likely to be there. Told where a selector asks (refl)\n"
        "and `questions` of [disclosure] allow it; nothing else depends on it.",
    )
    tracing: TracingSettings = Field(
        default=TracingSettings(),
        description="Where spans of OpenTelemetry go, of rounds that the coordinator traces.",
    )
    disclosure: DisclosurePolicy = Field(
        default=DisclosurePolicy(),
        description="What may leave this host besides updates; a request beyond it is refused.",
    )
    tls: TlsFiles = Field(description="Who this host is; files made by `potluck pki issue`.")

    @field_validator("object_stores")
    @classmethod
    def _origins(cls, stores: tuple[str, ...]) -> tuple[str, ...]:
        for store in stores:
            if re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_-]+", store) is None:
                raise ValueError("must be https://HOST or https://HOST:PORT each")
        return stores

    @field_validator("clients", "model_modules", "object_stores", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        """Split a text with commas, as flags and environment variables give it."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("workers", mode="before")
    @classmethod
    def _some_workers(cls, workers: object) -> object:
        """Convert a number that a flag or an environment variable gives as text."""
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
            raise ValueError("names a GPU twice; one training at a time runs on each")
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
