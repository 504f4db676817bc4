"""The instructions that this host has received, with the stage of each.

Pure: no asyncio, grpc or clock. The coordinator sends an instruction again after every reconnect
until it is carried out, always under the same id. The log records whether an id is new, in progress
or finished, so that every piece of work is done once.

    QUEUED → DOWNLOADING → QUEUED → COMPUTING → UPLOADING → FINISHED
       └──────────┴───────────┴─────────┴───────────┴─────→ DROPPED

A dropped instruction starts again when the coordinator sends it again. So does an id that arrives
with other work, from a coordinator that was restored from a backup. If the order to abandon an
instruction arrives before the instruction, the latter is refused once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from potluck.common.errors import NotFoundError
from potluck.common.tensors.digest import digest_of
from potluck.rpc.v1 import coordinator_pb2 as rpc

REMEMBERED = 10_000
"""Number of finished instructions whose ids are remembered.

The coordinator repeats only the latest few.
"""


class InstructionStage(StrEnum):
    """Stage of an instruction; the module's docstring shows their order."""

    QUEUED = "queued"
    DOWNLOADING = "downloading"
    COMPUTING = "computing"
    UPLOADING = "uploading"
    FINISHED = "finished"
    DROPPED = "dropped"
    OVERTAKEN = "overtaken"
    """The order to abandon the instruction arrived before the instruction."""

    @property
    def over(self) -> bool:
        """True if no more work will be done on the instruction."""
        return self in _OVER


_OVER = (InstructionStage.FINISHED, InstructionStage.DROPPED, InstructionStage.OVERTAKEN)
_STAGES = {
    InstructionStage.QUEUED: rpc.Progress.STAGE_QUEUED,
    InstructionStage.DOWNLOADING: rpc.Progress.STAGE_DOWNLOADING,
    InstructionStage.COMPUTING: rpc.Progress.STAGE_COMPUTING,
    InstructionStage.UPLOADING: rpc.Progress.STAGE_UPLOADING,
}


class Reception(StrEnum):
    """How to treat an instruction that has just arrived."""

    BEGIN = "begin"
    """The instruction is new or has been dropped: start it, and stop any earlier work under its id.
    """
    GOES_ON = "goes on"
    """Work on the instruction is in progress."""
    REPEAT = "repeat"
    """The work is finished: send its answer, or deliver its update, again."""
    REFUSE = "refuse"
    """The instruction was abandoned before it arrived; answer with that failure."""


def ignored(_: InstructionStage) -> None:
    """Ignore a change of stage."""


@dataclass(kw_only=True)
class Entry:
    """One instruction. `fraction`: share of the computation that is done, in [0, 1].

    `trains`: True if the instruction asks for an update. `work`: digest, see `digest_of_work`.
    `answer`: the answer that was sent at the end; None if an update was delivered instead.
    """

    id: str
    client_id: str
    run_id: str
    round: int
    trains: bool
    work: str = ""
    stage: InstructionStage = InstructionStage.QUEUED
    fraction: float = 0.0
    answer: rpc.Answer | None = None
    listener: Callable[[InstructionStage], None] = ignored
    """Function that is called, in any thread, when the instruction enters a stage."""

    @property
    def lacked_a_file(self) -> bool:
        """True if the work failed because the coordinator did not have a file.

        A coordinator that was restored from a backup may make the file again, and then sends the
        instruction again."""
        return self.answer is not None and self.answer.failure.reason == NotFoundError.reason

    def enter(self, stage: InstructionStage) -> None:
        """Set the stage and call the listener."""
        self.stage = stage
        self.listener(stage)


@dataclass
class InstructionLog:
    """All received instructions, oldest first.

    Not thread-safe, except that another thread may set `Entry.fraction`."""

    remembered: int = REMEMBERED
    coordinator_id: str = ""
    """Id of the coordinator process that is connected."""
    _entries: dict[str, Entry] = field(default_factory=dict)
    _trainings: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Ids of the entries that train, by run and client.

    Each round is settled client by client. Without this index, searching all entries took a fifth
    of a host's time."""

    def receive(self, instruction: rpc.Instruction) -> Reception:
        """Record that an instruction has arrived, and return how to treat it."""
        entry, work = self._entries.get(instruction.id), digest_of_work(instruction)
        if entry is not None and entry.stage is InstructionStage.OVERTAKEN:
            entry.stage = InstructionStage.DROPPED
            return Reception.REFUSE
        if entry is not None and entry.lacked_a_file:
            entry.stage = InstructionStage.DROPPED
        if entry is not None and entry.stage is not InstructionStage.DROPPED and entry.work == work:
            return (
                Reception.REPEAT if entry.stage is InstructionStage.FINISHED else Reception.GOES_ON
            )
        if entry is not None:
            self._forget(instruction.id)  # add it again below, as the newest
        self._enter(
            Entry(
                id=instruction.id,
                client_id=instruction.client_id,
                run_id=instruction.run_id,
                round=instruction.round,
                trains=instruction.HasField("train"),
                work=work,
            )
        )
        return Reception.BEGIN

    def entry(self, instruction_id: str) -> Entry:
        """Return the entry of an instruction that has been received. Raises KeyError."""
        return self._entries[instruction_id]

    def find(self, instruction_id: str) -> Entry | None:
        """Return the entry of an instruction; None if it is unknown or no longer kept."""
        return self._entries.get(instruction_id)

    def is_over(self, instruction_id: str) -> bool:
        """Return True if an instruction has arrived and its work has ended."""
        entry = self._entries.get(instruction_id)
        return entry is not None and entry.stage.over

    def move(self, instruction_id: str, stage: InstructionStage) -> bool:
        """Set an instruction's stage; return False if it has been dropped meanwhile."""
        entry = self._entries.get(instruction_id)
        if entry is None or entry.stage in (InstructionStage.DROPPED, InstructionStage.OVERTAKEN):
            return False
        entry.enter(stage)
        return True

    def finish(self, instruction_id: str, answer: rpc.Answer | None) -> bool:
        """Store the outcome of an instruction; return False if it has been dropped meanwhile."""
        if not self.move(instruction_id, InstructionStage.FINISHED):
            return False
        self._entries[instruction_id].answer = answer
        self._shrink()
        return True

    def abandon(self, instruction_ids: Iterable[str]) -> list[str]:
        """Drop instructions; return the ids of those that were in progress.

        An instruction that has not arrived may still arrive: it is recorded as overtaken.
        """
        stopped: list[str] = []
        for instruction_id in instruction_ids:
            entry = self._entries.get(instruction_id)
            if entry is None:
                entry = Entry(id=instruction_id, client_id="", run_id="", round=0, trains=False)
                entry.stage = InstructionStage.OVERTAKEN
                self._entries[instruction_id] = entry
                continue
            if not entry.stage.over:
                stopped.append(instruction_id)
            if entry.stage is not InstructionStage.OVERTAKEN:
                entry.stage, entry.answer = InstructionStage.DROPPED, None
        self._shrink()
        return stopped

    def coordinator_is(self, coordinator_id: str) -> None:
        """Record that another coordinator process is connected. Forgets overtaken ids, as only the
        previous process used them.
        """
        self.coordinator_id = coordinator_id
        for entry in list(self._entries.values()):
            if entry.stage is InstructionStage.OVERTAKEN:
                self._forget(entry.id)

    def settle(self, *, run_id: str, client_id: str, round: int) -> list[str]:  # noqa: A002  # the wire names it so
        """Drop a client's trainings for a round that is now over, and for earlier rounds.

        Returns the ids of those that were in progress.
        """
        entries = [self._entries[each] for each in self._trainings.get((run_id, client_id), ())]
        return self.abandon(
            [
                entry.id
                for entry in entries
                if entry.stage is not InstructionStage.DROPPED and entry.round <= round
            ]
        )

    def under_way(self) -> list[Entry]:
        """Return the instructions that are not over, oldest first."""
        return [entry for entry in self._entries.values() if not entry.stage.over]

    def progress(self) -> list[rpc.Progress]:
        """Return the progress of all instructions in progress, for a heartbeat."""
        return [
            rpc.Progress(
                instruction_id=entry.id,
                stage=_STAGES[entry.stage],
                fraction=min(max(entry.fraction, 0.0), 1.0),
            )
            for entry in self.under_way()
        ]

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.id] = entry
        if entry.trains:
            self._trainings.setdefault((entry.run_id, entry.client_id), []).append(entry.id)
        self._shrink()

    def _forget(self, instruction_id: str) -> None:
        entry = self._entries.pop(instruction_id)
        if entry.trains:
            whose = (entry.run_id, entry.client_id)
            self._trainings[whose].remove(instruction_id)
            if not self._trainings[whose]:
                del self._trainings[whose]

    def _shrink(self) -> None:
        excess = len(self._entries) - self.remembered
        if excess > 0:
            over = (entry.id for entry in self._entries.values() if entry.stage.over)
            for instruction_id in list(islice(over, excess)):
                self._forget(instruction_id)


def digest_of_training(instruction: rpc.Instruction) -> str:
    """Return a training's `digest_of_work`, which excludes a question before the upload."""
    training = rpc.Instruction()
    training.CopyFrom(instruction)
    training.train.ClearField("before_upload")
    return digest_of_work(training)


def digest_of_work(instruction: rpc.Instruction) -> str:
    """Return the digest that distinguishes this work from other work under the same id.

    It does not cover the time left, the formats in which models are available, the companions, and
    the parent span.
    """
    work = rpc.Instruction()
    work.CopyFrom(instruction)
    work.ClearField("time_left")
    work.ClearField("trace_parent")
    kind = work.WhichOneof("work")
    if kind in ("train", "evaluate", "disclose", "question"):
        getattr(work, kind).model.ClearField("renditions")
    if kind == "train":
        work.train.ClearField("companions")
    if kind == "train" and work.train.HasField("auxiliary"):
        work.train.auxiliary.shared.ClearField("renditions")
        work.train.auxiliary.personal.ClearField("renditions")
    return digest_of(work.SerializeToString(deterministic=True))
