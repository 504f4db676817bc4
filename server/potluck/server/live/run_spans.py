"""The spans of one run, created from the events of its state machine. Used on the event loop.

A run has its own trace. Each attempt at a round has another trace, linked to the run's, because a
collector may not accept all spans of a run in one trace.

    round ─┬─ select
           ├─ train ─┬─ client (one each; its host's spans are below)
           ├─ reduce
           ├─ evaluate
           └─ commit

The duration of a training reveals a client's number of samples. If the run does not disclose exact
numbers, all clients' spans end together with the training phase, and hosts create no spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from potluck.common.tracing import Span, Tracer, is_traced
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Phase
from potluck.server.store.records import MemberState, RunRow

_NAMES: Final = {
    Phase.SELECTING: "select",
    Phase.TRAINING: "train",
    Phase.REDUCING: "reduce",
    Phase.EVALUATING: "evaluate",
    Phase.COMMITTING: "commit",
}
_WRONG: Final = {MemberState.LOST, MemberState.FAILED, MemberState.LATE}
"""States that a span shows as an error. SPARED is not an error, because the round had enough
updates."""


class RunSpans:
    """Creates the spans of a run's trace; `close` ends the spans that are still open."""

    def __init__(self, tracer: Tracer, row: RunRow, *, alike: bool = False) -> None:
        """alike: True if no client's span may reveal its training time."""
        self._tracer = tracer
        self._about = {"potluck.run": row.run_id, "potluck.run.name": row.name}
        self._run = tracer.begin(
            "run",
            {**self._about, "potluck.selector": row.selector, "potluck.strategy": row.strategy},
        )
        self._phase = Phase.WAITING
        self._key = (0, 0)
        self._round: Span | None = None
        self._part: Span | None = None
        self._clients: dict[str, Span] = {}
        self._alike = alike
        self._troubles: dict[str, str] = {}

    def noted(
        self,
        event: rounds.Event,
        actions: Sequence[rounds.Action],
        phase: Phase,
        key: tuple[int, int],
    ) -> None:
        """Record an event that the state machine has handled. phase: its phase afterwards. key:
        (round, attempt)."""
        match event:
            case rounds.UpdateArrived(client):
                self._end_client(client)
            case rounds.SumArrived(updates):
                for client, _ in updates:
                    self._end_client(client)
        for action in actions:
            match action:
                case rounds.MarkMember(client=client, state=state):
                    self._end_client(client, state.value if state in _WRONG else "")
                case rounds.GiveUpAttempt(reason=reason):
                    self._end_round(reason)
        self._enter(phase, key)
        for action in actions:
            if isinstance(action, rounds.Train):
                self._begin_client(action.client)

    def context_of(self, client: str) -> str:
        """Return the parent span for the work of a client's host, as text; empty if there is
        none."""
        span = self._clients.get(client)
        if span is None or self._alike:
            return ""
        return self._tracer.written(span)

    def close(self) -> None:
        """End all open spans: the run is no longer driven."""
        self._end_round(
            "" if self._phase is Phase.ENDED else "the coordinator stopped following the run"
        )
        self._run.end()

    def _enter(self, phase: Phase, key: tuple[int, int]) -> None:
        if phase is self._phase and key == self._key:
            return
        self._end_part()
        if key != self._key or phase not in _NAMES:
            self._end_round()
        self._phase, self._key = phase, key
        if phase not in _NAMES or not is_traced(key[0], self._tracer.share):
            return
        if self._round is None:
            about: dict[str, str | int | float] = {**self._about}
            about |= {"potluck.round": key[0], "potluck.attempt": key[1]}
            self._round = self._tracer.begin("round", about, linked=self._run)
        self._part = self._tracer.begin(_NAMES[phase], {}, parent=self._round)

    def _begin_client(self, client: str) -> None:
        if self._part is not None and self._phase is Phase.TRAINING:
            about = {"potluck.client": client}
            self._clients[client] = self._tracer.begin("client", about, parent=self._part)

    def _end_client(self, client: str, trouble: str = "") -> None:
        if not self._alike:
            self._let_go(client, trouble)
        elif client in self._clients:
            self._troubles.setdefault(client, trouble)

    def _let_go(self, client: str, trouble: str) -> None:
        span = self._clients.pop(client, None)
        if span is not None:
            self._end(span, trouble)

    def _end_part(self) -> None:
        for client in list(self._clients):
            self._let_go(client, self._troubles.get(client, ""))
        self._troubles = {}
        if self._part is not None:
            self._part.end()
            self._part = None

    def _end_round(self, trouble: str = "") -> None:
        self._end_part()
        if self._round is not None:
            self._end(self._round, trouble)
            self._round = None

    def _end(self, span: Span, trouble: str) -> None:
        if trouble:
            self._tracer.fail(span, trouble)
        span.end()
