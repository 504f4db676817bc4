"""The connected hosts, their clients, and the pending instructions.

Used on the event loop; calls no gRPC, and reads only the clock that is passed in. An instruction is
pending until it is retired, at the latest soon after its deadline. It is sent when its client's
host is connected, and again after every reconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog

from potluck.common.errors import IdentityError
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.line_limit import limit_of_hosts

log = structlog.get_logger()

Clock = Callable[[], float]

LOOK_SECONDS = 10.0
"""Seconds between checks for instructions whose deadline has passed."""

LONGEST_TASK_NAME = 64
"""Number of characters after which a task's name is cut off."""

LARGEST_EPOCH = 1 << 53
"""Maximum version number of a host's data; the host's owner increments this number."""

_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(kw_only=True, eq=False)
class HostSession:
    """A host's connection, with what the host reported about itself."""

    host_id: str
    client_ids: tuple[str, ...]
    device: str
    tasks: frozenset[str]
    data_epoch: int = 0
    """Version number of the data of the host's clients."""
    software_version: str = ""
    """Release of Potluck on the host."""
    process_id: str = ""
    """Id of the host's process; empty if the host does not send one."""
    address: str = ""
    since: datetime = _NEVER
    last_heard: datetime = _NEVER
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the host sends a message or disconnects. The waiting code clears it."""
    certificate_expires: datetime | None = None
    membership_epoch: int = 0
    """Epoch of the newest member list that the host has, or that is being sent to it."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags that the host's owner has set, such as its site."""
    relay: str = ""
    """Relay through which the host is connected; empty if it is connected directly."""
    outbox: asyncio.Queue[coordinator_pb2.AttendResponse | None] = field(
        default_factory=asyncio.Queue
    )
    """Messages to send to the host; None ends the stream."""

    def offers(self, task: str) -> bool:
        """Return True if a task is installed on the host."""
        return task[:LONGEST_TASK_NAME] in self.tasks

    def hear(self, at: datetime) -> None:
        """Record that the host sent a message."""
        self.last_heard = at
        self.heard.set()


@dataclass(kw_only=True, eq=False)
class Pending:
    """An instruction whose result has not arrived yet."""

    instruction: coordinator_pb2.Instruction
    deadline: float
    on_answer: Callable[[coordinator_pb2.Answer], None] | None
    until_acknowledged: bool
    sent_on: HostSession | None = None
    acknowledged: bool = False
    progress: coordinator_pb2.Progress | None = None


AttendanceListener = Callable[[tuple[str, ...], bool], None]
"""Function called with the ids of clients, and with True if they connected or False if they
disconnected."""


class Attendance:
    """The connected hosts and the pending instructions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hosts: dict[str, HostSession] = {}
        self._sessions: dict[str, HostSession] = {}  # client → session of its host
        self._tags: dict[str, Mapping[str, str]] = {}  # client → last tags of its host
        self._pending: dict[str, Pending] = {}  # instruction id → instruction
        self._pending_of: dict[str, dict[str, Pending]] = {}  # client → its pending ones
        self._listeners: list[AttendanceListener] = []
        self._membership = (0, b"")  # newest member list: (epoch, document)
        self.lines = limit_of_hosts()
        """Limit on the log lines about hosts."""

    # Hosts ------------------------------------------------------------------------------------

    @property
    def host_count(self) -> int:
        """Number of connected hosts; may be read by any thread."""
        return len(self._hosts)

    @property
    def clients(self) -> tuple[str, ...]:
        """Connected clients; may be read by any thread."""
        return tuple(self._sessions)

    def host(self, host_id: str) -> HostSession | None:
        """Return the session of a host; None if it is not connected."""
        return self._hosts.get(host_id)

    def session_of(self, client_id: str) -> HostSession | None:
        """Return the session of a client's host; None if it is not connected."""
        return self._sessions.get(client_id)

    def tags_of(self, client_id: str) -> Mapping[str, str]:
        """Return the tags of a client's current or last host; empty if it never had one."""
        return self._tags.get(client_id, {})

    def listen(self, listener: AttendanceListener) -> Callable[[], None]:
        """Register a listener for clients that connect or disconnect. Call the returned function to
        unregister it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def attach(self, session: HostSession) -> None:
        """Connect a host. It replaces an older session of the same host.

        Raises IdentityError if another connected host has one of this host's clients.
        """
        for client in session.client_ids:
            other = self._sessions.get(client)
            if other is not None and other.host_id != session.host_id:
                raise IdentityError(
                    f"client '{client}' is already connected through host '{other.host_id}'; a "
                    "client must belong to one host only; remove the client from the "
                    "configuration of one host",
                    client=client,
                    host=other.host_id,
                )
        older = self._hosts.get(session.host_id)
        if older is not None:
            older.outbox.put_nowait(None)
            self._forget(older, set(older.client_ids) - set(session.client_ids))
        self._hosts[session.host_id] = session
        self._send_membership(session)  # sent first: instructions may depend on it
        for client in session.client_ids:
            self._sessions[client] = session
            self._tags[client] = session.tags
            for pending in self._pending_of.get(client, {}).values():
                self._send(pending, session)
        self._tell(session.client_ids, joined=True)

    def detach(self, session: HostSession) -> bool:
        """Record that a host's stream has ended. Return False if a newer session has already
        replaced this one."""
        if self._hosts.get(session.host_id) is not session:
            return False
        del self._hosts[session.host_id]
        session.heard.set()
        self._forget(session, set(session.client_ids))
        return True

    def spread(self, epoch: int, document: bytes) -> None:
        """Send a member list to every host that has an older one: now if the host is connected,
        else when it connects. epoch: the list's number. document: its signed text."""
        self._membership = (epoch, document)
        for session in self._hosts.values():
            self._send_membership(session)

    def _send_membership(self, session: HostSession) -> None:
        epoch, document = self._membership
        newer = session.membership_epoch > epoch > 0
        if newer and self.lines.allows(("newer membership", session.host_id)):
            log.warning(
                f"host {session.host_id} has membership epoch {session.membership_epoch}, but "
                f"the coordinator has only epoch {epoch}; send the newest member list with "
                "`potluck pki publish`"
            )
        if session.membership_epoch >= epoch:
            return
        session.membership_epoch = epoch
        membership = coordinator_pb2.Membership(document=document)
        session.outbox.put_nowait(coordinator_pb2.AttendResponse(membership=membership))

    def close(self) -> None:
        """End every host's stream, because the coordinator is shutting down."""
        for session in self._hosts.values():
            session.outbox.put_nowait(None)

    def _forget(self, session: HostSession, clients: set[str]) -> None:
        left = tuple(client for client in session.client_ids if client in clients)
        for client in left:
            self._sessions.pop(client, None)
        if left:
            self._tell(left, joined=False)

    def _tell(self, clients: tuple[str, ...], *, joined: bool) -> None:
        for listener in list(self._listeners):
            listener(clients, joined)

    # Instructions -----------------------------------------------------------------------------

    def instruct(
        self,
        instruction: coordinator_pb2.Instruction,
        *,
        deadline: float,
        on_answer: Callable[[coordinator_pb2.Answer], None] | None = None,
        until_acknowledged: bool = False,
    ) -> None:
        """Send an instruction to a client's host: now if the host is connected, else when it
        connects.

        An instruction whose id is already pending is ignored. deadline: time of the clock after
        which the instruction is retired. until_acknowledged: True if the host's acknowledgement
        retires the instruction.
        """
        if instruction.id in self._pending:
            return
        pending = Pending(
            instruction=instruction,
            deadline=deadline,
            on_answer=on_answer,
            until_acknowledged=until_acknowledged,
        )
        self._pending[instruction.id] = pending
        self._pending_of.setdefault(instruction.client_id, {})[instruction.id] = pending
        log.debug("instruction queued", id=instruction.id, monotonic=self._clock())
        session = self._sessions.get(instruction.client_id)
        if session is not None:
            self._send(pending, session)

    def pending(self, instruction_id: str) -> Pending | None:
        """Return the pending instruction with this id; None if there is none."""
        return self._pending.get(instruction_id)

    def retire(self, instruction_ids: Iterable[str], *, abandon: bool = False) -> None:
        """Stop tracking instructions. abandon: True to also instruct hosts to stop working on
        them."""
        abandoned: dict[HostSession, list[str]] = {}
        for instruction_id in instruction_ids:
            pending = self._pending.pop(instruction_id, None)
            if pending is None:
                continue
            client = pending.instruction.client_id
            self._pending_of[client].pop(instruction_id)
            if not self._pending_of[client]:
                del self._pending_of[client]
            session = self._sessions.get(client)
            if abandon and session is not None and pending.sent_on is session:
                abandoned.setdefault(session, []).append(instruction_id)
        for session, ids in abandoned.items():
            work = coordinator_pb2.Abandon(instruction_ids=ids)
            instruction = coordinator_pb2.Instruction(id=f"abandon/{ids[0]}", abandon=work)
            session.outbox.put_nowait(coordinator_pb2.AttendResponse(instruction=instruction))

    async def watch_deadlines(self) -> None:
        """Retire instructions whose deadlines have passed, because their hosts may never reconnect.
        Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            over = [key for key, pending in self._pending.items() if pending.deadline < now]
            self.retire(over, abandon=True)

    def _send(self, pending: Pending, session: HostSession) -> None:
        if pending.sent_on is session:
            return
        pending.sent_on = session
        pending.acknowledged = False
        message = coordinator_pb2.AttendResponse(instruction=pending.instruction)
        left = max(0.0, pending.deadline - self._clock())
        message.instruction.time_left.FromNanoseconds(int(left * 1e9))
        session.outbox.put_nowait(message)

    # What hosts say ---------------------------------------------------------------------------

    def acknowledge(self, session: HostSession, instruction_id: str) -> None:
        """Record that a host has received an instruction."""
        pending = self._of(session, instruction_id)
        if pending is not None:
            pending.acknowledged = True
            if pending.until_acknowledged:
                self.retire([instruction_id])

    def report(self, session: HostSession, progress: coordinator_pb2.Progress) -> None:
        """Record a host's progress with an instruction."""
        pending = self._of(session, progress.instruction_id)
        if pending is not None:
            pending.progress = progress

    def answer(self, session: HostSession, answer: coordinator_pb2.Answer) -> None:
        """Pass a host's answer to the `on_answer` of its instruction; ignore the answer if the
        instruction is not pending."""
        pending = self._of(session, answer.instruction_id)
        if pending is not None and pending.on_answer is not None:
            pending.on_answer(answer)

    def _of(self, session: HostSession, instruction_id: str) -> Pending | None:
        """Return the pending instruction with this id; None if there is none, or if it is not for a
        client of this host."""
        pending = self._pending.get(instruction_id)
        if pending is None or pending.instruction.client_id not in session.client_ids:
            return None
        return pending
