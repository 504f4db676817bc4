"""Requested profiles, profiles that are known already, and the resulting columns."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.eligibility import rules

from potluck.common.disclosure import Mode, Parameters, TaskReference
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.hosts.attendance import Attendance, HostSession
from potluck.server.machine.events import Select
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.profiles.collect import Profiling
from potluck.server.profiles.trust import Trust
from potluck.server.store import Store
from potluck.server.store.records import NewRun, Profile

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)


def plan() -> RunPlan:
    text = 'clients_per_round = 2\n[task]\nname = "digits"\n[selector]\nname = "fedentopt"\n'
    return draw_up(text + "[profiles]\nepsilon = 1.0\nadjacency = 'replace'\n", source="test")


def profile(client: str, first: int, *, epoch: int = 1, epsilon: float = 1.0) -> Profile:
    parameters = Parameters(
        mode=Mode.NOISY, task=TaskReference(name="digits"), epsilon=epsilon, adjacency="replace"
    )
    return Profile(
        client_id=client,
        data_epoch=epoch,
        signal="label_counts",
        parameters_json=parameters.canonical(),
        payload_json=json.dumps({"label_counts": [first] + [1] * 9}),
        signature=None,
        received_at=AT,
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        run = NewRun(
            run_id="r",
            name="r",
            run_file="",
            created_at=AT,
            rounds=1,
            count=1,
            seed=0,
            task="digits",
            selector="fedentopt",
            strategy="fedavg",
        )
        store.add_run(run)
        yield store


def profiling(store: Store, attendance: Attendance, roster: RunRoster) -> Profiling:
    async def in_store(call: Callable[[Store], Any]) -> Any:
        return call(store)

    trust = Trust(federation="f")
    return Profiling("r", plan(), roster, attendance, in_store, trust)


def attend(attendance: Attendance, clients: list[str], *, epoch: int = 1) -> HostSession:
    session = HostSession(
        host_id="h",
        client_ids=tuple(clients),
        device="cpu",
        tasks=frozenset(),
        data_epoch=epoch,
    )
    attendance.attach(session)
    return session


async def admitted(store: Store, attendance: Attendance, clients: list[str]) -> Profiling:
    store.append_to_roster("r", clients)
    found = profiling(store, attendance, RunRoster(clients))
    await found.admit(clients)
    return found


def first_count(found: Profiling) -> float:
    """Return the first client's first label count."""
    counts = found.population().label_counts
    assert counts is not None
    return float(counts[0, 0])


async def test_stored_profile_is_not_requested_again(store: Store) -> None:
    attendance = Attendance(time.monotonic)
    session = attend(attendance, ["a", "b", "c"])
    store.put_profile(profile("a", 7))
    store.put_profile(profile("b", 8, epsilon=0.5))  # made with another epsilon than this run wants
    found = await admitted(store, attendance, ["a", "b", "c"])
    assert [found.lacks(client) for client in "abc"] == [[], ["label_counts"], ["label_counts"]]
    column = found.population().label_counts
    assert column is not None
    assert column[0, 0] == 7
    assert np.isnan(column[1:]).all()
    collected = await found.collect(["a"], tag="1.1/profile", present=lambda _: True)
    assert (collected.refused, collected.silent) == ({}, set())
    assert session.outbox.empty()


async def test_population_is_unchanged_when_a_client_joins_later(store: Store) -> None:
    roster = RunRoster(["a", "b"])
    found = profiling(store, Attendance(time.monotonic), roster)
    population = found.population()
    roster.append(["c"])
    assert len(population) == len(population.samples) == 2
    assert list(found.population().ids) == ["a", "b", "c"]


async def test_profile_is_requested_again_when_the_data_epoch_changes(store: Store) -> None:
    attendance = Attendance(time.monotonic)
    store.put_profile(profile("a", 7))
    store.put_profile(profile("a", 9, epoch=2))
    found = await admitted(store, attendance, ["a"])
    assert first_count(found) == 9
    assert found.lacks("a") == []  # a is disconnected, so its newest stored profile counts
    session = attend(attendance, ["a"], epoch=3)
    assert found.lacks("a") == ["label_counts"]
    made = profile("a", 11, epoch=3)

    def respond(client: str) -> bool:
        message = session.outbox.get_nowait()
        assert message is not None
        instruction = message.instruction
        assert instruction.client_id == client
        answer = rpc.Profile(
            signal=made.signal,
            parameters_json=made.parameters_json,
            payload_json=made.payload_json,
            data_epoch=3,
        )
        attendance.answer(session, rpc.Answer(instruction_id=instruction.id, profile=answer))
        return True

    collected = await found.collect(["a"], tag="1.1/profile", present=respond)
    assert (collected.refused, collected.silent) == ({}, set())
    assert found.lacks("a") == []
    assert first_count(found) == 11
    assert len(store.profiles()) == 3


async def test_profile_collection_does_not_wait_for_disconnected_clients(store: Store) -> None:
    attendance = Attendance(time.monotonic)
    found = await admitted(store, attendance, ["a"])
    collected = await found.collect(["a"], tag="1.1/profile", present=lambda _: False)
    assert collected.silent == {"a"}


async def test_profile_collection_for_a_thousand_clients_takes_under_5_ms(store: Store) -> None:
    clients = [f"client-{n}" for n in range(1000)]
    attendance = Attendance(time.monotonic)
    attend(attendance, clients)
    for client in clients:
        store.put_profile(profile(client, 3))
    store.append_to_roster("r", clients)

    async def in_store(call: Callable[[Store], Any]) -> Any:
        return call(store)

    roster = RunRoster(clients)
    disclosed = profiling(store, attendance, roster)
    eligibility = rules(plan(), roster, disclosed, attendance, in_store)
    await disclosed.admit(clients)

    async def once() -> float:
        """Return the processor seconds of a call. Hosts don't answer, so it waits for no client."""
        begun = time.process_time()
        rows = await eligibility.eligible(Select(1, 1, tuple(clients), 100), lambda _: False)
        assert len(rows) == 1000
        return time.process_time() - begun

    assert min([await once() for _ in range(5)]) < 0.005
