"""Report of the selections whose documents a host has stored, for the host's owner."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from potluck.common.errors import StorageError
from potluck.verifiable.chain import Chain
from potluck.verifiable.documents import BrokenSelectionError, Opening
from potluck.verifiable.host.committed_selections import FOLDER, TRAINING, text_of, with_line
from potluck.verifiable.stored_lines import Line, StoredLines


class SelectionReport:
    """The stored documents of selections, read and checked once. Nothing is changed."""

    def __init__(
        self, state_directory: Path, clients: Sequence[str], run: str | None = None
    ) -> None:
        """clients: the clients of this host. run: prefix of the ids of the runs to report; None for
        all.

        Raises StorageError if a file can't be read, or if the documents of a reported run break a
        rule of their chain.
        """
        self._folder = state_directory / FOLDER
        self._runs: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(self._folder.glob("*.jsonl")):
            lines = StoredLines(path).read()
            name = _run_of(path, lines[0]) if lines else ""
            if lines and name.startswith(run or ""):
                chains = _attempts(path, name, lines)
                self._runs[name] = [_values(*each, frozenset(clients)) for each in chains]

    def values(self) -> str:
        """Return the report as one line of JSON."""
        runs = [{"run": name, "selections": found} for name, found in sorted(self._runs.items())]
        return json.dumps({"runs": runs})

    def lines(self) -> Iterator[str]:
        """Yield one line per attempt at a round, sorted by run, in the order of their openings."""
        if not self._runs:
            yield f"no selections: {self._folder} has no documents of such a run"
        for name, selections in sorted(self._runs.items()):
            yield from (f"run {name}, {_sentence(each)}" for each in selections)


def _run_of(path: Path, first: Line) -> str:
    """Return the run that the first line of a file names. Raises StorageError."""
    try:
        return Opening.parse(text_of(first, "opening")).run
    except BrokenSelectionError as error:
        raise _broken(path, 1, error) from None


def _attempts(
    path: Path, run: str, lines: Sequence[Line]
) -> Iterator[tuple[Chain, bool, Sequence[str]]]:
    """Yield, for each attempt, the chain after its last document, True if documents before the
    attempt are missing, and the clients that were instructed to train. Raises StorageError if a
    line breaks the chain."""
    chain, gap, trained = Chain.begin(run), False, list[str]()
    for number, line in enumerate(lines, 1):
        try:
            longer = with_line(chain, line)
        except BrokenSelectionError as error:
            raise _broken(path, number, error) from None
        opening = longer.opening
        if opening is not None and opening is not chain.opening:
            if chain.opening is not None:
                yield chain, gap, trained
            gap, trained = opening.previous != chain.tip, []
        if TRAINING in line:
            trained.append(line["client"])
        chain = longer
    yield chain, gap, trained


def _broken(path: Path, number: int, error: BrokenSelectionError) -> StorageError:
    reason = error.message.removeprefix("refused selection: ")
    return StorageError(
        f"{path}: line {number} breaks the chain of selections: {reason}; restore the file from a "
        "backup, because this host can't prove which documents it accepted",
        path=path,
    )


def _values(
    chain: Chain, gap: bool, trained: Sequence[str], own: AbstractSet[str]
) -> dict[str, Any]:
    """Return the values of an attempt. trained: the clients that were instructed to train. own: the
    clients of this host."""
    opening, outcome = chain.opening, chain.outcome
    assert opening is not None  # noqa: S101  # the first line of a file is an opening
    cohort = [] if outcome is None else list(outcome.cohort)
    available = [] if chain.attendees is None else chain.attendees.available
    return {
        "round": opening.round,
        "rounds": opening.rounds,
        "attempt": opening.attempt,
        "selector": opening.selector,
        "available": list(available),
        "cohort": cohort,
        "own": [client for client in cohort if client in own],
        "trained": list(trained),
        "recomputed": opening.joint and outcome is not None,
        "gap": gap,
        "documents": chain.digests,
    }


def _sentence(each: dict[str, Any]) -> str:
    cohort, own = each["cohort"], each["own"]
    clients, how = "no cohort", "no outcome was received"
    if cohort:
        clients = f"{len(cohort)} of {len(each['available'])} clients"
        clients += f", on this host: {', '.join(own) or 'none'}"
        if own:
            clients += f", instructed to train: {', '.join(each['trained']) or 'none'}"
        how = "recomputed by this host" if each["recomputed"] else "recorded, not recomputed"
    gap = "; earlier documents are missing" if each["gap"] else ""
    kind, sha256 = list(each["documents"].items())[-1]
    what = f"round {each['round']} of {each['rounds']}, attempt {each['attempt']}"
    return f"{what}: {clients}; {how}{gap}; {kind} {sha256}"
