"""Store calls during an outage of the database: a PostgreSQL server that restarts, or a SQLite file
that another program locks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, event
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine import Engine
from support.postgresql import MISSING, PostgreSQL, programs, running_postgresql
from support.stored import (
    AT,
    COHORT,
    RUN,
    UPDATE,
    begun_run,
    commit,
    committed,
    locked,
    see_client,
    selected,
)

from potluck.common.errors import StorageError, UnreachableError
from potluck.server.store import AttemptKey, MemberState, RunState, Store
from potluck.server.store.sql.database import pause_seconds
from potluck.server.store.sql.failures import DatabaseAwayError
from potluck.server.store.store_thread import StoreThread

FIRST = AttemptKey(RUN.run_id, 1, 1)
STOPPED = (RUN.run_id, RunState.STOPPED, "", AT)
PATIENCE_SECONDS = 240.0


@pytest.fixture
def server() -> Iterator[PostgreSQL]:
    """Run a PostgreSQL server for this module only, since its tests stop the server."""
    if programs() is None:
        pytest.skip(MISSING)
    with running_postgresql() as found:
        yield found


@pytest.fixture
def ready(server: PostgreSQL) -> Iterator[Store]:
    """Return an open store with a round that can be committed."""
    with Store.open(server.new_schema()) as store:
        begun_run(store)
        selected(store, FIRST)
        for client_id in ("a", "c"):
            store.set_member(FIRST, client_id, MemberState.RECEIVED, update=UPDATE)
        yield store


def commit_first(store: Store) -> None:
    store.commit_round(commit(FIRST, ["a", "c"]))


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_store_call_waits_while_the_database_server_restarts(
    server: PostgreSQL, ready: Store, mode: str
) -> None:
    told: list[str] = []
    away = threading.Event()

    def tell(why: str) -> None:
        told.append(why)
        away.set()

    ready.watch(tell)
    server.stop(mode)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ready.patiently, commit_first)
        assert away.wait(PATIENCE_SECONDS)
        assert not waiting.done()
        server.start()
        waiting.result(PATIENCE_SECONDS)
    assert [bool(why) for why in told] == [True, False]
    assert "\n" not in told[0]
    assert [row.key for row in ready.rounds(RUN.run_id)] == [FIRST]


def test_closing_the_store_ends_the_wait_for_its_database(server: PostgreSQL, ready: Store) -> None:
    away = threading.Event()
    ready.watch(lambda _: away.set())
    server.stop()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ready.patiently, commit_first)
        assert away.wait(PATIENCE_SECONDS)
        ready.give_up()
        with pytest.raises(DatabaseAwayError, match="check the URL and that the server is up"):
            waiting.result(PATIENCE_SECONDS)
    server.start()


def test_store_call_waits_while_another_program_locks_the_sqlite_file(tmp_path: Path) -> None:
    told: list[str] = []
    away = threading.Event()

    def tell(why: str) -> None:
        told.append(why)
        away.set()

    with Store.open(f"sqlite:///{tmp_path / 'potluck.db'}") as store, ThreadPoolExecutor(1) as pool:
        begun_run(store)
        selected(store, FIRST)
        for client_id in ("a", "c"):
            store.set_member(FIRST, client_id, MemberState.RECEIVED, update=UPDATE)
        store.watch(tell)
        with locked(tmp_path / "potluck.db"):
            waiting = pool.submit(store.patiently, commit_first)
            assert away.wait(PATIENCE_SECONDS)
            assert not waiting.done()
        waiting.result(PATIENCE_SECONDS)
        assert [row.key for row in store.rounds(RUN.run_id)] == [FIRST]
    assert len(told) == 2
    assert "potluck.db: another program has locked it" in told[0]
    assert not told[1]


async def test_reads_are_refused_while_the_file_is_locked_and_a_write_waits(
    tmp_path: Path,
) -> None:
    path = tmp_path / "potluck.db"
    async with StoreThread.opened(f"sqlite:///{path}") as store:
        told: asyncio.Queue[str] = asyncio.Queue()
        store.watch(told.put_nowait)
        await store.call(begun_run)
        with locked(path):
            call = asyncio.create_task(store.call(lambda each: each.set_run_state(*STOPPED)))
            for _ in range(2):  # before and after the outage is known
                with pytest.raises(UnreachableError, match="another program has locked it"):
                    await store.ask(Store.runs)
            assert await told.get()
            assert not call.done()
        await call
        assert await told.get() == ""
        [row] = await store.ask(Store.runs)
        assert row.state is RunState.STOPPED


def cut_at_commit(monkeypatch: pytest.MonkeyPatch, *, committed: bool) -> list[int]:
    """Break the connection at the next commit of a change, before or after it is applied."""
    cuts: list[int] = []
    original: Callable[..., Any] = PGDialect_psycopg.do_commit

    def cut(self: Any, connection: Any) -> None:
        changes = connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone()[0]
        if changes is None or cuts:
            original(self, connection)
            return
        cuts.append(1)
        if committed:
            original(self, connection)
        connection.dbapi_connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(PGDialect_psycopg, "do_commit", cut)
    return cuts


@pytest.mark.parametrize("was_committed", [False, True])
def test_commit_is_applied_once_if_the_connection_breaks_before_its_reply(
    ready: Store, monkeypatch: pytest.MonkeyPatch, was_committed: bool
) -> None:
    cuts = cut_at_commit(monkeypatch, committed=was_committed)
    ready.patiently(commit_first)
    assert cuts == [1]
    assert [row.key for row in ready.rounds(RUN.run_id)] == [FIRST]
    assert [each.picks for each in ready.participation(RUN.run_id)] == [1] * len(COHORT)
    cuts.clear()
    ready.patiently(lambda store: store.append_to_roster(RUN.run_id, ["d", "e"]))
    assert cuts == [1]
    assert ready.roster(RUN.run_id) == ["a", "b", "c", "d", "e"]


def test_store_call_reconnects_if_its_connection_breaks(ready: Store) -> None:
    breaks: list[int] = []

    def cut(connection: Connection, *_: object) -> None:
        if not breaks:
            breaks.append(1)
            assert connection.connection.dbapi_connection is not None
            connection.connection.dbapi_connection.close()

    event.listen(Engine, "before_cursor_execute", cut)
    try:
        ready.patiently(commit_first)
    finally:
        event.remove(Engine, "before_cursor_execute", cut)
    assert breaks == [1]
    committed(ready, AttemptKey(RUN.run_id, 2, 1))


def test_changed_schema_after_a_restart_is_an_error_without_waiting(
    server: PostgreSQL, ready: Store
) -> None:
    with psycopg.connect(server.url("postgres").replace("+psycopg", "")) as link:
        link.execute("SET search_path = potluck1")
        link.execute("UPDATE potluck_schema_version SET version = 9999")
    server.stop("fast")
    server.start()
    with pytest.raises(
        StorageError, match=r"its schema version has changed from \d+ to 9999"
    ) as caught:
        ready.patiently(see_client)
    assert not isinstance(caught.value, DatabaseAwayError)


def test_unknown_database_or_user_is_refused_without_waiting(server: PostgreSQL) -> None:
    for url in (server.url("nosuch"), server.url("postgres").replace("postgres@", "stranger@")):
        with pytest.raises(StorageError, match="does not exist") as caught:
            Store.open(url)
        assert not isinstance(caught.value, DatabaseAwayError)


def test_pauses_between_attempts_double_up_to_five_seconds() -> None:
    assert [pause_seconds(n) for n in (1, 2, 3, 7, 1000)] == [0.1, 0.2, 0.4, 5.0, 5.0]
