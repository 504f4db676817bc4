"""Asks hosts whether they can train in a run, before their clients are selected.

So missing software and refusals of owners are found before round 1, or when a host joins. Otherwise
each affected client would be selected first, and then fail. Used on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from potluck.common.errors import is_permanent
from potluck.common.interruptible import in_thread
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.eligibility.left_out import LeftOutRegister
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.gather import gather
from potluck.server.hosts.instructions import check_instruction
from potluck.server.machine.events import Select
from potluck.server.plan.plan import RunPlan

_CHECK_SECONDS: Final = 30.0
"""Seconds to wait for an answer. If a host is busy for longer, its clients can be selected without
a check."""

_LARGEST_LAYOUT: Final = 1 << 20
"""Maximum size in bytes of a layout to send; for a larger model, hosts check the layout only when
they train."""


class HostChecks:
    """Checks the hosts of one run, once for each host process."""

    def __init__(
        self,
        run_id: str,
        plan: RunPlan,
        layout: bytes,
        attendance: Attendance,
        left_out: LeftOutRegister,
        clients_evaluate: Callable[[], bool],
    ) -> None:
        """layout: header of the run's model files. clients_evaluate: function that returns True if
        clients evaluate models on held-out samples; it blocks."""
        self._run_id = run_id
        self._plan = plan
        self._layout = layout if len(layout) <= _LARGEST_LAYOUT else b""
        self._attendance = attendance
        self._left_out = left_out
        self._clients_evaluate = clients_evaluate
        self._asked: set[tuple[str, str]] = set()

    async def able(self, action: Select, present: Callable[[str], bool]) -> tuple[str, ...]:
        """Return the available clients, except those whose host reports that it can't train.

        The clients of these hosts are excluded from the run.
        """
        groups = self._unasked(action.available)
        evaluates = bool(groups) and await in_thread(self._clients_evaluate)
        answers = await gather(
            self._attendance,
            [self._instruction(group[0], action, evaluates=evaluates) for group in groups],
            seconds=_CHECK_SECONDS,
            present=present,
        )
        troubles: dict[str, str] = {}
        for group in groups:
            answer = answers.get(group[0])
            if answer is None or answer.WhichOneof("outcome") != "failure":
                continue
            failure = answer.failure
            if is_permanent(failure.reason):
                why = f"{failure.message[:400]} ({failure.reason[:80]})"
                troubles |= {c: why.replace(f"'{group[0]}'", f"'{c}'") for c in group}
        if troubles:
            await self._left_out.add_and_store(troubles)
        return tuple(client for client in action.available if client not in self._left_out)

    def _unasked(self, clients: Sequence[str]) -> list[list[str]]:
        """Return the clients of each host that has not been asked yet, one list per host."""
        groups: dict[tuple[str, str], list[str]] = {}
        for client in clients:
            session = self._attendance.session_of(client)
            if session is not None:
                groups.setdefault((session.host_id, session.process_id), []).append(client)
        new = {host: group for host, group in groups.items() if host not in self._asked}
        self._asked |= new.keys()
        return list(new.values())

    def _instruction(
        self, client: str, action: Select, *, evaluates: bool
    ) -> coordinator_pb2.Instruction:
        instruction_id = f"{self._run_id}/{action.round}.{action.attempt}/check/{client}"
        return check_instruction(
            self._plan,
            instruction_id,
            self._run_id,
            action.round,
            client,
            self._layout,
            evaluates=evaluates,
        )
