"""Groups of trainings of one attempt that run in one batched step.

The coordinator lists the instructions that belong together (`Train.companions`). If a host trains n
clients side by side, the companions are split, in their order, into n groups. A group begins when
all members that can join have joined, or after `JOIN_TIMEOUT_SECONDS`, without the missing ones. A
member's result does not depend on which other members are present. Runs on the event loop; the
training itself runs in a worker's thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from potluck.client.base.worker import Worker
from potluck.client.disclosure.weightings import is_masked
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.instruction_log import REMEMBERED, InstructionLog
from potluck.client.training.plugin_options import json_object
from potluck.client.training.task_training import GroupMember, TrainingFiles, UnfitForLanesError
from potluck.common.errors import ProtocolError, RoundClosedError
from potluck.common.learning.task_failures import blamed_on_task
from potluck.common.names import ClientId
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports torch, which takes seconds: only the worker's thread may do so
    from potluck.client.training.local_update import Trained
    from potluck.client.training.processes.training_seat import TrainingSeat

log = structlog.get_logger()

JOIN_TIMEOUT_SECONDS = 1.0
"""Maximum seconds that a group waits for members whose instructions have not arrived."""
LARGEST_GROUP = 1024
_LOOK_SECONDS = 0.02
_KINDS_REMEMBERED = 64


@dataclass(kw_only=True, eq=False)
class _Waiting:
    """A member that waits for its group."""

    active: ActiveInstruction
    files: TrainingFiles
    trained: asyncio.Future[Trained]


@dataclass(kw_only=True, eq=False)
class _Gathering:
    """Trainings that will run together, by instruction id."""

    companions: Sequence[str]
    members: dict[str, _Waiting] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class TrainingGroups:
    """The groups of this host that have not begun yet."""

    def __init__(self, worker: Worker[TrainingSeat], instructions: InstructionLog) -> None:
        self._worker, self._log = worker, instructions
        self._groups: dict[tuple[str, ...], _Gathering] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unfit: OrderedDict[tuple[bytes, str], str] = OrderedDict()
        self._alone: OrderedDict[str, str] = OrderedDict()

    def wanted(self, instruction: rpc.Instruction) -> bool:
        """Return True if a training should run in a group, unless the group later proves unfit."""
        work = instruction.train
        if not work.companions or _kind(work) in self._unfit:
            return False
        if not json_object(work.training_json, "training_json").get("batched"):
            return False
        reason = reason_alone(work) or self._reason_of_group(instruction)
        if reason:
            self._alone[instruction.id] = reason
            while len(self._alone) > REMEMBERED:
                self._alone.popitem(last=False)
            log.info("a client is trained alone", id=instruction.id, reason=reason)
        return not reason

    def _reason_of_group(self, instruction: rpc.Instruction) -> str:
        companions = instruction.train.companions
        if instruction.id not in companions:
            return ""  # `train` raises the error
        part = part_of(companions, instruction.id, self._worker.seats)
        return "each client has a worker of its own" if len(part) == 1 else ""

    async def train(self, active: ActiveInstruction, files: TrainingFiles) -> Trained:
        """Train a client together with its companions.

        Raises UnfitForLanesError if that can't be done, ProtocolError for invalid companions, and
        what `TrainingDevice.train` raises.
        """
        work, mine = active.instruction.train, active.instruction.id
        check_companions(active.instruction)
        companions = part_of(work.companions, mine, self._worker.seats)
        group = self._groups.get(companions)
        if group is None:
            group = self._groups[companions] = _Gathering(companions=companions)
            task = asyncio.create_task(self._carry_out(group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        waiting = _Waiting(
            active=active, files=files, trained=asyncio.get_running_loop().create_future()
        )
        group.members[mine] = waiting
        group.arrived.set()
        return await waiting.trained

    def _note_unfit(self, work: rpc.Train, reason: str) -> None:
        """Remember that trainings of this kind must run one by one."""
        kind = _kind(work)
        if kind not in self._unfit:
            log.info("clients are trained one by one", task=work.task.name, reason=reason)
        self._unfit[kind] = reason
        while len(self._unfit) > _KINDS_REMEMBERED:
            self._unfit.popitem(last=False)

    async def _carry_out(self, group: _Gathering) -> None:
        """Train all members that join in time, and set each member's result."""
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_SECONDS):
                while not self._complete(group):
                    group.arrived.clear()
                    try:
                        await asyncio.wait_for(group.arrived.wait(), _LOOK_SECONDS)
                    except TimeoutError:
                        continue
        except TimeoutError:
            log.debug("batched step starts without some of its clients", members=len(group.members))
        finally:
            del self._groups[tuple(group.companions)]
        waiting = [each for each in group.members.values() if not each.trained.done()]
        if not waiting:
            return
        try:
            results = await self._worker.run(lambda seat: _train(seat, group, waiting))
        except Exception as error:
            if isinstance(error, UnfitForLanesError):
                self._note_unfit(waiting[0].active.instruction.train, str(error))
            results = {each.active.instruction.id: error for each in waiting}
        for each in waiting:
            result = results[each.active.instruction.id]
            if each.trained.done():
                _forget(each, result)
            elif isinstance(result, Exception):
                each.trained.set_exception(result)
            else:
                each.trained.set_result(result)

    def _complete(self, group: _Gathering) -> bool:
        """Return True if no companion can still join: each has joined, trains alone or is over."""
        return all(
            name in group.members or name in self._alone or self._log.is_over(name)
            for name in group.companions
        )


def _train(
    seat: TrainingSeat, group: _Gathering, waiting: Sequence[_Waiting]
) -> dict[str, Trained | Exception]:
    """Train the waiting members, in a worker's thread; return results by instruction id."""
    results: dict[str, Trained | Exception] = {}
    members: list[GroupMember] = []
    for each in waiting:
        instruction = each.active.instruction
        try:
            each.active.started()
        except RoundClosedError as error:
            results[instruction.id] = error
            continue
        progress = TrainingProgress(each.active.progress, each.active.cancelled.is_set)
        lane = list(group.companions).index(instruction.id)
        members.append(
            GroupMember(instruction=instruction, files=each.files, progress=progress, lane=lane)
        )
    if not members:
        return results
    first = members[0].instruction
    with blamed_on_task(
        first.train.task.name, f"client '{first.client_id}' and the clients trained with it"
    ):
        trained = seat.train_together(members, clients_of(first, group.companions))
    names = [member.instruction.id for member in members]
    alone = [
        (name, result)
        for name, result in zip(names, trained, strict=True)
        if isinstance(result, UnfitForLanesError)
    ]
    for name, result in alone:
        log.info("a client is trained alone", id=name, reason=str(result))
    log.info("trained in one batched step", round=first.round, clients=len(members) - len(alone))
    return results | dict(zip(names, trained, strict=True))


def _forget(waiting: _Waiting, result: Trained | Exception) -> None:
    """Delete the update file of a member that was cancelled: no record will name it."""
    if not isinstance(result, Exception):
        waiting.files.update.unlink(missing_ok=True)


def reason_alone(work: rpc.Train) -> str:
    """Return why a client must be trained alone, whatever the network; empty if it need not be.

    The reason depends only on the client's own instruction, not on other clients.
    """
    reasons = {
        "the client's update is masked": is_masked(work),
        "the strategy corrects the client's steps": work.HasField("auxiliary"),
        "the number of the client's samples is limited": bool(work.quotas),
        "the client has a model of its own": work.HasField("personal"),
        "the client's training has noise": work.HasField("privacy"),
        "only a part of the network is trained": work.HasField("part"),
        "the run requests reports about the client's training": bool(work.reports),
    }
    return next((reason for reason, so in reasons.items() if so), "")


def check_companions(instruction: rpc.Instruction) -> None:
    """Raise ProtocolError unless the companions are different trainings of one attempt, this one
    among them."""
    companions, client = instruction.train.companions, instruction.client_id
    attempt = instruction.id.removesuffix(client)
    sound = (
        len(companions) <= LARGEST_GROUP
        and len(set(companions)) == len(companions)
        and instruction.id in companions
        and instruction.id.endswith(client)
        # The ids are sorted: if the first and the last have the prefix, all have it.
        and min(companions).startswith(attempt)
        and max(companions).startswith(attempt)
    )
    if not sound:
        raise ProtocolError(
            "the coordinator sent an invalid list of trainings for a batched step; install the "
            "same release on the host and the coordinator"
        )


def part_of(companions: Sequence[str], mine: str, seats: int) -> tuple[str, ...]:
    """Return the part of the companions that contains the instruction id `mine`.

    The companions are cut, in order, into at most `seats` parts of nearly equal size; `seats` is
    the number of trainings that run side by side."""
    count, place = len(companions), list(companions).index(mine)
    parts = max(1, min(seats, count))
    bounds = [part * count // parts for part in range(parts + 1)]
    begin = max(bound for bound in bounds if bound <= place)
    return tuple(companions[begin : min(bound for bound in bounds if bound > place)])


def clients_of(instruction: rpc.Instruction, companions: Sequence[str]) -> list[ClientId]:
    """Return the clients of `companions`, in the same order."""
    attempt = instruction.id.removesuffix(instruction.client_id)
    return [ClientId(each.removeprefix(attempt)) for each in companions]


def _kind(work: rpc.Train) -> tuple[bytes, str]:
    """Return the parts of a training that decide whether clients can be trained together."""
    objectives = (work.objective, *work.further_objectives)
    content = b"".join(each.SerializeToString(deterministic=True) for each in objectives)
    return work.task.SerializeToString(deterministic=True) + content, work.training_json
