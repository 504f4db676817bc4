"""A real Prometheus, with Potluck's own rules and dashboards, watches federations of processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import yaml
from support import mounts
from support.federation import set_values
from support.prometheus import (
    ASSETS,
    PATIENCE_SECONDS,
    Prometheus,
    check_shown,
    hurried_config,
    prometheus_running,
    shipped_rules,
    why_not,
)
from support.raw_host import RawHost, header, training_of
from support.relays import Relay, relays_of
from support.s3_server import ENVIRONMENT, S3Server, s3_server

from potluck.common.errors import IdentityError, from_rpc_error
from potluck.common.net.identity import Role
from potluck.common.net.tls import channel
from potluck.deploy.local.demo import reserved_ports, serve_metrics
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation, kill
from potluck.deploy.operator.operator_client import OperatorClient, connect
from potluck.deploy.operator.operator_config import OperatorFlags, load_operator_config
from potluck.deploy.operator.run_overrides import override
from potluck.deploy.pki import authority as pki
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc, operator_pb2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

SPOIL = Path(__file__).parents[1] / "support" / "spoil_plugins"
NO_DATA_HERE = {
    "potluck_host_gpu_": "on machines with an NVIDIA GPU",
    "potluck_relay_": "where there are relays",
    "potluck_sink_": "where the configuration has sinks",
    "potluck:member_records_": "where federation_root is set",
    "potluck_object_store_up": "where files go through an object store",
    "potluck_secure_aggregation_phase_seconds_bucket": "once something is summed securely",
    "potluck_privacy_trainings_": "where updates have noise",
    "potluck_privacy_near_limit_clients": "where updates have noise",
    "potluck_privacy_refused_clients": "where updates have noise",
    "potluck_host_privacy_near_limit_clients": "where updates have noise",
    "potluck:trainings_privacy_spent:ratio": "where updates have noise",
}


ONLY_IN_PROMTOOLS_TESTS = {
    *("PotluckCoordinatorMissing", "PotluckTargetVanished", "PotluckRestarts"),
    *("PotluckSinkDown", "PotluckClockSkewed"),
    *("PotluckTrainingPrivacyNearlySpent", "PotluckPrivacyRefused"),
    *("PotluckAuthorityExpiring", "PotluckMemberRecordsExpiring"),
}


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_shipped_files() -> None:
    folder = ASSETS / "prometheus"
    for path in sorted(folder.glob("*.rules.yml")):
        promtool("check", "rules", str(path))
    promtool("check", "config", "--syntax-only", str(folder / "prometheus.yml"))
    promtool("test", "rules", str(Path(__file__).parents[1] / "testdata" / "alerts.test.yml"))


def scrape_configs(config: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = yaml.safe_load(config.read_text())["scrape_configs"]
    return found


# A demo -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def demo(folder: Path, *arguments: str) -> AsyncIterator[None]:
    """Run `potluck demo` and end it as a person would."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "potluck.deploy.cli", "demo", "--folder", str(folder), *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(120):
            while not (folder / "prometheus.yml").exists():  # noqa: ASYNC110  # no signal
                await asyncio.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def test_every_dashboard_panel_has_data_for_a_demo(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    arguments = ["--clients", "9", "--hosts", "3", "--clients-per-round", "4", "--rounds", "100000"]
    async with demo(folder, *arguments, "--selector", "fedentopt"):
        promtool("check", "config", str(folder / "prometheus.yml"))
        config = hurried_config(tmp_path, scrape_configs(folder / "prometheus.yml"))
        async with prometheus_running(tmp_path, config) as prometheus:
            await prometheus.until("potluck_run_committed_rounds >= 5")
            # Rounds may precede the first scrape.
            await prometheus.until_up({"potluck-coordinator": 1, "potluck-host": 3})
            flags = OperatorFlags(config=folder / "operator.toml")
            async with connect(load_operator_config(flags)) as client:
                run_file = override(
                    (folder / "run.toml").read_text(),
                    [
                        *("selector.name=feddiverse", "name=diverse"),
                        *("task.held_out=0.2", "evaluation.spread=true"),
                    ],
                    source="test",
                )
                await client.start_run(run_file)  # this run has triplets and spreads
                await check_shown(prometheus, excused=NO_DATA_HERE)
        await check_doctor(folder)


async def check_doctor(folder: Path) -> None:
    """Check that `potluck doctor` reports no problem in a healthy federation."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "potluck.deploy.cli", "doctor", "--json"),
        *("--config", str(folder / "operator.toml"), str(folder / "host-0.toml")),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    found = {each["about"]: each for place in json.loads(out).values() for each in place}
    assert not [each for each in found.values() if each["verdict"] == "error"], found
    assert found["clock"]["verdict"] == found["its version"]["verdict"] == "ok"
    assert found["hosts"]["found"].startswith("3 hosts connected with 9 clients; ")
    assert found["metrics"]["verdict"] == "warning"  # the running host uses that port


# Alerts -------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Scene:
    """A running federation and the Prometheus that scrapes it."""

    files: DemoFiles
    processes: LocalFederation
    operator: OperatorClient
    prometheus: Prometheus
    relay: Relay
    store: S3Server
    spoil: Path

    async def start_run(self, *assignments: str) -> str:
        return await self.operator.start_run(
            override(self.files.run_file, assignments, source="test")
        )

    async def until_held_up(self, run_id: str) -> None:
        """Wait until a round's training has made no progress for a while."""
        events, quiet = self.operator.watch_run(run_id, newest_rounds=1), 0
        async with asyncio.timeout(PATIENCE_SECONDS), contextlib.aclosing(events):
            async for event in events:  # without other events, progress is still sent
                training = event.HasField("progress") and event.progress.phase == "train"
                quiet = quiet + 1 if training else 0
                if quiet == 4:
                    return


@contextlib.contextmanager
def spoiling(file: Path) -> Iterator[None]:
    """Install the strategy that spoils models, here and in processes started meanwhile."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(SPOIL), *filter(None, [before.get("PYTHONPATH")])]
    )
    os.environ["POTLUCK_SPOIL"] = str(file)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(SPOIL))
    try:
        yield
    finally:
        sys.path.remove(str(SPOIL))
        os.environ.clear()
        os.environ.update(before)


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    options = DemoOptions(
        task="digits",
        selector="fedentopt",
        strategy="spoil",
        clients=6,
        hosts=3,
        count=6,
        rounds=100_000,
        seed=7,
        device="cpu",
        assignments=["round.grace_seconds=1", "round.quorum=0.9", "round.attempts=100"],
    )
    with spoiling(folder / "spoil"), reserved_port() as port, reserved_ports(4) as metrics_ports:
        files = write_demo_files(folder / "federation", options, port)
        config = serve_metrics(files, metrics_ports)
        set_values(files.coordinator, {"heartbeat_seconds": 0.5})
        for path in files.hosts:
            set_values(path, {"reconnect_maximum_seconds": 0.3})
        set_values(files.hosts[0], {"disclosure": {"epsilon_budget": 1.2}})
        pki.issue(
            files.folder / "pki", Role.HOST, "host-2", clients=["client-4:5"], days=1, force=True
        )
        async with (
            LocalFederation(files) as processes,
            processes.operator() as operator,
            s3_server(folder) as store,
            relay_without_hosts(files) as relay,
        ):
            set_values(files.coordinator, {"files": store.files(fallback=True)})
            set_values(files.hosts[2], {"object_stores": [store.origin]})
            targets = [{"targets": [relay.metrics], "labels": {"instance": "gate"}}]
            jobs: list[dict[str, object]] = [
                *scrape_configs(config),
                {"job_name": "potluck-relay", "static_configs": targets},
            ]
            async with prometheus_running(folder, hurried_config(folder, jobs)) as watcher:
                await processes.start()
                yield Scene(
                    files=files,
                    processes=processes,
                    operator=operator,
                    prometheus=watcher,
                    relay=relay,
                    store=store,
                    spoil=folder / "spoil",
                )


@contextlib.asynccontextmanager
async def relay_without_hosts(files: DemoFiles) -> AsyncIterator[Relay]:
    async with relays_of(OnlyFiles(files), {"gate": []}, claims={"gate": ["client-9"]}) as relays:
        yield relays["gate"]


@dataclass(frozen=True)
class OnlyFiles:
    """A federation that is not running."""

    files: DemoFiles


async def test_each_alert_fires_for_its_fault_and_resolves(tmp_path: Path) -> None:
    disk = mounts.tmpfs(tmp_path / "disk", megabytes=64) if not mounts.why_not() else None
    with disk or contextlib.nullcontext(None) as small:
        async with scene(tmp_path) as federation:
            tested = {
                *await hosts_that_go(federation),
                *await certificates_and_budgets(federation),
                *await models_that_get_worse(federation),
                *await calls_that_are_refused(federation),
                *await clients_that_fail(federation),
                *await uploads_that_break(federation),
                *await a_coordinator_that_goes(federation),
            }
            await check_same_truth(federation)
            if small is not None:
                tested |= await a_full_disk(federation, small)
            else:
                tested.add("PotluckDiskNearlyFull")
    untested = {rule["alert"] for rule in shipped_rules() if "alert" in rule} - tested
    assert untested == ONLY_IN_PROMTOOLS_TESTS


async def check_same_truth(federation: Scene) -> None:
    """Check that the dashboards show the same values as `potluck clients` and `potluck watch`."""
    prometheus, client = federation.prometheus, federation.operator
    [first, *_] = reversed(await client.list_runs())
    await client.stop_run(first.run_id)
    await prometheus.until("potluck_runs_under_way == 0")
    clients = await client.list_clients()
    attending = [each for each in clients if each.attending]
    await prometheus.until_value("potluck_clients_attending", len(attending))
    hosts = {each.host_id for each in attending}
    await prometheus.until_value("potluck_hosts_attending", len(hosts))
    last: operator_pb2.CommittedRound | None = None
    async for event in client.watch_run(first.run_id):
        if event.WhichOneof("event") == "committed":
            last = event.committed
    assert last is not None
    of_run = f'{{run="{first.run_id}"}}'
    await prometheus.until_value(f"potluck_run_committed_rounds{of_run}", last.round)
    accuracy = pytest.approx(last.metrics.accuracy)
    await prometheus.until_value(f"potluck_model_accuracy_ratio{of_run}", accuracy)
    await prometheus.until_value(f"potluck_cohort_clients{of_run}", len(last.members))


async def hosts_that_go(federation: Scene) -> set[str]:
    watcher, processes = federation.prometheus, federation.processes
    run_id = await federation.start_run()
    await watcher.until("potluck_run_committed_rounds >= 2")
    quiet = {"PotluckHostDown", "PotluckHostsLost", "PotluckNoRoundCommitted"}
    await watcher.until_resolved(*quiet, "PotluckQuorumMissed")  # hosts may have connected slowly
    victims = [processes.hosts[number] for number in (0, 1)]
    # Freeze them: hosts killed between two rounds would only delay the next round.
    for host in victims:
        os.killpg(host.group, signal.SIGSTOP)
    await federation.until_held_up(run_id)
    for host in victims:
        await kill(host)
    await watcher.until_firing("PotluckHostDown", "PotluckHostsLost", "PotluckQuorumMissed")
    await watcher.until_summary("PotluckHostsLost", f"Run {run_id} misses 2 hosts: host-0 host-1.")
    await federation.relay.kill()
    await watcher.until_firing("PotluckNoRoundCommitted", "PotluckRelayDown")
    for number in (0, 1):
        await processes.start_host(number)
    await federation.relay.start()
    await watcher.until_resolved(*quiet, "PotluckQuorumMissed", "PotluckRelayDown")
    return {*quiet, "PotluckQuorumMissed", "PotluckRelayDown"}


async def certificates_and_budgets(federation: Scene) -> set[str]:
    watcher, files = federation.prometheus, federation.files
    expiring = {"PotluckCertificateExpiring", "PotluckPeerCertificateExpiring"}
    await watcher.until_firing(*expiring, "PotluckPrivacyBudgetNearlySpent")
    pki.issue(files.folder / "pki", Role.HOST, "host-2", clients=["client-4:5"], force=True)
    await watcher.until_resolved(*expiring)
    set_values(files.hosts[0], {"disclosure": {"epsilon_budget": 4.0}})
    await kill(federation.processes.hosts[0])
    await federation.processes.start_host(0)
    await watcher.until_resolved("PotluckPrivacyBudgetNearlySpent")
    return {*expiring, "PotluckPrivacyBudgetNearlySpent"}


async def models_that_get_worse(federation: Scene) -> set[str]:
    watcher = federation.prometheus
    await watcher.until("potluck_model_accuracy_ratio > 0.4")
    federation.spoil.touch()
    federation.store.kill()
    await watcher.until_firing("PotluckAccuracyFell", "PotluckObjectStoreDown")
    federation.spoil.unlink()
    await federation.store.start()
    await watcher.until_resolved("PotluckAccuracyFell", "PotluckObjectStoreDown")
    return {"PotluckAccuracyFell", "PotluckObjectStoreDown"}


async def repeated_until_firing(
    watcher: Prometheus, alert: str, fault: Callable[[], Awaitable[None]]
) -> None:
    """Cause a fault until its alert fires. Prometheus sees an increase only between two scrapes."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while alert not in await watcher.alerts():
            await fault()
            await asyncio.sleep(0.5)


async def calls_that_are_refused(federation: Scene) -> set[str]:
    watcher, operator = federation.prometheus, federation.files.operator
    async with channel(operator.coordinator, operator.tls) as connection:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(connection)

        async def refused() -> None:
            with pytest.raises(grpc.aio.AioRpcError, match="this service is for a host") as refusal:
                await stub.LocateUpload(coordinator_pb2.LocateUploadRequest())
            assert isinstance(from_rpc_error(refusal.value), IdentityError)

        await repeated_until_firing(watcher, "PotluckRefusals", refused)
    await watcher.until_summary(
        "PotluckRefusals", "with IDENTITY_REFUSED, the newest of operator operator."
    )
    await federation.operator.set_quarantine("client-5", "a test")
    await watcher.until_firing("PotluckClientsQuarantined")
    await federation.operator.set_quarantine("client-5", None)
    await watcher.until_resolved("PotluckRefusals", "PotluckClientsQuarantined")
    return {"PotluckRefusals", "PotluckClientsQuarantined"}


async def clients_that_fail(federation: Scene) -> set[str]:
    watcher = federation.prometheus
    run_id = await federation.start_run(
        "training.learning_rate=1e30", "round.attempts=3", "selector.name=uniform", "rounds=5"
    )
    await watcher.until_firing("PotluckClientsFail", "PotluckRunFailed")
    await watcher.until_summary(
        "PotluckRunFailed", f"Run {run_id} has failed; `potluck runs {run_id}` says why."
    )
    await watcher.until_resolved("PotluckClientsFail", "PotluckRunFailed")
    return {"PotluckClientsFail", "PotluckRunFailed"}


async def uploads_that_break(federation: Scene) -> set[str]:
    watcher, processes = federation.prometheus, federation.processes
    clients = ("client-2", "client-3")
    await kill(processes.hosts[1])
    async with RawHost.of(federation.files.hosts[1]) as host, host.attending(*clients) as stream:
        run_id = await federation.start_run("selector.name=uniform", "rounds=1")
        instruction = await training_of(stream, clients[0], run_id)
        announced = header(instruction.id, clients[0], bytes(1000))

        async def broken_off() -> None:
            refusal = await host.submit([announced])
            assert refusal == (grpc.StatusCode.ABORTED, "TRANSFER_TRUNCATED")

        await repeated_until_firing(watcher, "PotluckUploadsMakeNoProgress", broken_off)
        await federation.operator.stop_run(run_id)
    await processes.start_host(1)
    await watcher.until_resolved("PotluckUploadsMakeNoProgress")
    return {"PotluckUploadsMakeNoProgress"}


async def a_coordinator_that_goes(federation: Scene) -> set[str]:
    watcher, processes = federation.prometheus, federation.processes
    assert processes.coordinator is not None
    await kill(processes.coordinator)
    gone = {"PotluckCoordinatorDown", "PotluckRelayCutOff", "PotluckHostNotConnected"}
    await watcher.until_firing(*gone)
    await processes.start_coordinator()
    await processes.until_ready()
    await watcher.until_resolved(*gone)
    await watcher.until("potluck_runs_resumed_total >= 1")
    return gone


async def a_full_disk(federation: Scene, small: Path) -> set[str]:
    watcher, processes = federation.prometheus, federation.processes
    await kill(processes.hosts[1])
    set_values(federation.files.hosts[1], {"state_directory": str(small / "state")})
    await processes.start_host(1)
    await watcher.until('potluck:disk_free:ratio{instance="host-1"} > 0.5')
    filler = mounts.fill(small, leave_bytes=2 << 20)
    await watcher.until_firing("PotluckDiskNearlyFull", instance="host-1")
    filler.unlink()  # check host-1 only: the alert may be right about this machine's own disk
    await watcher.until_resolved("PotluckDiskNearlyFull", instance="host-1")
    await kill(processes.hosts[1])
    return {"PotluckDiskNearlyFull"}
