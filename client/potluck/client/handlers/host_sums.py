"""Sums at the host: updates of clients that train for the same attempt are sent as one update.

Adding is exact, so the round's model does not depend on which updates are in a sum. Waiting only
changes how many files are sent: members that fail or are late do not affect the others. Each
client's own update stays on disk until its round is over. If the coordinator refuses a sum because
some members are no longer needed, the host sends another sum without those members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.instruction_log import InstructionLog
from potluck.client.transfer.link import Link
from potluck.client.transfer.saved_updates import KeptUpdate, KeptUpdates
from potluck.client.transfer.upload import deliver
from potluck.common.errors import PotluckError, RoundClosedError
from potluck.common.updates.fixed_point import members_digest
from potluck.common.updates.sum_files import add_files

log = structlog.get_logger()

WAITED_SHARE: Final = 0.8
"""Share of the time left to its deadline for which a group's first update waits for other
updates."""
ARRIVAL_SECONDS: Final = 2.0
"""Maximum seconds that an update waits for companions whose instructions have not arrived.

This is short because instructions arrive together. A client gets no instruction if the coordinator
already has its update.
"""


@dataclass(kw_only=True, eq=False)
class _WaitingUpdate:
    """An update that waits. delivered: future, done once the update is delivered, or its client has
    left the group."""

    active: ActiveInstruction
    update: KeptUpdate
    fresh: bool
    delivered: asyncio.Future[None]


@dataclass(kw_only=True, eq=False)
class _SumGroup:
    """Updates that are sent together. gathering: True until sending begins."""

    companions: Sequence[str]
    members: list[_WaitingUpdate] = field(default_factory=list)
    gathering: bool = True
    task: asyncio.Task[None] | None = None

    @property
    def present(self) -> list[_WaitingUpdate]:
        """The members that have neither been delivered nor left."""
        return [each for each in self.members if not each.delivered.done()]


class HostSums:
    """Adds up the updates of a host's clients, and delivers the sums. Runs on the event loop."""

    def __init__(self, log_: InstructionLog, updates: KeptUpdates, link: Link) -> None:
        self._log = log_
        self._updates = updates
        self._link = link
        self._groups: list[_SumGroup] = []
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Check the groups again after an instruction was finished or dropped."""
        self._changed.set()

    async def deliver(self, active: ActiveInstruction, update: KeptUpdate, *, fresh: bool) -> None:
        """Deliver an update to the coordinator within a sum; return once the sum is stored there.

        fresh: True if no part of the update has been sent before. Raises what `upload.deliver`
        raises.
        """
        companions = list(active.instruction.train.companions) or [update.update_id]
        group = self._gathering(companions)
        delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.members.append(
            _WaitingUpdate(active=active, update=update, fresh=fresh, delivered=delivered)
        )
        if group.task is None:
            group.task = asyncio.create_task(self._take_up(group))
        self.changed()
        try:
            await delivered
        finally:
            self.changed()
            if not group.present and group.task is not None and not group.gathering:
                group.task.cancel()  # no client waits for it any more

    def _gathering(self, companions: Sequence[str]) -> _SumGroup:
        for group in self._groups:
            if group.gathering and group.companions == companions:
                return group
        group = _SumGroup(companions=companions)
        self._groups.append(group)
        return group

    # Gathering --------------------------------------------------------------------------------

    async def _take_up(self, group: _SumGroup) -> None:
        try:
            await self._gather(group)
            group.gathering = False
            await self._send(group.present)
        except Exception as error:
            log.exception("sum of updates failed unexpectedly")
            _fail(group.present, error)
        finally:
            self._groups.remove(group)

    async def _gather(self, group: _SumGroup) -> None:
        """Wait until the deadline for companions that are still training."""
        now = asyncio.get_running_loop().time
        began = now()
        until = _latest(group.members[0], began)
        while group.present:
            self._changed.clear()
            training, unknown = self._awaited(group)
            limit = until if training else began + ARRIVAL_SECONDS if unknown else began
            if limit is not None and now() >= limit:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(limit):
                    await self._changed.wait()

    def _awaited(self, group: _SumGroup) -> tuple[bool, bool]:
        """Return two flags: True if a companion still trains; True if an instruction has not
        arrived."""
        here = {each.update.update_id for some in self._groups for each in some.members}
        entries = [self._log.find(each) for each in group.companions if each not in here]
        training = any(entry is not None and not entry.stage.over for entry in entries)
        return training, None in entries

    # Sending ----------------------------------------------------------------------------------

    async def _send(self, members: Sequence[_WaitingUpdate]) -> None:
        """Send one sum of the members still waiting; if refused, send each update by itself."""
        while members:
            try:
                sent = await self._send_sum(members)
            except RoundClosedError as error:
                gone = error.metadata.get("clients", "").split(",")
                left = [each for each in members if each.update.client_id in gone]
                _fail(left or members, error)
            except PotluckError as error:
                if len(members) == 1:
                    _fail(members, error)
                    return
                log.warning(
                    "sum of updates was refused; sending each update by itself", error=error.message
                )
                for each in members:
                    await self._send([each])
            else:
                for each in members:
                    if sent and not each.delivered.done():
                        each.delivered.set_result(None)
            members = [each for each in members if not each.delivered.done()]

    async def _send_sum(self, members: Sequence[_WaitingUpdate]) -> bool:
        """Send the members' sum; return False if a member left before it was made.

        The file of a member that has left may have been overwritten while the sum was made, so that
        sum is not sent."""
        updates = [each.update for each in members]
        fresh = all(each.fresh for each in members)
        first, path = updates[0], self._updates.path(updates[0].update_id)
        if len(updates) == 1:
            await deliver(self._link, first, path, fresh=fresh, members=updates)
            return True
        ids = [update.update_id for update in updates]
        path = self._updates.path(f"sum of {members_digest(ids).hex()}")
        try:
            written = await asyncio.to_thread(
                add_files, path, [self._updates.path(each) for each in ids], members_digest(ids)
            )
            if any(each.delivered.done() for each in members):
                return False
            changes = {"blake3": written.blake3, "size": written.size}
            whole = first.model_copy(update=changes)
            await deliver(self._link, whole, path, fresh=fresh, members=updates)
            return True
        finally:
            self._discard(path)

    def _discard(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # the next start of the host deletes it
            path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Stop sending."""
        tasks = [group.task for group in self._groups if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _latest(first: _WaitingUpdate, now: float) -> float | None:
    """Return the latest time to send a group's first update; None for no limit."""
    timeout = first.active.timeout
    deadline = None if timeout is None else timeout.when()
    return None if deadline is None else now + WAITED_SHARE * max(0.0, deadline - now)


def _fail(members: Sequence[_WaitingUpdate], error: Exception) -> None:
    for each in members:
        if not each.delivered.done():
            each.delivered.set_exception(error)
