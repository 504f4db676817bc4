"""Feeding a sink from a database: each round once, resumed runs, sinks that refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.stored import AT, begun_run, committed, digest

from potluck.common.errors import StorageError
from potluck.server.sink import Sink, TrackedRound, TrackedRun
from potluck.server.sinks.record_reader import RecordReader
from potluck.server.sinks.sink_feed import DeliveryNotes, SinkFeed, explained
from potluck.server.sinks.sink_process import _pass, summed_up
from potluck.server.store import Store
from potluck.server.store.records import AttemptKey, RunState


class Tracker(Sink):
    """Sink that keeps rounds and final states by run, like a tracker outside the process."""

    def __init__(self, *, lost: bool = False) -> None:
        self.rounds: dict[str, list[int]] = {}
        self.states: dict[str, str] = {}
        self.asked = 0
        self.refused: set[str] = set()
        self.lost = lost

    def open(self, run: TrackedRun) -> int | None:
        self.asked += 1
        if run.name == "secret":
            return None
        return max(self.rounds.setdefault(run.run_id, []), default=0)

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        if run.run_id in self.refused:
            raise RuntimeError("no\n  thanks")
        self.rounds[run.run_id] += [each.number for each in rounds]
        if self.lost:
            self.lost = False
            raise TimeoutError  # the rounds were recorded all the same

    def end(self, run: TrackedRun) -> None:
        self.states[run.run_id] = run.state


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'potluck.sqlite3'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def notes(tmp_path: Path) -> DeliveryNotes:
    return DeliveryNotes(tmp_path / "delivered.json", "options")


def feed_of(url: str, sink: Sink, notes: DeliveryNotes) -> SinkFeed:
    return SinkFeed(RecordReader(url), sink, notes)


def test_sink_receives_each_round_once_and_in_order(
    url: str, store: Store, notes: DeliveryNotes
) -> None:
    begun_run(store)
    tracker = Tracker()
    feed = feed_of(url, tracker, notes)
    for number in (1, 2, 3):
        committed(store, AttemptKey("ab12", number, 1))
        if number != 2:
            assert feed.feed().errors == {}
    assert (tracker.rounds, tracker.asked) == ({"ab12": [1, 2, 3]}, 1)
    assert feed_of(url, tracker, notes).feed().behind == 0  # a new feed, as in another process
    assert tracker.rounds == {"ab12": [1, 2, 3]}
    assert tracker.states == {}


def test_feed_does_not_read_an_ended_run_again(
    url: str, store: Store, notes: DeliveryNotes, tmp_path: Path
) -> None:
    begun_run(store)
    committed(store, AttemptKey("ab12", 1, 1))
    store.set_run_state("ab12", RunState.STOPPED, "by hand", AT)
    tracker = Tracker()
    feed_of(url, tracker, notes).feed()
    assert tracker.states == {"ab12": "stopped"}
    again = DeliveryNotes(tmp_path / "delivered.json", "options")
    feed = feed_of(url, tracker, again)
    feed.feed()
    assert tracker.asked == 1
    store.set_run_state("ab12", RunState.RUNNING, "", AT.replace(year=2027))
    committed(store, AttemptKey("ab12", 2, 1))
    feed.feed()
    store.set_run_state("ab12", RunState.FINISHED, "", AT.replace(year=2028))
    feed.feed()
    assert (tracker.rounds, tracker.states) == ({"ab12": [1, 2]}, {"ab12": "finished"})
    feed_of(url, tracker, DeliveryNotes(tmp_path / "delivered.json", "another place")).feed()
    assert tracker.asked == 3


def test_round_recorded_without_confirmation_is_not_sent_to_the_sink_twice(
    url: str, store: Store, notes: DeliveryNotes
) -> None:
    begun_run(store)
    committed(store, AttemptKey("ab12", 1, 1))
    tracker = Tracker(lost=True)
    feed = feed_of(url, tracker, notes)
    assert feed.feed().errors == {"ab12": "TimeoutError"}
    assert feed.feed().errors == {}
    assert tracker.rounds == {"ab12": [1]}


def test_rounds_that_the_database_lost_in_a_restore_are_reported(
    url: str, store: Store, notes: DeliveryNotes
) -> None:
    begun_run(store)
    committed(store, AttemptKey("ab12", 1, 1))
    tracker = Tracker()
    tracker.rounds = {"ab12": [1, 2, 3]}
    feed = feed_of(url, tracker, notes)
    assert feed.feed().ahead == {"ab12": "rounds 2 to 3"}
    for number in (2, 3, 4):
        committed(store, AttemptKey("ab12", number, 1))
    assert feed.feed().ahead == {"ab12": "rounds 2 to 3"}
    assert tracker.rounds == {"ab12": [1, 2, 3, 4]}
    assert feed_of(url, tracker, notes).feed().ahead == {}


def test_run_refused_by_a_sink_does_not_delay_other_runs(
    url: str, store: Store, notes: DeliveryNotes
) -> None:
    for run_id in ("ab12", "cd34"):
        begun_run(store, run_id)
        committed(store, AttemptKey(run_id, 1, 1))
    committed(store, AttemptKey("ab12", 2, 1))
    tracker = Tracker()
    tracker.refused = {"ab12"}
    result = feed_of(url, tracker, notes).feed()
    assert (result.behind, result.errors) == (2, {"ab12": "RuntimeError: no thanks"})
    assert tracker.rounds == {"ab12": [], "cd34": [1]}


@pytest.mark.parametrize(
    ("damage", "column"),
    [
        ("UPDATE runs SET measures = '{' WHERE run_id = 'ab12'", "runs, run_id 'ab12'"),
        ("UPDATE runs SET measures = '[[1]]' WHERE run_id = 'ab12'", "runs, run_id 'ab12'"),
        ("UPDATE runs SET measures = '[[\"a\", 3]]' WHERE run_id = 'ab12'", "column measures"),
        ("UPDATE runs SET state = 'odd' WHERE run_id = 'ab12'", "column state"),
        ("UPDATE rounds SET seconds = 'long' WHERE run_id = 'ab12'", "table rounds"),
    ],
)
def test_unreadable_run_is_skipped_and_reported(
    url: str, store: Store, notes: DeliveryNotes, damage: str, column: str
) -> None:
    for run_id in ("ab12", "cd34"):
        begun_run(store, run_id)
        committed(store, AttemptKey(run_id, 1, 1))
    with store._database.transaction() as connection:
        connection.exec_driver_sql(damage)
    tracker = Tracker()
    result = feed_of(url, tracker, notes).feed()
    assert result.errors == {}  # not an error, as a retry won't help
    assert list(result.unreadable) == ["ab12"]
    assert column in result.unreadable["ab12"]
    assert tracker.rounds["cd34"] == [1]


def test_unreachable_database_leaves_the_number_of_missing_rounds_unknown(
    url: str, store: Store, notes: DeliveryNotes, tmp_path: Path
) -> None:
    begun_run(store)
    feed = feed_of(url, Tracker(), notes)
    (tmp_path / "potluck.sqlite3").rename(tmp_path / "elsewhere")
    found = _pass(feed)
    assert found.behind is None
    assert "can't be opened" in found.errors[""]


def test_tracker_that_refuses_many_runs_is_reported_in_one_short_line(
    url: str, store: Store, notes: DeliveryNotes
) -> None:
    runs = [f"ab{number:02}" for number in range(9)]
    for run_id in runs:
        begun_run(store, run_id)
        committed(store, AttemptKey(run_id, 1, 1))

    class Away(Tracker):
        def open(self, run: TrackedRun) -> int:
            raise StorageError("away " * 1000)

    line = summed_up(feed_of(url, Away(), notes).feed().errors)
    assert line.startswith("run ab00: away away")
    assert line.endswith("; and 6 more runs")
    assert len(line) < 1100
    assert summed_up({"": "the database is away"}) == "the database is away"


def test_sink_error_is_reported_without_the_password_in_a_url() -> None:
    error = RuntimeError(
        "request to https://me:s3@cr3t@host:5000/api\n failed; see https://x.org/@a"
    )
    assert explained(error) == (
        "RuntimeError: request to https://***@host:5000/api failed; see https://x.org/@a"
    )


def test_unreachable_tracker_lacks_the_rounds_committed_since_then(
    url: str, store: Store, notes: DeliveryNotes
) -> None:
    begun_run(store)
    for number in (1, 2):
        committed(store, AttemptKey("ab12", number, 1))

    class Leaving(Tracker):
        away = False

        def open(self, run: TrackedRun) -> int | None:
            if self.away:
                raise ConnectionError
            return super().open(run)

    tracker = Leaving()
    feed = feed_of(url, tracker, notes)
    assert feed.feed().behind == 0
    committed(store, AttemptKey("ab12", 3, 1))
    tracker.away, tracker.refused = True, {"ab12"}
    assert [feed.feed().behind for _ in range(3)] == [1, 1, 1]


def test_pretraining_run_is_not_sent_to_a_sink(
    url: str, store: Store, notes: DeliveryNotes
) -> None:
    begun_run(store, "pre-ab12")
    tracker = Tracker()
    feed_of(url, tracker, notes).feed()
    assert tracker.asked == 0


def test_record_reader_returns_a_round_as_it_was_committed(url: str, store: Store) -> None:
    begun_run(store)
    committed(store, AttemptKey("ab12", 1, 1))
    [found] = RecordReader(url).rounds("ab12", after=0, limit=9)
    assert found.row == {
        "round": 1,
        "accuracy": 0.75,
        "loss": 0.5,
        "weighted_f1": 0.5,
        "loss_worst_tenth": 3.75,
        "selected": 3,
        "included": 2,
        "seconds": 2.5,
        "bytes_down": 10**10,
        "bytes_up": 3,
        "model": digest(1),
        "loss_clients": 2,
        "loss_asked": 3,
        "loss_partial": 1,
        "loss_samples": 40,
        "loss_worst_tenth_samples": 0,
    }
    assert found.numbers["loss_partial"] == 1.0


def test_record_reader_opens_the_database_read_only(url: str, store: Store) -> None:
    reader = RecordReader(url)
    with (
        pytest.raises(StorageError, match="read-only"),
        reader._database.transaction() as connection,
    ):
        connection.exec_driver_sql("DELETE FROM runs")
    reader.close()
    assert store.checkpoint()  # no connection holds SQLite's log


def test_missing_database_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't be opened"):
        RecordReader(f"sqlite:///{tmp_path / 'none.sqlite3'}").runs({})
