"""The journal of commits: writing, reading, and finding lost rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import StorageError
from potluck.server.store.journal import Journal, LostRounds, Noted, losses

FIRST = Noted(run_id="ab12", round=1, model_blake3="a" * 64, state_blake3="b" * 64)
SECOND = Noted(run_id="ab12", round=2, model_blake3="c" * 64)
OTHER = Noted(run_id="pre-cd34", round=0)


def test_journal_returns_the_commits_written_to_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.read() == []
    journal.add([])
    assert not (tmp_path / "journal").exists()
    journal.add([FIRST, OTHER])
    journal.add([SECOND])
    journal.close()
    later = Journal(tmp_path / "journal")
    assert later.read() == [FIRST, OTHER, SECOND]
    later.add([FIRST])
    assert later.read() == [FIRST, OTHER, SECOND, FIRST]
    later.close()
    later.close()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


@given(cut=st.integers(2, 80))
def test_truncated_journal_line_does_not_affect_the_others(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal"
    journal = Journal(path)
    journal.add([FIRST, SECOND])
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])
    journal.add([OTHER])
    journal.close()
    assert journal.read() == [FIRST, OTHER]


@given(place=st.integers(0, 154), bit=st.integers(0, 7))
def test_damaged_journal_line_is_skipped(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "journal"
    journal = Journal(path)
    journal.add([FIRST])
    size = path.stat().st_size
    journal.add([SECOND])
    journal.close()
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
    assert size > 140
    found = journal.read()
    assert FIRST not in found or place >= size - 1
    assert all(each in (FIRST, SECOND) for each in found)


def test_journal_with_many_lines_is_shortened(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.add([FIRST] * 500)
    journal.shorten([FIRST], 500)
    assert len(journal.read()) == 500
    journal.add([SECOND] * 600)
    journal.shorten([SECOND], 1100)
    assert journal.read() == [SECOND]
    journal.add([OTHER])  # goes to the shortened file
    assert journal.read() == [SECOND, OTHER]
    journal.close()


def test_unusable_journal_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal")
    with pytest.raises(
        StorageError, match=r"journal: Is a directory; .*move the file to another folder"
    ):
        journal.read()
    with pytest.raises(StorageError, match="Is a directory"):
        journal.add([FIRST])


@pytest.mark.parametrize(
    ("noted", "committed", "lost"),
    [
        ([FIRST, SECOND], {"ab12": 2}, []),
        ([FIRST], {"ab12": 2}, []),  # killed before round 2 was noted
        ([], {"ab12": 2}, []),
        ([FIRST, SECOND], {"ab12": 1}, [("ab12", 1, 2)]),
        ([FIRST, SECOND], {"ab12": 0}, [("ab12", 0, 2)]),
        ([FIRST, SECOND], {}, [("ab12", None, 2)]),
        ([FIRST, SECOND, FIRST], {"ab12": 1}, []),  # resumed after round 1, the last noted
        ([OTHER], {}, []),
    ],
)
def test_journaled_rounds_missing_from_the_database_are_reported_as_lost(
    noted: list[Noted], committed: dict[str, int], lost: list[tuple[str, int | None, int]]
) -> None:
    found = losses(noted, committed)
    assert [(each.run_id, each.committed, each.lost) for each in found.values()] == lost


def test_lost_rounds_are_explained_in_one_line() -> None:
    several = LostRounds(run_id="ab12", committed=3, lost=6).explain("/state/potluck.sqlite3")
    assert several.startswith("rounds 4 to 6 were committed but /state/potluck.sqlite3 ends with")
    assert "`potluck resume ab12`" in several
    assert (
        LostRounds(run_id="ab12", committed=3, lost=4)
        .explain("x")
        .startswith("round 4 was committed")
    )
    gone = LostRounds(run_id="ab12", committed=None, lost=6).explain("x")
    assert gone.startswith("run ab12 with 6 committed rounds is not in x")
    assert "\n" not in several + gone
