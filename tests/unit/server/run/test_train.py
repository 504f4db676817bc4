"""Stored states of a cohort's members, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from potluck.server.live.run import Run
from potluck.server.machine.events import MarkMember
from potluck.server.machine.lateness import LateRegister
from potluck.server.machine.machine import Phase
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.run.train import Training
from potluck.server.select.selection_record import SelectionRecord
from potluck.server.store import Store
from potluck.server.store.records import AttemptKey, MemberChange, MemberState, UpdateRow
from potluck.server.updates.update_inbox import UpdateInbox
from potluck.server.updates.update_path import UpdatePath

UPDATE = UpdateRow(
    blake3="0" * 64,
    size=1,
    encoding="float32",
    delta=False,
    compressed=False,
    samples=1,
    steps=1,
    seconds=0.0,
    loss=0.0,
    normalizer=None,
    reports={},
)


class Recorder:
    """Stand-in for the store: keeps the member states written to it, in order."""

    def __init__(self) -> None:
        self.states: list[MemberState] = []

    def set_members(self, _key: AttemptKey, changes: list[MemberChange]) -> None:
        self.states += [change.state for change in changes]

    def set_member(self, _key: AttemptKey, _client: str, state: MemberState, **_: object) -> None:
        self.states.append(state)


@pytest.mark.asyncio
async def test_client_spared_while_its_update_is_stored_keeps_the_state_spared() -> None:
    store, waited_for = Recorder(), ["client-0"]

    async def in_store(call: Callable[[Store], Any]) -> Any:
        return call(cast(Store, store))

    run = SimpleNamespace(
        plan=SimpleNamespace(strategy=None),
        models=None,
        services=SimpleNamespace(in_store=in_store, files=None),
        id="run",
        key=AttemptKey("run", 1, 1),
        machine=SimpleNamespace(
            cohort=SimpleNamespace(waits_for=waited_for.__contains__, undecided=False, missed=[]),
            phase=Phase.TRAINING,
        ),
        instruction_id=lambda _client: "update",
        updates=SimpleNamespace(
            late=LateRegister.of([], simulated=False, most_rounds=0), received={}
        ),
    )
    path = cast(UpdatePath, SimpleNamespace(lose=lambda _client: None))
    inbox = UpdateInbox(cast(Run, run), path)
    training = Training(cast(Run, run), path, inbox, SelectionRecord())
    update = SpooledUpdate(client="client-0", path=Path("update"), row=UPDATE)
    arrival = asyncio.create_task(inbox.accept({"update": update}))
    await asyncio.sleep(0)  # the update is on its way to the store
    waited_for.clear()
    await training.mark(MarkMember(1, 1, "client-0", MemberState.SPARED, "enough without it"))
    await arrival
    assert store.states == [MemberState.RECEIVED, MemberState.SPARED]


@pytest.mark.parametrize("phase", Phase)
def test_no_update_is_expected_after_the_run_has_ended(phase: Phase) -> None:
    run = SimpleNamespace(
        machine=SimpleNamespace(
            cohort=SimpleNamespace(waits_for=["client-0"].__contains__, undecided=False),
            phase=phase,
        ),
        instruction_id=lambda _client: "update",
    )
    inbox = UpdateInbox(cast(Run, run), cast(UpdatePath, SimpleNamespace()))
    assert inbox.expects("client-0", "update") is (phase is not Phase.ENDED)
