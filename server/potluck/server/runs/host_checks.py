"""Whether hosts could train in a run at all, asked before any of their clients is selected.

What a host lacks is found before round 1, or when it joins, and not by selecting its clients until
all have failed. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from potluck.common.errors import is_permanent
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.gather import gather
from potluck.server.hosts.instructions import check_instruction
from potluck.server.runs.run import Run

_CHECK_SECONDS: Final = 30.0
"""How long a host may take to answer; one that is busy for longer is selected unchecked."""

_LARGEST_LAYOUT: Final = 1 << 20
"""Beyond this, hosts find out by training whether the model fits."""


class HostChecks:
    """The hosts of one run that have been asked, once for each of their processes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked: set[tuple[str, str]] = set()

    async def able(self, clients: Sequence[str], *, tag: str) -> tuple[str, ...]:
        """Those of the clients whose host does not say that it can't train; who can't is left out
        of the run. `tag` makes the ids of the instructions unique within it."""
        run = self._run
        groups = self._unasked(clients)
        answers = await gather(
            run.services.attendance,
            [self._instruction(group[0], tag) for group in groups],
            seconds=_CHECK_SECONDS,
            present=run.is_present,
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
            await run.left_out.add_and_store(troubles)
        return tuple(client for client in clients if client not in run.left_out)

    def _unasked(self, clients: Sequence[str]) -> list[list[str]]:
        """Clients by host, for those hosts that have not been asked yet."""
        groups: dict[tuple[str, str], list[str]] = {}
        for client in clients:
            session = self._run.services.attendance.session_of(client)
            if session is not None:
                groups.setdefault((session.host_id, session.process_id), []).append(client)
        new = {host: group for host, group in groups.items() if host not in self._asked}
        self._asked |= new.keys()
        return list(new.values())

    def _instruction(self, client: str, tag: str) -> coordinator_pb2.Instruction:
        run = self._run
        header = run.work.layout.header
        return check_instruction(
            run.plan,
            f"{run.row.run_id}/{tag}/check/{client}",
            run.row.run_id,
            run.machine.round,
            client,
            header if len(header) <= _LARGEST_LAYOUT else b"",
        )
