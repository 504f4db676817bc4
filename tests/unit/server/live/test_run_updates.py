"""The updates of a run: those of the current attempt, and late ones that can join."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from potluck.common.tensors.tensor_files import write_tensors
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.run_updates import Offer, Updates
from potluck.server.live.spool import Spool
from potluck.server.machine.events import Event, StillTraining
from potluck.server.plan.plan import draw_up
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store import Store
from potluck.server.store.records import (
    AttemptKey,
    LateRow,
    LateState,
    MemberRow,
    MemberState,
    Participation,
    RoundRow,
    UpdateRow,
)

RUN_FILE = '[task]\nname = "digits"\nclients = 4\n[round]\nlate_updates = {rounds = 2}\n'
SIMULATED = RUN_FILE + "[virtual_clock]\nenabled = true\n"
FIRST, SECOND = AttemptKey("r", 1, 1), AttemptKey("r", 2, 1)


class Awaited:
    """A store with the late trainings of one run."""

    def __init__(self, rows: Sequence[LateRow] = ()) -> None:
        self.rows = list(rows)

    def awaited(self, _: str) -> list[LateRow]:
        return self.rows

    def set_late(self, rows: Sequence[LateRow]) -> None:
        self.rows += rows


class Scene:
    """The updates of run `r`, with records of their effects on the store, the spool and the run."""

    def __init__(
        self, folder: Path, run_file: str = RUN_FILE, stored: Sequence[LateRow] = ()
    ) -> None:
        self.store = Awaited(stored)
        self.attendance = Attendance(lambda: 0.0)
        self.posted: list[Event] = []
        self.warnings: list[str] = []
        self.judged: list[list[str]] = []
        self.spool = Spool(folder / "r")
        self.updates = Updates(
            "r",
            draw_up(run_file, source="test"),
            self.spool,
            attendance=self.attendance,
            in_store=self.in_store,
            offended=self.offended,
            post=self.posted.append,
            warn=self.warnings.append,
        )

    async def in_store(self, call: Callable[[Store], Any]) -> Any:
        return call(cast(Store, self.store))

    async def offended(self, clients: Iterable[str]) -> Mapping[str, str]:
        self.judged.append(list(clients))
        return {client: "three times" for client in self.judged[-1] if client == "b"}

    def receive(self, client: str, seconds: float = 1.0) -> None:
        self.updates.received[client] = SpooledUpdate(
            client=client, path=Path(client), row=update(seconds=seconds)
        )

    def close(
        self,
        key: AttemptKey,
        missed: Sequence[str] = (),
        weights: Sequence[float] = (),
        seconds: float = 0.0,
    ) -> Sequence[LateRow]:
        return self.updates.close_round(
            key, weights, missed, model_blake3="m" * 64, round_seconds=seconds, work={}
        )

    def awaited(self) -> list[str]:
        return [row.client_id for row in self.updates.late.awaited]

    def dropped(self, key: AttemptKey, client: str) -> bool:
        """Return True if the instruction that drops the client's update is still pending."""
        return self.attendance.pending(f"r/{key.round}.{key.attempt}/{client}/settle") is not None


def update(blake3: str = "0" * 64, seconds: float = 1.0) -> UpdateRow:
    return UpdateRow(
        blake3=blake3,
        size=1,
        encoding="float32",
        delta=False,
        compressed=False,
        samples=1,
        steps=1,
        seconds=seconds,
        loss=0.0,
        reports={},
    )


def late(client: str, key: AttemptKey = FIRST, row: UpdateRow | None = None) -> LateRow:
    return LateRow(
        run_id=key.run_id,
        round=key.round,
        attempt=key.attempt,
        client_id=client,
        state=LateState.AWAITED,
        model_blake3="m" * 64,
        seconds_left=0.0,
        update=row,
    )


def everybody(clients: Iterable[str]) -> Iterable[str]:
    return clients


def test_new_attempt_starts_without_updates_of_the_previous_attempt(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    updates = scene.updates
    updates.note_instructed("a", 5.0)
    updates.offers["a"] = Offer(numbers=[1.0], samples=3)
    scene.receive("a")
    updates.bytes_up += 7
    updates.begin_attempt()
    assert (updates.offers, updates.received, updates.bytes_up) == ({}, {}, 0)
    assert updates.seconds("a", 9.0, late=False) == 0.0


def test_training_seconds_are_counted_from_the_first_instruction(tmp_path: Path) -> None:
    updates = Scene(tmp_path).updates
    updates.note_instructed("a", 5.0)
    updates.note_instructed("a", 8.0)  # sent again, to another host, after a reconnect
    assert updates.seconds("a", 9.0, late=False) == 4.0
    assert updates.seconds("b", 9.0, late=False) == 0.0


def test_seconds_of_a_late_training_are_counted_from_its_own_round(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.updates.note_instructed("a", 5.0)
    scene.close(FIRST, missed=["a"])
    scene.updates.begin_attempt()
    scene.updates.note_instructed_late("a", 20.0)
    assert scene.updates.seconds("a", 25.0, late=True) == 20.0
    scene.updates.note_instructed_late("b", 20.0)  # b's first instruction was sent before a restart
    assert scene.updates.seconds("b", 25.0, late=True) == 5.0


def test_last_included_update_of_each_client_is_restored(tmp_path: Path) -> None:
    updates = Scene(tmp_path).updates
    updates.recall(
        [
            Participation(
                client_id="a", picks=1, samples=None, included_round=1, included_attempt=2
            ),
            Participation(
                client_id="c", picks=1, samples=None, included_round=None, included_attempt=None
            ),
        ]
    )
    assert [updates.included(client) for client in "abc"] == ["r/1.2/a", "", ""]
    members = [
        MemberRow(client_id=client, host_id="h", state=state, reason="", trouble=None, update=None)
        for client, state in (("a", MemberState.INCLUDED), ("b", MemberState.LATE))
    ]
    updates.note_included(
        RoundRow(
            key=SECOND,
            model_blake3="0" * 64,
            state_blake3=None,
            selector_scalars={},
            strategy_scalars={},
            metrics={},
            seconds=1.0,
            bytes_down=0,
            bytes_up=0,
            committed_at=datetime(2026, 5, 4, 12, tzinfo=UTC),
            members=members,
            late=[late("c", FIRST)],
        )
    )
    assert [updates.included(client) for client in "abc"] == ["r/2.1/a", "", "r/1.1/c"]


async def test_offending_client_is_judged_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for client in "bab":
        scene.updates.note_offender(client)
    await scene.updates.judge_offenders()
    await scene.updates.judge_offenders()
    assert scene.judged == [["a", "b"], []]
    assert scene.warnings == ["b is in quarantine: three times; see `potluck clients`"]


def test_missed_update_is_awaited_joins_later_and_gets_a_weight(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.close(FIRST, missed=["a", "b"])
    assert scene.awaited() == ["a", "b"]
    assert scene.updates.kept_clients() == {(1, 1): {"a", "b"}}
    scene.updates.late.receive("b", update("b" * 64))
    scene.updates.join(0.0, everybody)
    [joining] = scene.updates.late_updates(2)
    assert (joining.update.client, joining.age, joining.model_blake3) == ("b", 1, "m" * 64)
    assert joining.update.path == scene.spool.path(1, 1, "b", "b" * 64)
    rows = {row.client_id: row for row in scene.close(SECOND, weights=[0.5])}
    assert (rows["b"].state, rows["b"].weight) == (LateState.JOINED, 0.5)
    assert scene.awaited() == ["a"]


def test_late_update_of_an_excluded_client_does_not_join(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.close(FIRST, missed=["a", "b"])
    for client in "ab":
        scene.updates.late.receive(client, update())
    scene.updates.join(0.0, lambda clients: [client for client in clients if client != "a"])
    assert [row.client_id for row in scene.updates.joining] == ["b"]


def test_only_arrived_updates_are_awaited_on_a_virtual_clock(tmp_path: Path) -> None:
    scene = Scene(tmp_path, SIMULATED)
    scene.receive("a", seconds=30.0)
    scene.close(FIRST, missed=["a", "b"], seconds=10.0)
    assert scene.awaited() == ["a"]
    scene.updates.join(15.0, everybody)
    assert scene.updates.joining == []  # a arrives 20 simulated seconds after its round
    scene.updates.join(20.0, everybody)
    assert [row.client_id for row in scene.updates.joining] == ["a"]


async def test_late_update_is_no_longer_awaited_when_its_client_is_selected_again(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    scene.close(FIRST, missed=["a", "b"])
    await scene.updates.give_up("a")
    await scene.updates.give_up("c")
    scene.updates.post_awaited()
    assert scene.posted == [StillTraining(("b",))]
    assert [(row.client_id, row.state) for row in scene.store.rows] == [("a", LateState.DROPPED)]
    assert [scene.dropped(FIRST, client) for client in "abc"] == [True, False, False]


async def test_damaged_late_updates_are_awaited_again_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "r")
    draft = tmp_path / "whole"
    digest = write_tensors(draft, {})
    whole, torn = update(digest.blake3), update("1" * 64)
    spool.path(1, 1, "a", digest.blake3).write_bytes(draft.read_bytes())
    spool.path(1, 1, "b", torn.blake3).write_bytes(b"half of")
    rows = [late("a", row=whole), late("b", row=torn), late("c"), late("d", row=whole)]
    scene = Scene(tmp_path, stored=rows)
    await scene.updates.restore(["d"])  # d is in the current cohort
    assert [(row.client_id, row.update) for row in scene.updates.late.awaited] == [
        ("a", whole),
        ("b", None),
        ("c", None),
    ]
    assert scene.dropped(FIRST, "d")
