"""Updates for the coordinator: received from hosts, verified, held until delivered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import structlog

from potluck.client.transfer.link import Link
from potluck.client.transfer.upload import deliver_file
from potluck.common.errors import PotluckError, RoundClosedError, TruncatedError
from potluck.common.interruptible import shielded
from potluck.common.monitoring.metric_labels import DeliveryOutcome, Direction
from potluck.common.net.frames import update_header, update_trailer
from potluck.common.net.identity import Identity
from potluck.common.net.transfer import FileReceiver, check_digest, held_bytes, verified
from potluck.relay.expected_updates import GRACE_SECONDS, ExpectedUpdates
from potluck.relay.held_updates import HeldUpdate, HeldUpdates
from potluck.relay.relay_metrics import RelayMetrics
from potluck.relay.relay_state import relay_disk
from potluck.relay.relayed_sums import SUM, RelayedSums
from potluck.relay.upstream import Upstream, for_hosts
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2
from potluck.server.service.guard import check_client
from potluck.server.service.upload_order import UploadOrder

log = structlog.get_logger()


class RelayedUpdates:
    """The updates of the hosts behind a relay. Runs on the event loop.

    The relay answers a host only after the coordinator has answered. So the host keeps its update
    as long as it would without a relay. A complete update is delivered even if its host disconnects
    or this process is killed.
    """

    def __init__(
        self,
        upstream: Upstream,
        held: HeldUpdates,
        *,
        maximum_bytes: int,
        wait_seconds: float,
        clock: Callable[[], float],
        metrics: RelayMetrics,
    ) -> None:
        """`wait_seconds`: seconds for which a host's sum waits for the sums of other hosts.

        `clock`: seconds since 1970.
        """
        self.expected = ExpectedUpdates(clock, self._abandon, self._settle)
        self._sums = RelayedSums(upstream, held, self.expected, wait_seconds=wait_seconds)
        self._upstream = upstream
        self._held = held
        self._maximum = maximum_bytes
        self._clock = clock
        self._metrics = metrics
        self._order = UploadOrder()
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def _link(self) -> Link:
        return self._upstream.link

    def go_on(self) -> None:
        """Deliver the updates that an earlier process has not delivered."""
        for held in self._held.all():
            self._delivery(held, fresh=False)

    async def close(self) -> None:
        """Stop all deliveries; held updates stay on disk."""
        tasks = [*self._deliveries.values(), *self._settling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sums.close()

    # What hosts ask ---------------------------------------------------------------------------

    async def locate(
        self, request: rpc.LocateUploadRequest, identity: Identity
    ) -> rpc.LocateUploadResponse:
        """Return how many bytes of an update have arrived, or that the coordinator has it."""
        check_client(request.client_id, identity)
        check_digest(request.blake3)
        if not request.resume:
            return await self._locate(request)
        async with self._order.resumed(request.update_id, request.blake3) as sequence:
            located = await self._locate(request)
        located.sequence = sequence
        return located

    async def _locate(self, request: rpc.LocateUploadRequest) -> rpc.LocateUploadResponse:
        held = self._held.find(request.update_id, request.blake3)
        if held is not None:
            return rpc.LocateUploadResponse(offset=held.header.size)
        question = rpc.LocateUploadRequest()
        question.CopyFrom(request)
        question.resume = False  # the relay has no older stream that must end
        located = await self._upstream.locate(question)
        if located.complete:
            return located
        return rpc.LocateUploadResponse(offset=held_bytes(self._held.path(request.update_id)))

    async def take(
        self, frames: AsyncIterator[Any], identity: Identity
    ) -> rpc.SubmitUpdateResponse:
        """Receive one update and deliver it. Raises the coordinator's error."""
        frames = aiter(frames)
        header = update_header(await anext(frames, None))
        for client in (header.client_id, *(each.client_id for each in header.members)):
            check_client(client, identity)
        arrived = time.monotonic()
        async with self._order.turn(header.update_id, header.blake3, header.sequence):
            waited = time.monotonic() - arrived
            held = self._held.find(header.update_id, header.blake3)
            fresh = held is None and not header.offset
            if held is None:
                expires = await self._require(header)
                if expires is None:
                    return rpc.SubmitUpdateResponse(duplicate=True)
                if self._held.holds(header.update_id):  # another content: replace it
                    self._give_up(header.update_id)
                with contextlib.ExitStack() as stack:
                    receiver, blake3 = await self._receive(header, frames, stack)
                    if blake3 is None:
                        return rpc.SubmitUpdateResponse(
                            received=receiver.received, waited_seconds=waited
                        )
                    # The update is complete: it is delivered even if its host disconnects now.
                    keeping = self._keep(header, receiver, blake3, expires, fresh=fresh)
                    delivery = await shielded(keeping)
            else:
                delivery = self._delivery(held, fresh=fresh)
        try:
            await asyncio.shield(delivery)
        except asyncio.CancelledError:
            if not delivery.cancelled():
                raise
            raise RoundClosedError(
                f"the coordinator no longer waits for update '{header.update_id[:200]}'; drop the "
                "update",
                update=header.update_id[:200],
                client=header.client_id,
                clients=header.client_id,
            ) from None
        return rpc.SubmitUpdateResponse()

    async def _require(self, header: transfer_pb2.UpdateHeader) -> float | None:
        """Return the time until which an update is awaited; None if the coordinator has it.

        Raises RoundClosedError if no such update is expected, TruncatedError if the relay has fewer
        of its bytes than the host assumes.
        """
        expected = self.expected.find(header.update_id, header.client_id, header.run_id)
        here = held_bytes(self._held.path(header.update_id))
        if expected is not None and header.offset <= here:
            return expected.expires
        # Ask the coordinator: the instruction may have passed before this process started, or the
        # update was delivered after its host asked for the number of received bytes.
        located = await self._upstream.locate(
            rpc.LocateUploadRequest(
                update_id=header.update_id,
                run_id=header.run_id,
                client_id=header.client_id,
                blake3=header.blake3,
            )
        )
        if located.complete:
            return None
        if header.offset > here:
            raise TruncatedError(
                f"only {here} bytes of the update have arrived, not {header.offset}; send the "
                "rest of the update",
                received=here,
                size=header.size,
            )
        return self._clock() + GRACE_SECONDS if expected is None else expected.expires

    async def _receive(
        self,
        header: transfer_pb2.UpdateHeader,
        frames: AsyncIterator[Any],
        stack: contextlib.ExitStack,
    ) -> tuple[FileReceiver, str | None]:
        """Receive a file. Return its receiver, which `stack` closes, and the digest in the trailer.

        The digest is None if the stream ends before the file is complete.
        """
        path = self._held.path(header.update_id)
        async with self._order.receiving(header.update_id, header.blake3):
            return await self._receive_into(path, header, frames, stack)

    async def _receive_into(
        self,
        path: Path,
        header: transfer_pb2.UpdateHeader,
        frames: AsyncIterator[Any],
        stack: contextlib.ExitStack,
    ) -> tuple[FileReceiver, str | None]:
        with relay_disk(path):
            receiver = FileReceiver(
                path,
                blake3=header.blake3,
                size=header.size,
                offset=header.offset,
                maximum=self._maximum,
            )
            stack.enter_context(contextlib.closing(receiver))
            async for frame in frames:
                if not isinstance(frame, memoryview):
                    return receiver, update_trailer(frame).blake3
                receiver.write(frame)
                self._metrics.moved_behind(Direction.UP, len(frame))
        if header.until and receiver.received == header.until:
            return receiver, None
        raise TruncatedError(
            f"the upload ended without a trailer after {receiver.received} of {header.size} "
            "bytes; send the rest of the update",
            received=receiver.received,
            size=header.size,
        )

    async def _keep(
        self,
        header: transfer_pb2.UpdateHeader,
        receiver: FileReceiver,
        blake3: str,
        expires: float,
        *,
        fresh: bool,
    ) -> asyncio.Task[None]:
        """Verify a received update and put it on disk. Return the task that delivers it."""
        with relay_disk(self._held.path(header.update_id)):
            await verified(receiver, blake3)
            held = HeldUpdate(header=header, expires=expires)
            self._held.keep(held)
        return self._delivery(held, fresh=fresh)

    # Delivery ---------------------------------------------------------------------------------

    def _delivery(self, held: HeldUpdate, *, fresh: bool) -> asyncio.Task[None]:
        """Return the task that delivers an update to the coordinator; start it if there is none."""
        update_id = held.header.update_id
        task = self._deliveries.get(update_id)
        if task is None:
            task = asyncio.create_task(self._deliver(held, fresh=fresh))
            self._deliveries[update_id] = task
            task.add_done_callback(lambda done: self._delivered(update_id, done))
        return task

    async def _deliver(self, held: HeldUpdate, *, fresh: bool) -> None:
        header = held.header
        try:
            async with asyncio.timeout(max(0.0, held.expires - self._clock())):
                if header.encoding == SUM:
                    await self._sums.deliver(held, fresh=fresh)
                else:
                    path = self._held.path(header.update_id)
                    with relay_disk(path):
                        await deliver_file(self._link, header, path, fresh=fresh)
        except TimeoutError:
            self._ended(header, DeliveryOutcome.EXPIRED)
            raise RoundClosedError(
                f"the relay could not deliver update '{header.update_id[:200]}' before the "
                "deadline of the round; drop the update",
                update=header.update_id[:200],
            ) from None
        except PotluckError as error:
            log.info("coordinator refused an update", update=header.update_id, why=error.message)
            self._ended(header, DeliveryOutcome.REFUSED)
            raise for_hosts(error) from error
        self._ended(header, DeliveryOutcome.DELIVERED)

    def _ended(self, header: transfer_pb2.UpdateHeader, outcome: DeliveryOutcome) -> None:
        self._held.drop(header.update_id)
        self._metrics.delivered(outcome)

    def _delivered(self, update_id: str, task: asyncio.Task[None]) -> None:
        if self._deliveries.get(update_id) is task:
            del self._deliveries[update_id]
        if not task.cancelled():
            task.exception()  # retrieve it: asyncio logs exceptions that were never retrieved

    def _abandon(self, update_id: str) -> None:
        """Drop an update that is no longer needed, and what an open stream stores of it."""
        self._give_up(update_id)
        self._settle(update_id)

    def _give_up(self, update_id: str) -> None:
        """Drop what is held of an update, and cancel its delivery."""
        task = self._deliveries.pop(update_id, None)
        if task is not None:
            task.cancel()
        self._held.drop(update_id)

    def _settle(self, update_id: str) -> None:
        """Schedule the deletion of an update whose round is over, and of its received part.

        Its host stops sending when it learns that the round is over.
        """
        task = asyncio.create_task(self._drop_undelivered(update_id))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _drop_undelivered(self, update_id: str) -> None:
        """Drop an update once no host's stream is uploading it, unless the relay is delivering
        it."""
        async with self._order.idle(update_id):
            if update_id not in self._deliveries:
                self._held.drop(update_id)
