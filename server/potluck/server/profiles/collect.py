"""The profile phase of a run: asks clients once for the profiles that its selector needs.

Used on the event loop. A profile is stored before it is used. A stored profile, from this or an
earlier run, is reused if its parameters are those of this run. So no client discloses the same
profile twice, even if the coordinator is killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from potluck.common.disclosure import (
    LABEL_COUNTS,
    parse_parameters,
)
from potluck.common.errors import (
    DisclosureRefusedError,
    IdentityError,
    ProtocolError,
    is_permanent,
)
from potluck.common.monitoring.metric_labels import ProfileOutcome
from potluck.common.run_file.run_settings import SampleLimits
from potluck.common.signal import Floats
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.attendance import LARGEST_EPOCH, Attendance
from potluck.server.hosts.gather import gather
from potluck.server.hosts.instructions import model_reference, task_plugin
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.cohort_limits import counted
from potluck.server.plan.plan import RunPlan
from potluck.server.profiles.profile_reader import ProfileReader
from potluck.server.profiles.trust import Trust
from potluck.server.selection import Population, by_field
from potluck.server.store import Store
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import Participation, Profile
from potluck.server.store.store_thread import InStore

log = structlog.get_logger()


_ASKED_BY_NAME = 500
"""Maximum number of clients that a database query lists by id; for more, it reads all clients of
the run."""


@dataclass(kw_only=True)
class Collected:
    """The clients without a profile after a request for profiles, grouped by cause.

    unable: clients that can't take part in the run, each with the reason. refused: clients that
    declined, each with the reason. silent: clients that did not answer in time.
    """

    unable: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Held:
    """A stored profile's numbers. Among several profiles of a client, the one with the newest data
    epoch is used, then the one received last."""

    data_epoch: int
    received_at: datetime
    numbers: Floats
    noise_rate: float
    epsilon: float

    def before(self, other: _Held) -> bool:
        return (self.data_epoch, self.received_at) < (other.data_epoch, other.received_at)


class Profiling:
    """The profiles that a run's clients have disclosed, as columns of its `Population`."""

    def __init__(
        self,
        run_id: str,
        plan: RunPlan,
        roster: RunRoster,
        attendance: Attendance,
        in_store: InStore,
        trust: Trust,
    ) -> None:
        self._reader = ProfileReader(plan)
        self.needs = self._reader.needs
        self.by_cell = self._reader.by_cell
        """True if label counts are summed over groups of clients (cells)."""
        self._run_id = run_id
        self._plan = plan
        self.roster = roster
        self._attendance = attendance
        self._in_store = in_store
        self._trust = trust
        self._model: ModelVersion | None = None
        self._held: dict[str, dict[str, _Held]] = {}  # client → signal → profile in use
        self._columns = {
            signal: np.empty((0, *self._reader.shape(signal))) for signal in self.needs
        }
        self._changed = False
        self.observe: Callable[[str, ProfileOutcome, int], None] = lambda *_: None
        """Function called with a signal, an outcome and the number of clients with this outcome."""
        self.largest_epsilon: float | None = None
        """The largest privacy loss of a client: the sum of ε over its profiles in use; None without
        profiles."""

    @property
    def needs_model(self) -> bool:
        """True if clients need a pre-trained model to compute a profile."""
        return any(map(self._reader.needs_model, self.needs))

    @property
    def model(self) -> ModelVersion | None:
        """The pre-trained model."""
        return self._model

    def use_model(self, model: ModelVersion) -> None:
        """Set the model with which triplets are estimated. Call this before other methods."""
        self._model = model
        self._reader.model = model.blake3

    # Columns ----------------------------------------------------------------------------------

    async def admit(self, clients: Sequence[str]) -> None:
        """Read the stored profiles of clients that joined the roster."""
        wanted = set(clients)
        stored: list[Profile] = []
        for signal in self.needs:
            some = clients if len(clients) <= _ASKED_BY_NAME else None
            found = await self._in_store(
                partial(_profiles_of, signal=signal, run_id=self._run_id, clients=some)
            )
            stored += [profile for profile in found if profile.client_id in wanted]
        for profile in stored:
            try:
                self._hold(profile, self._reader.read(profile))
            except ProtocolError as error:  # skip a profile with other parameters than this run's
                log.debug("stored profile does not match the run", why=error.message)

    def population(
        self,
        *,
        limits: SampleLimits | None = None,
        label_totals: Floats | None = None,
        cell_counts: Mapping[str, Floats] | None = None,
    ) -> Population:
        """Return the roster with the profiles that its clients have disclosed.

        limits: limits on the number of samples by which a client is weighted, for selectors; None
        for the disclosed numbers, for audits. label_totals: label counts summed over all clients.
        cell_counts: mean label counts of each client's cell, which replace its own if label counts
        are summed by cell.
        """
        columns = {signal: self._column(signal) for signal in self.needs}
        if self.by_cell and cell_counts is not None:
            unknown = np.full(self._plan.task.classes, np.nan)
            rows = [cell_counts.get(client, unknown) for client in self.roster]
            columns[LABEL_COUNTS] = np.array(rows).reshape(len(rows), len(unknown))
        return Population(
            ids=tuple(self.roster.ids),  # a copy: clients may join meanwhile
            classes=self._plan.task.classes,
            samples=self.samples(limits),
            label_totals=label_totals,
            **by_field(columns),
        )

    def samples(self, limits: SampleLimits | None) -> NDArray[np.int64]:
        """Return the number of samples of each row of the roster, as in `population`."""
        samples = self.roster.samples()
        if limits is not None:
            known = samples > 0
            samples[known] = counted(samples[known], limits)
        return samples

    def _column(self, signal: str) -> Floats:
        """Return a signal's numbers, one row per client; NaN for clients that have not disclosed
        it."""
        column = self._columns[signal]
        joined = len(self.roster) - len(column)
        if joined:
            new = np.full((joined, *self._reader.shape(signal)), np.nan)
            column = self._columns[signal] = np.concatenate([column, new])
        return column

    def noise_rates(self, signal: str) -> Mapping[str, float]:
        """Return ε / Δ₁ (Δ₁: L1 sensitivity) of the noise in each client's profile of this signal;
        infinite without noise."""
        return {
            client: held[signal].noise_rate for client, held in self._held.items() if signal in held
        }

    def lacks(self, client: str) -> list[str]:
        """Return the needed signals that a client has not disclosed for its current data."""
        return [signal for signal in self.needs if self._lacks(client, signal)]

    def _lacks(self, client: str, signal: str) -> bool:
        held = self._held.get(client)
        if held is None or signal not in held:
            return True
        session = self._attendance.session_of(client)
        return session is not None and session.data_epoch != held[signal].data_epoch

    def _hold(self, profile: Profile, numbers: Floats, *, present: bool = False) -> None:
        """Replace the client's profile in use by this one if it is newer.

        present: True if the profile is known to be of the client's current data; it is then always
        used.
        """
        parameters = parse_parameters(profile.parameters_json)
        held = _Held(
            profile.data_epoch,
            profile.received_at,
            numbers,
            parameters.noise_rate,
            parameters.epsilon or 0.0,
        )
        mine = self._held.setdefault(profile.client_id, {})
        before = mine.get(profile.signal)
        if before is None or present or before.before(held):
            mine[profile.signal] = held
            self._column(profile.signal)[self.roster.row(profile.client_id)] = numbers
            self._changed = True
            spent = sum(each.epsilon for each in mine.values())
            self.largest_epsilon = max(self.largest_epsilon or 0.0, spent)

    def changed_since_last_asked(self) -> bool:
        """Return True if profiles in use have changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    # Asking -----------------------------------------------------------------------------------

    async def collect(
        self, clients: Sequence[str], *, tag: str, present: Callable[[str], bool]
    ) -> Collected:
        """Ask clients for missing profiles; wait for the answers of clients for which `present` is
        True.

        tag: text that makes the ids of the instructions unique within the run.
        """
        collected = Collected()
        for signal in self.needs:
            lacking = [client for client in clients if self._lacks(client, signal)]
            if lacking:
                log.info("asking for profiles", run=self._run_id, signal=signal, asked=len(lacking))
            answers = await gather(
                self._attendance,
                [self._instruction(client, signal, tag) for client in lacking],
                seconds=self._plan.run_file.profiles.deadline_seconds,
                present=present,
            )
            outcomes = Counter({ProfileOutcome.SILENT: len(lacking) - len(answers)})
            for client, answer in answers.items():
                why = await self._take_or_explain(client, signal, answer)
                outcomes[ProfileOutcome.REFUSED if why else ProfileOutcome.RECEIVED] += 1
                if why:
                    log.warning("no profile", client=client, signal=signal, why=why)
                    unable = is_unable(answer)
                    (collected.unable if unable else collected.refused).setdefault(client, why)
            collected.silent.update(set(lacking) - answers.keys())
            for outcome, count in outcomes.items():
                self.observe(signal, outcome, count)
        return collected

    async def _take_or_explain(
        self, client: str, signal: str, answer: coordinator_pb2.Answer
    ) -> str:
        """Store the profile in an answer and return an empty text. If the answer has no valid
        profile, return the reason."""
        if answer.WhichOneof("outcome") == "failure":
            return f"{answer.failure.message[:500]} ({answer.failure.reason[:80]})"
        try:
            await self._take(client, signal, answer)
        except (ProtocolError, IdentityError) as error:
            return f"{error.message} ({error.reason})"
        return ""

    def _instruction(self, client: str, signal: str, tag: str) -> coordinator_pb2.Instruction:
        disclose = coordinator_pb2.Disclose(
            signal=signal,
            parameters_json=self._reader.request(signal),
            task=task_plugin(self._plan.run_file),
        )
        if self._reader.needs_model(signal) and self._model is not None:
            disclose.model.CopyFrom(model_reference(self._model))
        return coordinator_pb2.Instruction(
            id=f"{self._run_id}/{tag}/{signal}/{client}",
            client_id=client,
            run_id=self._run_id,
            disclose=disclose,
        )

    async def _take(self, client: str, signal: str, answer: coordinator_pb2.Answer) -> None:
        if answer.WhichOneof("outcome") != "profile":
            raise ProtocolError(
                f"client '{client}' answered a request for {signal} with an answer of another kind"
            )
        profile = Profile(
            client_id=client,
            data_epoch=answer.profile.data_epoch,
            signal=answer.profile.signal,
            parameters_json=answer.profile.parameters_json,
            payload_json=answer.profile.payload_json,
            signature=answer.profile.signature or None,
            received_at=datetime.now(UTC),
        )
        if profile.signal != signal:
            raise ProtocolError(
                f"client '{client}' received a request for {signal}, but sent "
                f"{profile.signal[:40]!r}"
            )
        session = self._attendance.session_of(client)
        epoch = profile.data_epoch if session is None else session.data_epoch
        if profile.data_epoch != epoch or epoch > LARGEST_EPOCH:
            raise ProtocolError(
                f"client '{client}' sent a profile of data epoch {profile.data_epoch}, but the "
                f"host reported data epoch {epoch}"
            )
        numbers = self._reader.read(profile)
        self._trust.verify(profile)
        await self._in_store(lambda store: store.put_profile(profile))
        self._hold(profile, numbers, present=True)


def is_unable(answer: coordinator_pb2.Answer) -> bool:
    """Return True if an answer reports that the client's host lacks the means to compute the
    profile.

    A host that declines is not unable: it may still train.
    """
    reason = answer.failure.reason if answer.WhichOneof("outcome") == "failure" else ""
    return is_permanent(reason) and reason != DisclosureRefusedError.reason


async def stored_profiles(
    run_id: str,
    plan: RunPlan,
    attendance: Attendance,
    in_store: InStore,
    trust: Trust,
) -> Profiling:
    """Return the client profiles that a run uses. The run may be in any state."""
    roster = RunRoster(await in_store(lambda store: store.roster(run_id)))
    profiling = Profiling(run_id, plan, roster, attendance, in_store, trust)
    initial = (await in_store(lambda store: store.run(run_id))).initial_model_blake3
    if initial is not None:
        profiling.use_model(ModelVersion(blake3=initial, size=0, renditions=()))
    await profiling.admit(roster.ids)
    parts: list[Participation] = await in_store(lambda store: store.participation(run_id))
    roster.note_samples({each.client_id: each.samples or 0 for each in parts})
    return profiling


def _profiles_of(
    store: Store, *, signal: str, run_id: str, clients: Sequence[str] | None
) -> list[Profile]:
    return store.profiles(signal=signal, run_id=run_id, client_ids=clients)
