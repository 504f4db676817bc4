"""No metric, log line or error of a run carries a weight, a number of samples, a triplet or a key.

All that processes print at the level of debug, all their metrics and all that an operator's
commands say is searched for numbers that a run's models, clients and profiles hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from support.federation import set_values

from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.local.demo import reserved_ports, serve_metrics
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_overrides import override
from potluck.rpc.v1 import operator_pb2

PLUGINS = Path(__file__).parents[1] / "support" / "canary_plugins"
CLIENTS = 6
PATIENCE_SECONDS = 240.0
OVER = (
    operator_pb2.RUN_STATE_FINISHED,
    operator_pb2.RUN_STATE_STOPPED,
    operator_pb2.RUN_STATE_FAILED,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextlib.contextmanager
def plugins_installed() -> Iterator[None]:
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(PLUGINS), *filter(None, [before.get("PYTHONPATH")])]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(PLUGINS))
    try:
        yield
    finally:
        sys.path.remove(str(PLUGINS))
        os.environ.clear()
        os.environ.update(before)


# Times, ports and process ids: each may be equal to a secret by chance. So may durations, below.
_OF_THE_MACHINE = re.compile(
    r'"timestamp": "[^"]*"'
    r"|\b127\.0\.0\.1:\d+"
    r'|\b(?:pid|process)"?[:=]? ?\d+',
)
_DURATION = re.compile(r'(seconds(?:_sum|_total|_created)?(?:\{[^}]*\}|")?[ :=]+)[\d.e+-]+')
"""A duration, after its name and labels."""


class Secrets:
    """Values that must not leak."""

    def __init__(self) -> None:
        self.counts: set[int] = set()
        self.numbers: list[float] = []
        self.texts: set[str] = set()

    def add_payload(self, payload: object) -> None:
        """Add the values of a disclosed payload."""
        if isinstance(payload, dict):
            for value in payload.values():
                self.add_payload(value)
        elif isinstance(payload, list):
            for value in payload:
                self.add_payload(value)
        elif isinstance(payload, bool) or payload is None:
            return
        elif isinstance(payload, int) and abs(payload) >= 1000:
            self.counts.add(payload)
        elif isinstance(payload, float) and payload != int(payload):
            self.numbers.append(payload)

    def found_in(self, text: str) -> list[str]:
        """Return the lines that contain a secret."""
        return [line for line in text.splitlines() if self._is_in(line)]

    def _is_in(self, line: str) -> bool:
        if any(secret in line for secret in self.texts):
            return True
        line = _DURATION.sub(r"\1", _OF_THE_MACHINE.sub("", line))
        if self.counts & {int(each) for each in re.findall(r"(?<![\w.])\d{4,9}(?![\w.])", line)}:
            return True
        known = np.abs(np.array(self.numbers))
        for shown in re.findall(r"\d+\.\d{5,}", line):
            # Compare with the precision of the shown number, at most that of a float32. Otherwise,
            # a time with many digits would match some secret by chance.
            rounding = 0.5 * 10.0 ** -len(shown.partition(".")[2])
            within = np.minimum(1e-6 * known, np.maximum(rounding, 2e-7 * known))
            if (np.abs(float(shown) - known) <= within).any():
                return True
        return False


def secrets_of(files: DemoFiles) -> Secrets:
    """Return all secrets in a federation's files and in its clients' data."""
    from potluck_canary import label_counts  # type: ignore[import-not-found]

    secrets = Secrets()
    for client in range(CLIENTS):
        counts = label_counts(client)
        secrets.counts |= {*counts, sum(counts)}
    for path in files.folder.glob("host-*/disclosures/*.json"):
        for release in json.loads(path.read_text())["releases"]:
            secrets.add_payload(json.loads(release["payload_json"]))
    for path in files.folder.glob("**/*.safetensors"):
        with open_tensors(path) as file:
            for array in file.arrays.values():
                secrets.numbers += [float(each) for each in array.reshape(-1).tolist()]
    for path in (files.folder / "pki").glob("*.key"):
        secrets.texts |= {line for line in path.read_text().splitlines() if len(line) > 30}
    return secrets


def metrics_of(ports: Iterable[int]) -> str:
    pages = []
    for port in ports:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            pages.append(answer.read().decode())
    return "\n".join(pages)


async def run_to_its_end(client: OperatorClient, files: DemoFiles, *changes: str) -> int:
    run_id = await client.start_run(override(files.run_file, changes, source="test"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for event in client.watch_run(run_id):
            if event.WhichOneof("event") == "status" and event.status.state in OVER:
                return int(event.status.state)
    raise AssertionError("the run has no end")


async def said_by(files: DemoFiles, *command: str) -> str:
    """Run an operator's command; return its standard output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "potluck.deploy.cli", *command),
        *("--config", str(files.folder / "operator.toml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return out.decode()


async def test_logs_metrics_and_errors_of_a_run_contain_no_secret(tmp_path: Path) -> None:
    options = DemoOptions(
        task="canary", selector="fedentopt", strategy="fedavg", clients=CLIENTS, hosts=2, count=4,
        rounds=3, seed=5, device="cpu",
        assignments=["transport.up.encoding=int8", "retention.keep_last=100"],
    )  # fmt: skip
    with plugins_installed(), reserved_port() as port, reserved_ports(3) as ports:
        files = write_demo_files(tmp_path / "federation", options, port)
        serve_metrics(files, ports)
        for path in (files.coordinator, *files.hosts):
            set_values(path, {"log_level": "debug", "log_format": "json"})
        async with LocalFederation(files) as processes, processes.operator() as operator:
            await processes.start()
            finished, failed = operator_pb2.RUN_STATE_FINISHED, operator_pb2.RUN_STATE_FAILED
            assert await run_to_its_end(operator, files) == finished
            assert await run_to_its_end(operator, files, "selector.name=feddiverse") == finished
            diverges = ("training.learning_rate=3e38", "round.attempts=1", "selector.name=uniform")
            assert await run_to_its_end(operator, files, *diverges) == failed
            too_many = ("selector.name=known-matrix", "round.attempts=1")
            # The clients' policies refuse this run.
            assert await run_to_its_end(operator, files, *too_many) == failed
            output = {"metrics": await asyncio.to_thread(metrics_of, ports)}
            for command in ("runs", "clients", "doctor"):
                output[command] = await said_by(files, command)
            secrets = secrets_of(files)
    for path in files.folder.glob("*.log"):
        output[path.stem] = path.read_text()
    assert len(secrets.counts) > 20
    assert len(secrets.numbers) > 100
    assert len(secrets.texts) > 4
    assert '"level": "debug"' in output["coordinator"]
    assert "training diverged" in output["host-0"]
    for place, text in output.items():
        assert secrets.found_in(text) == [], place


def test_search_finds_secrets_in_text() -> None:
    secrets = Secrets()
    secrets.add_payload({"label_counts": [6133, 12], "triplet": [0.1234567, 0.0, 1.0]})
    secrets.texts.add("MIGHAgEAMBMGByqGSM49")
    for line in (
        "counts=[6133, 12]",
        '{"samples": 6133}',
        "potluck_x 6133.0 triplet 0.12345671",
        "0.123456702",
        "key MIGHAgEAMBMGByqGSM49AgEG",
        '{"timestamp": "2026-03-01T12:00:00.5Z", "event": "client 1 holds 6133"}',
        "0.1234567 at 127.0.0.1:40000",
        'potluck_x_seconds_sum{count="6133"} 0.5',
        'potluck_x_ratio{party="host"} 0.1234567',
    ):
        assert secrets.found_in(line) == [line]
    for line in (
        *("61330", "id=a6133b", "0.12345", "seconds=0.123466", "port 127.0.0.1:61331"),
        *("seconds 0.12345674321", "127.0.0.1:6133", '"pid": 6133', "process 6133 ended"),
        '{"timestamp": "2026-03-01T12:00:00.123457Z"}',
        *('potluck_x_seconds_sum{party="host"} 0.1234567', '{"seconds": 0.1234567}'),
    ):
        assert secrets.found_in(line) == []
