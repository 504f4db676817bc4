"""Reading a database for sinks while a coordinator has it open."""

from __future__ import annotations

import pytest
from support.stored import begun_run, committed

from potluck.common.errors import StorageError
from potluck.server.sinks.record_reader import RecordReader
from potluck.server.store import AttemptKey, Store


def test_reader_sees_committed_rounds_while_a_coordinator_has_the_store_open(
    url: str, store: Store
) -> None:
    begun_run(store)
    committed(store, AttemptKey("ab12", 1, 1))
    reader = RecordReader(url)
    [row] = reader.runs({}).rows
    assert (row.run_id, row.committed_rounds) == ("ab12", 1)
    assert [each.number for each in reader.rounds("ab12", after=0, limit=10)] == [1]
    committed(store, AttemptKey("ab12", 2, 1))
    assert [each.number for each in reader.rounds("ab12", after=1, limit=10)] == [2]
    with (
        pytest.raises(StorageError, match="read-only"),
        reader._database.transaction() as connection,
    ):
        connection.exec_driver_sql("DELETE FROM rounds")
    reader.close()
    assert store.checkpoint()


def test_reads_in_a_transaction_see_one_snapshot(url: str, store: Store) -> None:
    begun_run(store)
    committed(store, AttemptKey("ab12", 1, 1))
    reader = RecordReader(url)
    counted = "SELECT (SELECT count(*) FROM rounds), (SELECT count(*) FROM members)"
    with reader._database.transaction() as connection:
        before = connection.exec_driver_sql(counted).one()
        store.delete_runs(["ab12"])
        assert connection.exec_driver_sql(counted).one() == before
    assert reader.runs({}).rows == []
    reader.close()
