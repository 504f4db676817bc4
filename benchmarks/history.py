"""Cost of a long history to a coordinator: its start, a commit, operator requests, many clients.

Histories are written directly into the database. The benchmark times the coordinator's own
functions on them, over gRPC if real requests use it.

    python benchmarks/history.py
    python benchmarks/history.py --quick --json
    python benchmarks/history.py --database postgresql+psycopg://user@host/empty
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine, insert

from potluck.client.config import ClientConfig
from potluck.common.net.protocol import PROTOCOL_VERSION, VERSIONS
from potluck.common.net.tls import CHANNEL_OPTIONS, channel_credentials
from potluck.common.process.logs import LogLevel, configure_logging
from potluck.common.run_file.run_settings import Retention
from potluck.common.settings.configuration import load
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc
from potluck.server.config import CoordinatorConfig
from potluck.server.service.retention import Tidying
from potluck.server.service.serving import serving
from potluck.server.store import (
    AttemptKey,
    MemberState,
    RoundCommit,
    RunState,
    Store,
    UpdateRow,
)
from potluck.server.store.journal import Journal, Noted
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.sql import schema

AT = datetime(2026, 1, 1, tzinfo=UTC)
RUN_ID = "long"
COHORT = [f"client-{number:06d}" for number in range(10)]
_ROWS_AT_ONCE = 50_000


def digest(number: int) -> str:
    return f"{number:064x}"


# Histories -----------------------------------------------------------------------------------


def fill(url: str, *, rounds: int, runs: int, clients: int, run_file: str) -> None:
    """Write a finished run with `rounds` rounds of ten clients, other runs, and other clients."""
    Store.open(url).close()
    engine = create_engine(url)
    at = AT.isoformat(timespec="microseconds")
    run = {
        "name": "n", "run_file": run_file, "created_at": at, "rounds": rounds, "count": 10,
        "seed": "7", "task": "digits", "selector": "uniform", "strategy": "fedavg",
        "state": "finished", "reason": "", "changed_at": at, "initial_model_at": at,
        "measures": "[]",
    }  # fmt: skip
    attempt = {"begun_at": at, "available": "[[0,9]]", "state": "committed", "reason": ""}
    member = {
        "host_id": "h", "state": "included", "reason": "uniform", "blake3": "e" * 64, "size": 1,
        "encoding": "float32", "delta": 0, "compressed": 0, "samples": 57, "steps": 8,
        "seconds": 1.0,
    }  # fmt: skip
    row = {
        "selector_scalars": "{}", "strategy_scalars": "{}", "seconds": 1.0, "bytes_down": 0,
        "bytes_up": 0, "committed_at": at, "metrics": '{"accuracy":0.5,"loss":0.5}',
    }  # fmt: skip
    names = [*(f"{number:08x}" for number in range(runs)), RUN_ID]
    keys = [{"run_id": RUN_ID, "round": n, "attempt": 1} for n in range(1, rounds + 1)]
    tables: list[tuple[Any, Iterator[dict[str, Any]]]] = [
        (
            schema.runs,
            (
                {**run, "run_id": name, "number": n, "initial_model_blake3": digest(10**9 + n)}
                for n, name in enumerate(names, 1)
            ),
        ),
        (schema.attempts, ({**key, **attempt} for key in keys)),
        (
            schema.members,
            (
                {**key, **member, "position": place, "client_id": client}
                for key in keys
                for place, client in enumerate(COHORT)
            ),
        ),
        (
            schema.rounds,
            (
                {
                    **key,
                    **row,
                    "model_blake3": digest(number),
                    "state_blake3": digest(10**8 + number),
                }
                for number, key in enumerate(keys, 1)
            ),
        ),
        (
            schema.clients,
            (
                {"client_id": f"client-{n:06d}", "host_id": f"h{n % 100}", "device": "cpu",
                 "first_seen_at": at, "last_seen_at": at}
                for n in range(clients)
            ),
        ),
        (
            schema.participation,
            (
                {"run_id": RUN_ID, "client_id": client, "picks": rounds, "samples": 57,
                 "included_round": rounds, "included_attempt": 1}
                for client in COHORT
            ),
        ),
    ]  # fmt: skip
    with engine.begin() as connection:
        for table, rows in tables:
            while some := [each for _, each in zip(range(_ROWS_AT_ONCE), rows, strict=False)]:
                connection.execute(insert(table), some)
    engine.dispose()


# A commit ------------------------------------------------------------------------------------


def commits(url: str, folder: Path, rounds: int, times: int) -> dict[str, float]:
    """Return the milliseconds of a commit: in the store with its clean-up, and in the journal."""
    update = UpdateRow(
        blake3="e" * 64, size=1, encoding="float32", delta=False, compressed=False, samples=57,
        steps=8, seconds=1.0, loss=0.5,
    )  # fmt: skip
    folder.mkdir(parents=True)
    used: list[float] = []
    took: list[float] = []
    noted: list[float] = []
    journal = Journal(folder.with_name("journal"))
    with Store.open(url) as store:
        store.set_run_state(RUN_ID, RunState.RUNNING, "", AT)
        store.append_to_roster(RUN_ID, COHORT)

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        tidying = Tidying(ModelFiles(folder), in_store, set)
        tidying.begin(RUN_ID, rounds)
        for number in range(rounds + 1, rounds + 1 + times):
            key = AttemptKey(RUN_ID, number, 1)
            store.begin_attempt(key, range(10), AT)
            store.set_cohort(key, [(client, "h", "uniform") for client in COHORT])
            for client in COHORT:
                store.set_member(key, client, MemberState.RECEIVED, update=update)
            commit = RoundCommit(
                key=key, model_blake3=digest(number), state_blake3=digest(10**8 + number),
                metrics={"loss": 0.5}, seconds=1.0, bytes_down=0, bytes_up=0,
                committed_at=AT, included=COHORT,
            )  # fmt: skip
            begun, before = time.perf_counter(), time.process_time()
            store.commit_round(commit)
            store.last_round(RUN_ID)
            store.run(RUN_ID)
            asyncio.run(tidying.after_commit(RUN_ID, Retention(), number))
            took.append(time.perf_counter() - begun)
            used.append(time.process_time() - before)
            begun = time.perf_counter()
            journal.add([Noted(run_id=RUN_ID, round=number, model_blake3=digest(number))])
            noted.append(time.perf_counter() - begun)
    journal.close()
    return {
        "commit_ms": 1000 * statistics.median(took),
        "commit_processor_ms": 1000 * statistics.median(used),
        "journal_ms": 1000 * statistics.median(noted),
    }


# A coordinator -------------------------------------------------------------------------------


@contextmanager
def federation(clients: int, hosts: int, database: str) -> Iterator[tuple[DemoFiles, str]]:
    """Yield the files of a coordinator and its hosts, and the database's URL."""
    options = DemoOptions(
        task="digits", selector="uniform", strategy="fedavg", clients=clients, hosts=hosts,
        count=10, rounds=1, seed=7, device="cpu",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, reserved_port() as port:
        files = write_demo_files(Path(name) / "federation", options, port)
        if database:
            text = files.coordinator.read_text()
            files.coordinator.write_text(f'database = "{database}"\n{text}')
        config = load(CoordinatorConfig, files.coordinator, environment_prefix="NONE")
        config.state_directory.mkdir(parents=True, exist_ok=True)
        yield files, config.database_url()


async def coordinator(files: DemoFiles) -> dict[str, float]:
    """Return the seconds of a coordinator's start, of operators' requests, and of its stop."""
    config = load(CoordinatorConfig, files.coordinator, environment_prefix="NONE")
    found: dict[str, float] = {}
    begun = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal begun
        found[what] = time.perf_counter() - begun
        begun = time.perf_counter()

    async with serving(config), LocalFederation(files).operator() as operator:
        lap("start_seconds")
        for what, newest in (("watch_seconds", 100), ("watch_all_seconds", 0)):
            async with aclosing(operator.watch_run(RUN_ID, newest_rounds=newest)) as events:
                begun = time.perf_counter()
                async for _ in events:
                    pass
            lap(what)
        await operator.list_runs()
        lap("runs_seconds")
        await operator.list_clients()
        lap("clients_seconds")
    lap("end_seconds")
    return found


async def attending(files: DemoFiles, clients: int) -> dict[str, float]:
    """Return the seconds until all clients are connected; their hosts send only a hello."""
    config = load(CoordinatorConfig, files.coordinator, environment_prefix="NONE")
    settings = [load(ClientConfig, path, environment_prefix="NONE") for path in files.hosts]
    async with serving(config):
        begun = time.perf_counter()
        await asyncio.gather(*(hello(host) for host in settings))
        took = time.perf_counter() - begun
        async with LocalFederation(files).operator() as operator:
            found = sum(each.attending for each in await operator.list_clients())
    if found > clients:
        raise SystemExit(f"{found} clients attend, not {clients}")
    return {"attend_seconds": took}


async def hello(settings: ClientConfig) -> None:
    """Connect as a host, until the coordinator's welcome arrives."""
    credentials = channel_credentials(settings.tls)
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.secure_channel(settings.coordinator, credentials, options) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        call = stub.Attend()
        message = coordinator_pb2.Hello(
            protocol_version=PROTOCOL_VERSION, versions=VERSIONS, client_ids=settings.client_ids()
        )
        await call.write(coordinator_pb2.AttendRequest(hello=message))
        await call.read()
        call.cancel()


# All of it -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one result for each length of a run."""
    results: list[dict[str, Any]] = []
    sizes: Sequence[int] = (10, 200, 2_000) if options.quick else (10, 1_000, 50_000)
    runs, clients = (200, 1_000) if options.quick else (20_000, 100_000)
    for rounds in sizes:
        with ExitStack() as stack:
            files, url = stack.enter_context(federation(10, 1, options.database))
            last = rounds == sizes[-1]
            fill(
                url,
                rounds=rounds,
                runs=runs if last else 10,
                clients=clients if last else 10,
                run_file=files.run_file,
            )
            result: dict[str, Any] = {"rounds": rounds, "runs": runs if last else 10}
            result["clients"] = clients if last else 10
            result |= asyncio.run(coordinator(files))
            state = load(CoordinatorConfig, files.coordinator, environment_prefix="NONE")
            models = state.state_directory / "benchmark-models"
            result |= commits(url, models, rounds, options.commits)
            results.append(result)
        if options.database:
            break  # this database is no longer empty, so the other lengths can't use it
    number = 200 if options.quick else 2_000
    with federation(number, 20, "") as (files, _):
        results.append({"attending": number, "hosts": 20} | asyncio.run(attending(files, number)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use a shorter history")
    parser.add_argument("--commits", type=int, default=50, help="number of timed commits")
    parser.add_argument(
        "--database", default="", help="URL of an empty database, instead of SQLite"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    configure_logging(level=LogLevel.ERROR)
    results = measure(options)
    if options.json:
        for each in results:
            print(json.dumps(each))
        return
    table = Table(title="what a history costs")
    table.add_column("what")
    for each in results[:-1]:
        table.add_column(f"{each['rounds']:,} rounds", justify="right")
    for what in (name for name in results[0] if name not in ("rounds",)):
        values = [each[what] for each in results[:-1]]
        table.add_row(what, *(f"{v:.3f}" if isinstance(v, float) else f"{v:,}" for v in values))
    Console().print(table)
    last = results[-1]
    print(
        f"{last['attending']:,} clients on {last['hosts']} hosts attend within "
        f"{last['attend_seconds']:.2f} s"
    )


if __name__ == "__main__":
    main()
