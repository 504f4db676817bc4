"""Rounds in which hosts add up their clients' updates: every upload is a sum of one or more
updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from potluck.common.errors import LayoutError, RunError
from potluck.common.interruptible import in_thread
from potluck.common.monitoring.metric_labels import SUM as SUM_LABEL
from potluck.common.updates.fixed_point import (
    FixedPointTerms,
    members_digest,
    normalizer_of,
    read_words,
)
from potluck.common.updates.sum_files import (
    AUXILIARY,
    BODY,
    SumFile,
    add,
    opened_sum_file,
    vectors_of,
)
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import transfer_pb2
from potluck.server.hosts.instructions import SUM
from potluck.server.live.models import RoundModel
from potluck.server.live.run import Run
from potluck.server.machine import events as rounds
from potluck.server.plan.cohort_limits import counted
from potluck.server.plan.path_rules import fixed_point_terms
from potluck.server.reduce.move_by_sum import BlockReader
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.strategy import Summation
from potluck.server.updates.report_checks import check_said, report_said
from potluck.server.updates.update_path import ReceivedUpdate, UpdatePath

# The sum of the sums ------------------------------------------------------------------------------
# Integer addition is exact, so the model has the same bits for any grouping of clients into sums,
# and any order of arrival.


@dataclass(frozen=True, kw_only=True)
class SummedTotal:
    """The total of all hosts' sums of updates, read from the open files of these sums; see
    `Total`."""

    files: Sequence[SumFile]
    terms: FixedPointTerms
    weight: float
    loss: float
    normalizer: float

    def mean(self) -> BlockReader:
        """Return a reader of the weighted mean difference from the model."""
        return self._reader(BODY, self.terms.scale(round(self.weight)))

    def sum(self, auxiliary: str) -> BlockReader:
        """Return a reader of an auxiliary's unweighted sum."""
        return self._reader(f"{AUXILIARY}{auxiliary}", self.terms.quantum)

    def _reader(self, vector: str, scale: float) -> BlockReader:
        read = add([file.reader(vector) for file in self.files])
        return lambda begin, end: read_words(read(begin, end), scale)


@contextmanager
def opened_total(
    updates: Sequence[SpooledUpdate],
    update_ids: Sequence[str],
    vectors: Mapping[str, int],
    terms: FixedPointTerms,
    *,
    normalized: bool,
) -> Iterator[SummedTotal]:
    """Open the files of the hosts' sums, and yield their total; close the files at the end of the
    block.

    updates: the updates in the sums, in client order. update_ids: their ids. vectors: sizes of the
    vectors in the run's updates, by name. normalized: True if each client's difference is divided
    by its normalizer. Raises RunError unless the sums contain exactly these updates; LayoutError,
    StorageError.
    """
    members: dict[Path, list[str]] = {}
    for update, update_id in zip(updates, update_ids, strict=True):
        members.setdefault(update.path, []).append(update_id)
    weights = [terms.weight(update.row.samples) for update in updates]

    def mean(numbers: Sequence[float]) -> float:
        return math.fsum(map(math.prod, zip(weights, numbers, strict=True))) / sum(weights)

    with contextlib.ExitStack() as stack:
        files: list[SumFile] = []
        for path, ids in members.items():
            file = stack.enter_context(opened_sum_file(path, vectors))
            if file.members != members_digest(ids):
                raise RunError(
                    f"the sum {path.name} contains other updates than the updates of the round"
                )
            files.append(file)
        yield SummedTotal(
            files=files,
            terms=terms,
            weight=float(sum(weights)),
            loss=mean([math.nan if (loss := each.row.loss) is None else loss for each in updates]),
            normalizer=mean([normalizer_of(each.row) for each in updates]) if normalized else 1.0,
        )


# Rounds -------------------------------------------------------------------------------------------


class SummedRounds(UpdatePath):
    """Handles rounds with sums. The coordinator sees each client's report, but not its update."""

    encoding = SUM_LABEL

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._terms = fixed_point_terms(run.plan.run_file, run.plan.strategy)

    def check_header(self, header: transfer_pb2.UpdateHeader) -> None:
        """Check an announced sum: its form, its members and each member's report. Raises
        LayoutError."""
        if (
            header.encoding != SUM
            or not header.delta
            or header.compressed
            or header.HasField("report")
        ):
            raise LayoutError(
                "this run needs sums of updates, but the announced update has another format; "
                "install the same release on the host and the coordinator"
            )
        members = header.members
        first = (header.client_id, header.update_id)
        if not members or (members[0].client_id, members[0].update_id) != first:
            raise LayoutError("a sum must name its members, and have the id of the first member")
        if len({each.client_id for each in members}) != len(members):
            raise LayoutError("a sum names a client twice; name each client at most once")
        for each in members:
            check_said(self._run.plan, self._run.attempt, each.client_id, each.report)

    async def check_file(self, update: ReceivedUpdate) -> None:
        """Check that the file is a sum, and that its values are possible for its members."""
        ids = [each.update_id for each in update.header.members]

        def check() -> None:
            with opened_sum_file(update.path, self._vectors) as file:
                file.check(members_digest(ids), len(ids))

        await asyncio.to_thread(check)

    def report(self, member: transfer_pb2.SumMember) -> UpdateReport:
        """Return the report of one member. Numbers for the selector are kept only if they are
        finite."""
        return report_said(self._run.plan, member.report)

    async def reduce(self, updates: Sequence[SpooledUpdate]) -> RoundModel | None:
        """Compute the round's model from the sums that contain these updates."""
        run = self._run
        excess = self._too_heavy(updates)
        if excess:
            why = (
                "clients have more samples than sample_limits allows, and their updates are in "
                "sums with other updates"
            )
            run.post(rounds.SumFailed(*run.key[1:], why, tuple(excess.items())))
            return None
        total = opened_total(
            updates,
            [run.instruction_id(update.client) for update in updates],
            self._vectors,
            self._terms,
            normalized=run.plan.strategy.summation is Summation.NORMALIZED,
        )
        model, strategy_state, _ = await in_thread(
            run.models.work.next_model_by_sum,
            run.machine.round,
            [update.client for update in updates],
            total,
            run.models.current,
            run.models.states.strategy,
            clients=len(run.roster),
        )
        return RoundModel(model=model, strategy_state=strategy_state)

    @property
    def _vectors(self) -> Mapping[str, int]:
        return vectors_of(
            self._run.models.work.layout.parameters, self._run.plan.strategy.auxiliary
        )

    def _too_heavy(self, updates: Sequence[SpooledUpdate]) -> Mapping[str, str]:
        """Return the clients with more samples than the run's limits allow, each with an error
        message.

        The coordinator can lower the weight of a single update, but not of an update within a sum.
        """
        weights = np.array([self._terms.weight(each.row.samples) for each in updates], np.int64)
        limits = self._run.plan.run_file.sample_limits
        allowed = counted(weights, limits)
        return {
            update.client: f"the client's weight is {weight} samples, but sample_limits "
            f"allows {most}; set sample_limits.maximum, which hosts apply, or raise "
            "maximum_multiple"
            for update, weight, most in zip(updates, weights, allowed, strict=True)
            if weight > most
        }
