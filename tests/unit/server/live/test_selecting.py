"""The clients of a run as its selector sees them: admitted, counted, tagged and recalled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.eligibility import selecting

from potluck.server.hosts.attendance import Attendance, HostSession
from potluck.server.live.selecting import Selecting
from potluck.server.machine.events import Event, Excluded
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import draw_up
from potluck.server.store import Store
from potluck.server.store.records import (
    AttemptKey,
    MemberRow,
    MemberState,
    NewRun,
    Participation,
    RoundRow,
)

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)
RUN_FILE = """\
clients_per_round = 2
[selector]
name = "fedentopt"
[profiles]
epsilon = 1.0
adjacency = "replace"
[task]
name = "digits"
[selector_limits.at_most_per]
site = 1
"""


@dataclass
class Scene:
    store: Store
    attendance: Attendance
    selecting: Selecting
    posted: list[Event] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def attach(self, host: str, *clients: str, tags: Mapping[str, str]) -> None:
        session = HostSession(
            host_id=host, client_ids=clients, device="cpu", tasks=frozenset(), tags=dict(tags)
        )
        self.attendance.attach(session)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        plan = draw_up(RUN_FILE, source="test")
        store.add_run(NewRun.of("r", plan.run_file, RUN_FILE, AT, {}))

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        attendance, posted, warnings = Attendance(lambda: 0.0), list[Event](), list[str]()
        owner = selecting(
            plan, RunRoster(), attendance, in_store, warn=warnings.append, post=posted.append
        )
        yield Scene(store, attendance, owner, posted, warnings)


async def admitted(scene: Scene, clients: Sequence[str] = "abcd") -> Selecting:
    scene.selecting.roster.append(clients)
    await scene.selecting.admit(clients)
    return scene.selecting


def committed(number: int, *cohort: str) -> RoundRow:
    members = [
        MemberRow(
            client_id=client,
            host_id="h",
            state=MemberState.INCLUDED,
            reason="",
            trouble=None,
            update=None,
        )
        for client in cohort
    ]
    return RoundRow(
        key=AttemptKey("r", number, 1),
        model_blake3="0" * 64,
        state_blake3=None,
        selector_scalars={},
        strategy_scalars={},
        metrics={},
        seconds=1.0,
        bytes_down=0,
        bytes_up=0,
        committed_at=AT,
        members=members,
    )


async def test_admitted_clients_are_stored_and_in_the_population(scene: Scene) -> None:
    owner = await admitted(scene, "ba")
    assert list(scene.store.roster("r")) == ["b", "a"]
    population = owner.population()
    assert list(population.ids) == ["b", "a"]
    assert population.label_counts is not None  # the selector needs them


async def test_quarantined_clients_are_excluded(scene: Scene) -> None:
    owner = await admitted(scene)
    scene.store.quarantine("c", "it broke", AT)
    await owner.read_quarantine()
    assert owner.eligibility.excluded == ("c",)
    assert scene.posted == [Excluded(("c",))]


async def test_committed_cohorts_increase_selection_counts(scene: Scene) -> None:
    owner = await admitted(scene)
    owner.note_committed(committed(1, "a", "b"))
    owner.note_committed(committed(2, "a", "c"))
    assert owner.eligibility.picks.counts.tolist() == [2, 1, 1, 0]


async def test_stored_rounds_restore_selection_and_sample_counts(scene: Scene) -> None:
    owner = await admitted(scene)
    parts = [
        Participation(
            client_id=client, picks=picks, samples=samples, included_round=1, included_attempt=1
        )
        for client, picks, samples in (("b", 3, 40), ("d", 1, None))
    ]
    owner.recall(parts)
    assert owner.eligibility.picks.counts.tolist() == [0, 3, 0, 1]
    assert owner.population().samples.tolist() == [0, 40, 0, 0]


async def test_tags_of_disconnected_hosts_are_empty(scene: Scene) -> None:
    owner = await admitted(scene)
    scene.attach("h", "a", "c", tags={"site": "north"})
    assert owner.tag_limits() == [("site", ["north", "", "north", ""], 1)]


async def test_hosts_of_clients_are_listed_in_roster_order(scene: Scene) -> None:
    owner = await admitted(scene)
    owner.eligibility.host_of = {"a": "h", "b": "", "c": "i", "d": "h"}.__getitem__
    assert owner.hosts() == ["h", "", "i", "h"]


async def test_clients_selected_beyond_chance_raise_one_alarm(scene: Scene) -> None:
    owner = await admitted(scene, [f"k{number}" for number in range(20)])
    for number in range(1, 41):
        owner.alarms.choosing(owner.roster.rows(owner.roster.ids))
        owner.note_committed(committed(number, "k0"))
    assert [text.split(":")[0] for text in scene.warnings] == ["selection is lopsided"]
