"""The privacy loss of a run, as its coordinator computes, stores and shows it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.small_runs import small_run

from potluck.common.records.privacy_loss import ACCOUNT, BUDGET_SPENT, RoundPrivacy
from potluck.common.records.round_message import round_message, round_of
from potluck.common.settings.extras import MissingLibraryError
from potluck.common.tables.round_columns import round_row
from potluck.deploy.view.watch_lines import round_line
from potluck.server.live import run_privacy
from potluck.server.store import Store
from potluck.server.store.records import MemberState, RoundCommit, UpdateRow
from potluck.server.store.round_record import round_record

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)
RUN_FILE = """
clients_per_round = 3
rounds = 2
task.name = "digits"
task.clients = 3
training.batch_size = 16
training.steps = 2
[privacy]
"""


def update(samples: int) -> UpdateRow:
    return UpdateRow(
        blake3="0" * 64,
        size=1,
        encoding="float32",
        delta=False,
        compressed=False,
        samples=samples,
        steps=2,
        seconds=1.0,
        loss=None,
    )


async def after_one_round(folder: Path, privacy: str) -> RoundPrivacy:
    """Return the privacy loss after round 1, with updates of a and b; c's host has refused.

    It is read from the store, after the round was committed there."""
    with Store.open(f"sqlite:///{folder / 'store.sqlite3'}") as store:
        small = await small_run(folder, store, RUN_FILE + privacy)
        await small.begin_round("a", "b", "c")
        run = small.run
        for client, samples in (("a", 100), ("b", 400)):
            store.set_member(run.key, client, MemberState.RECEIVED, update=update(samples))
        found = await run.privacy.after_round({"c": f"client 'c': {BUDGET_SPENT}", "d": "other"})
        store.commit_round(
            RoundCommit(
                key=run.key,
                model_blake3="1" * 64,
                seconds=1.0,
                bytes_down=1,
                bytes_up=1,
                committed_at=AT,
                included=("a", "b"),
                privacy=found,
            )
        )
        [row] = store.rounds("r")
        assert row.privacy == found
        assert round_of(round_message(round_record(row))) == round_record(row)
        assert found is not None
        return found


async def test_committed_round_has_the_privacy_loss_of_the_received_updates(tmp_path: Path) -> None:
    found = await after_one_round(tmp_path, "noise_multiplier = 2.0\ndelta = 1e-6")
    assert found.delta == 1e-6
    assert set(found.clients) == {"a", "b"}
    assert found.largest == found.clients["a"] > found.clients["b"] > 0
    assert found.median == pytest.approx(sum(found.clients.values()) / 2)
    assert found.near_limit is None, "the run has no limit"
    assert found.refused == 1


async def test_clients_near_the_maximum_trainings_of_an_epsilon_are_counted(tmp_path: Path) -> None:
    found = await after_one_round(tmp_path, "epsilon = 3.0\ntrainings = 1")
    assert found.near_limit == 2
    assert found.largest == pytest.approx(3.0, abs=1e-3)


async def test_run_without_noise_has_no_privacy_loss(tmp_path: Path) -> None:
    text = RUN_FILE.replace("[privacy]", "")
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store, text)
        assert await small.run.privacy.after_round({}) is None


async def test_run_without_the_accounting_library_warns_once_about_unknown_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        assert name == ACCOUNT
        raise MissingLibraryError("dp_accounting is not installed; pip install it")

    monkeypatch.setattr(run_privacy, "integration", missing)
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store, RUN_FILE + "epsilon = 3.0")
        await small.begin_round("a", "b", "c")
        watcher = small.run.record.feed.watch()
        found = [await small.run.privacy.after_round({}) for _ in range(2)]
    assert found == [RoundPrivacy(delta=1e-5, near_limit=0)] * 2
    events = [watcher.get_nowait() for _ in range(watcher.qsize())]
    [warning] = [each.notice.text for each in events if each and each.notice.warning]
    assert "can't show the privacy loss" in warning


async def test_round_lines_and_tables_show_the_privacy_loss(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store, RUN_FILE + "epsilon = 3.0")
        await small.begin_round("a", "b", "c")
        store.commit_round(
            RoundCommit(
                key=small.run.key,
                model_blake3="1" * 64,
                seconds=1.0,
                bytes_down=1,
                bytes_up=1,
                committed_at=AT,
                included=(),
                privacy=RoundPrivacy(
                    delta=1e-5, largest=2.314, median=1.5, near_limit=2, refused=1
                ),
            )
        )
        record = round_record(store.rounds("r")[0])
    shown = "ε ≤ 2.31 (δ = 1e-05), 2 clients near the limit, 1 refused"
    assert shown in round_line(record, None)
    row = round_row(record)
    assert row["privacy_epsilon"] == 2.314
    assert row["privacy_refused"] == 1
