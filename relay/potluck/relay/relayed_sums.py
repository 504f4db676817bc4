"""Sums for the coordinator: a relay adds up the sums of the hosts behind it, and sends one sum.

Addition is exact, so the round's model does not depend on which updates are in which sum. The
relay's waiting time only affects the number of sums that it sends. Each host's sum stays on disk
until the coordinator has it. If the coordinator refuses a sum because some members are no longer
needed, the relay sends another sum without those members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from potluck.client.transfer.upload import deliver_file
from potluck.common.errors import PotluckError, RoundClosedError
from potluck.common.updates.fixed_point import members_digest
from potluck.common.updates.sum_files import add_files, opened_sum_file
from potluck.relay.expected_updates import ExpectedUpdates
from potluck.relay.held_updates import HeldUpdate, HeldUpdates
from potluck.relay.upstream import Upstream
from potluck.rpc.v1 import transfer_pb2

log = structlog.get_logger()

SUM: Final = transfer_pb2.ENCODING_SUM
_MOST_MEMBERS: Final = 4096
"""Maximum number of updates in one sum: its header must fit into a message."""


@dataclass(kw_only=True, eq=False)
class _Part:
    """The sum that one host sent; the relay adds it to the sums of other hosts.

    vectors: lengths of the vectors in the file, by name. delivered: done once the coordinator has
    accepted or refused the sum.
    """

    header: transfer_pb2.UpdateHeader
    path: Path
    vectors: Mapping[str, int]
    fresh: bool
    delivered: asyncio.Future[None]

    @property
    def updates(self) -> set[tuple[str, str]]:
        """The updates in the sum, as pairs of update id and client.

        The host's certificate proves the client. The id is only a claim of the host.
        """
        return {(each.update_id, each.client_id) for each in self.header.members}

    def fail(self, error: Exception) -> None:
        """End the delivery with an error, if the sum is refused or no longer needed."""
        if not self.delivered.done():
            self.delivered.set_exception(error)


@dataclass(kw_only=True, eq=False)
class _Gathering:
    """Sums of several hosts for one run; the relay adds them up and sends one sum."""

    parts: list[_Part] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class RelayedSums:
    """The sums of the hosts behind a relay. Runs on the event loop."""

    def __init__(
        self,
        upstream: Upstream,
        held: HeldUpdates,
        expected: ExpectedUpdates,
        *,
        wait_seconds: float,
    ) -> None:
        """`wait_seconds`: seconds for which a run's first sum waits for the sums of other hosts."""
        self._upstream = upstream
        self._held = held
        self._expected = expected
        self._wait_seconds = wait_seconds
        self._gatherings: dict[str, _Gathering] = {}  # by run id; each waits for more sums
        self._tasks: set[asyncio.Task[None]] = set()

    async def deliver(self, held: HeldUpdate, *, fresh: bool) -> None:
        """Deliver a host's sum, added to the sums of other hosts; return once the coordinator has
        stored it.

        fresh: True if no part of the host's sum has been sent before. Raises LayoutError or
        OutOfBoundsError for a file that does not match its header, and the errors of the
        coordinator's answer.
        """
        header = held.header
        path = self._held.path(header.update_id)
        ids = [each.update_id for each in header.members]
        # Check the sum before it is added to others: its fault must not make the coordinator refuse
        # them.
        vectors = await asyncio.to_thread(_checked_vectors, path, ids)
        delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        part = _Part(header=header, path=path, vectors=vectors, fresh=fresh, delivered=delivered)
        gathering = self._gathering(header.run_id)
        for other in gathering.parts:
            if other.updates & part.updates:  # the host has made a new sum of these updates
                other.fail(RoundClosedError("the host has sent another sum of the same updates"))
        gathering.parts.append(part)
        self._expected.received(header.members)
        try:
            await delivered
        finally:
            gathering.parts.remove(part)
            self._expected.changed.set()

    async def close(self) -> None:
        """Stop sending."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Gathering --------------------------------------------------------------------------------

    def _gathering(self, run_id: str) -> _Gathering:
        """Return the run's gathering that still waits for parts; begin one if there is none."""
        found = self._gatherings.get(run_id)
        if found is None:
            found = self._gatherings[run_id] = _Gathering()
            found.task = asyncio.create_task(self._take_up(run_id, found))
            self._tasks.add(found.task)
            found.task.add_done_callback(self._tasks.discard)
        return found

    async def _take_up(self, run_id: str, gathering: _Gathering) -> None:
        try:
            await self._gather(run_id, gathering)
            del self._gatherings[run_id]  # later parts join the next gathering
            for parts in _addable(gathering.parts):
                await self._send(parts)
        except Exception as error:
            log.exception("a sum of updates failed unexpectedly")
            for part in gathering.parts:
                part.fail(error)
        finally:
            if self._gatherings.get(run_id) is gathering:
                del self._gatherings[run_id]

    async def _gather(self, run_id: str, gathering: _Gathering) -> None:
        """Wait up to `wait_seconds` for the sums of hosts that still train."""
        changed, clock = self._expected.changed, asyncio.get_running_loop().time
        until = clock() + self._wait_seconds
        while any(not part.delivered.done() for part in gathering.parts):
            changed.clear()
            if not self._expected.awaited(run_id) or clock() >= until:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await changed.wait()

    # Sending ----------------------------------------------------------------------------------

    async def _send(self, parts: Sequence[_Part]) -> None:
        """Send the parts as one sum, without those that are no longer needed. If the coordinator
        refuses the sum, send each part by itself."""
        while parts := [part for part in parts if not part.delivered.done()]:
            try:
                await self._send_sum(parts)
            except RoundClosedError as error:
                _close(parts, error)
            except PotluckError as error:
                if len(parts) == 1:
                    parts[0].fail(error)
                    return
                log.warning(
                    "coordinator refused a sum; sending its parts one by one", error=error.message
                )
                for part in parts:
                    await self._send([part])
            else:
                for part in parts:
                    if not part.delivered.done():
                        part.delivered.set_result(None)

    async def _send_sum(self, parts: Sequence[_Part]) -> None:
        link, fresh = self._upstream.link, all(part.fresh for part in parts)
        if len(parts) == 1:
            await deliver_file(link, parts[0].header, parts[0].path, fresh=fresh)
            return
        header = transfer_pb2.UpdateHeader()
        header.CopyFrom(parts[0].header)
        for part in parts[1:]:
            header.members.extend(part.header.members)
        members = members_digest(each.update_id for each in header.members)
        path = self._held.path(f"sum of {members.hex()}")
        try:
            written = await asyncio.to_thread(
                add_files, path, [part.path for part in parts], members
            )
            header.blake3, header.size, header.offset = written.blake3, written.size, 0
            log.debug("combined the sums of hosts", parts=len(parts), members=len(header.members))
            await deliver_file(link, header, path, fresh=fresh)
        finally:
            with contextlib.suppress(OSError):  # the next start deletes the file
                path.unlink(missing_ok=True)


def _checked_vectors(path: Path, update_ids: Sequence[str]) -> Mapping[str, int]:
    """Return the vectors of a sum's file, after the coordinator's checks. Blocks the calling
    thread.

    Raises LayoutError, OutOfBoundsError.
    """
    with opened_sum_file(path) as file:
        file.check(members_digest(update_ids), len(update_ids))
        return dict(file.vectors)


def _addable(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Group parts that can be added: the same vectors, up to `_MOST_MEMBERS` updates per group."""
    found: list[list[_Part]] = []
    for part in sorted(parts, key=lambda each: each.header.update_id):
        for together in found:
            members = sum(len(each.header.members) for each in (*together, part))
            if together[0].vectors == part.vectors and members <= _MOST_MEMBERS:
                together.append(part)
                break
        else:
            found.append([part])
    return found


def _close(parts: Sequence[_Part], error: RoundClosedError) -> None:
    """Fail the parts with clients that are no longer awaited.

    Each failure names these clients. If the error names no clients, all parts fail.
    """
    gone = set(error.metadata.get("clients", "").split(","))
    clients = {part: [each.client_id for each in part.header.members] for part in parts}
    named = [part for part in parts if gone & set(clients[part])]
    for part in named or parts:
        mine = [client for client in clients[part] if client in gone]
        part.fail(RoundClosedError(error.message, **{**error.metadata, "clients": ",".join(mine)}))
