"""The coordinator's commitments to a run's selections, and seeds made jointly with the hosts.

Runs on the event loop. Each selection has three exchanges with one client of each host: the
opening, the attendees and the outcome. Hosts that don't answer the opening take no part: their
clients can't be selected in this attempt, and they have no share in the seed. If a host commits but
doesn't reveal its share, the attempt is given up, and the next attempts at the round leave this
host out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from potluck.common.errors import IdentityError, RunError
from potluck.common.interruptible import in_thread
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.clock import utc
from potluck.server.eligibility.eligibility import ScarceError
from potluck.server.hosts.gather import gather
from potluck.server.live.run import Run
from potluck.server.machine.troubles import each_once
from potluck.server.select.cohort_hosts import check_hosts
from potluck.server.select.interview import ReplayError
from potluck.server.select.selection_record import SelectionRecord
from potluck.server.selection import RoundOutcome, Selection, SelectionContext
from potluck.server.state import State
from potluck.server.store.records import AttemptKey
from potluck.verifiable.chain import MOST_DRAWS
from potluck.verifiable.coordinator.selection_inputs import (
    described,
    described_outcome,
    inputs_sha256,
    state_sha256,
)
from potluck.verifiable.coordinator.selection_log import LoggedAttempt, SelectionLog
from potluck.verifiable.documents import (
    COORDINATOR,
    SHARE_BYTES,
    Attendees,
    BrokenSelectionError,
    Opening,
    Outcome,
    Speaker,
    commitment_to,
    is_digest,
    receipt,
)
from potluck.verifiable.draws import needs_times


class CommittedRun(SelectionRecord):
    """The commitments of one run. Used on the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._joint = run.plan.run_file.selection.hosts_verify
        self._opened: SelectionLog | None = None
        self._held: dict[str, str] = {}
        """Digest of the last document that each host has acknowledged, by host."""

    # The selection ----------------------------------------------------------------------------

    async def begin(self, context: SelectionContext, key: AttemptKey) -> SelectionContext:
        """Commit to the inputs, collect the hosts' shares, and return the context to select
        with."""
        log = await self._log()
        attempt = await self._opening(log, context, key)
        if attempt.chain.attendees is None:
            await self._attendees(log, attempt, context, key)
        attendees = attempt.chain.attendees
        assert attendees is not None  # noqa: S101  # `_attendees` has set it
        if attempt.shares is None:
            await self._shares(log, attempt, key)
        available = np.sort(self._run.roster.rows(attendees.available))
        check_hosts(self._run.selecting, self._run.plan, key.round, available)
        try:
            seed = attempt.chain.seed(attempt.share, attempt.shares or {})
        except BrokenSelectionError as error:
            raise ScarceError(f"{key}: {error.message}") from None
        return replace(context, seed=seed, available=available)

    async def chosen(
        self, context: SelectionContext, key: AttemptKey, selection: Selection
    ) -> None:
        """Commit to the cohort, and send it to the hosts."""
        run, log = self._run, await self._log()
        attempt = log.find(key.round, key.attempt)
        assert attempt is not None  # noqa: S101  # `begin` has made it
        cohort = tuple(run.roster.clients(selection.rows))
        outcome = attempt.chain.outcome
        if outcome is None:
            self._check(attempt, context, cohort)
            outcome = Outcome(
                previous=attempt.chain.attendees_sha256,
                cohort=cohort,
                share=attempt.share,
                shares=attempt.shares or {},
            )
            details = {"reasons": list(selection.reasons), **self._placement()}
            await in_thread(lambda: log.end(outcome, **details))
        elif outcome.cohort != cohort:
            raise ReplayError(
                f"{key}: after the restart, the selector chose another cohort than before"
            )
        document = rpc.SelectionDocument(outcome=outcome.encode())
        sha256 = attempt.chain.outcome_sha256
        answers = await self._send(key, "3", self._speakers(attempt), document, sha256)
        await self._note_signatures(log, sha256, answers)

    async def prove(self, work: rpc.Train, key: AttemptKey) -> None:
        """Add the digest of an attempt's outcome to a training instruction; the host checks it."""
        chain = self._ended(await self._log(), key).chain
        assert chain.outcome is not None  # noqa: S101  # `_ended` has checked it
        work.selection.outcome_sha256 = chain.outcome_sha256
        work.selection.hosts_verify = self._joint
        if self._run.plan.run_file.secure_aggregation:
            work.selection.cohort.extend(chain.outcome.cohort)

    async def committing(self, state: State, key: AttemptKey, outcome: RoundOutcome) -> None:
        """Log the facts about the round, and the digest of the selector's state that follows from
        them. The next selection must begin with this state."""
        log = await self._log()
        attempt, sha256 = self._ended(log, key), await in_thread(state_sha256, state)
        facts = await in_thread(described_outcome, outcome)
        if (attempt.state_after, attempt.learned) == (sha256, facts.description):
            return

        def store() -> None:
            log.keep_parts(facts.parts)
            log.learn(sha256, facts.description)

        await in_thread(store)

    def _ended(self, log: SelectionLog, key: AttemptKey) -> LoggedAttempt:
        """Return an attempt from the log. Raises RunError unless it has an outcome."""
        attempt = log.find(key.round, key.attempt)
        if attempt is None or attempt.chain.outcome is None:
            raise RunError(
                f"{key}: the log of selections has no outcome; restore the folder `selections` of "
                "the state directory from a backup, or start a new run"
            )
        return attempt

    # Its steps --------------------------------------------------------------------------------

    async def _opening(
        self, log: SelectionLog, context: SelectionContext, key: AttemptKey
    ) -> LoggedAttempt:
        """Return the attempt with its opening: the one from before a restart, or a new one."""
        run = self._run
        state = run.models.states.selector
        inputs = await in_thread(described, run.plan.run_file, state, context)
        sha256 = inputs_sha256(inputs.description)
        found = log.find(key.round, key.attempt)
        if found is not None:
            if found.chain.opening is None or found.chain.opening.inputs_sha256 != sha256:
                raise ReplayError(
                    f"{key}: the inputs of the selection have changed since the restart; "
                    "selecting again"
                )
            return found
        share = os.urandom(SHARE_BYTES).hex() if self._joint else ""
        previous = log.chain.tip
        everybody = run.plan.selector.everybody(key.round)
        opening = Opening(
            previous=previous,
            run=run.id,
            rounds=run.plan.run_file.rounds,
            round=key.round,
            attempt=key.attempt,
            selector=run.plan.run_file.selector.name,
            count=0 if everybody else context.count,
            inputs_sha256=sha256,
            seed=None if self._joint else context.seed,
            commitment=commitment_to(share, previous, COORDINATOR) if self._joint else "",
        )

        def store() -> LoggedAttempt:
            log.keep_parts(inputs.parts)
            return log.open(opening, share, inputs.description)

        return await in_thread(store)

    async def _attendees(
        self,
        log: SelectionLog,
        attempt: LoggedAttempt,
        context: SelectionContext,
        key: AttemptKey,
    ) -> None:
        """Send the opening; store which hosts have committed, and their clients."""
        run, opening = self._run, attempt.chain.opening
        assert opening is not None  # noqa: S101  # every attempt has one
        there = self._without_silent(log, run.roster.clients(context.available), key.round)
        hosts = self._hosts(there)
        first = {host: client for client, host in reversed(hosts.items())}
        if self._joint and needs_times(opening.selector):
            held = opening.previous
            late = {host: client for host, client in first.items() if self._held.get(host) != held}
            await self._send_missed(log, late, key)
        document = rpc.SelectionDocument(opening=opening.encode())
        clients = list(first.values())
        answers = await self._send(key, "1", clients, document, attempt.chain.opening_sha256)
        speakers, troubles = list[Speaker](), dict[str, str]()
        for client, found in answers.items():
            try:
                speakers.append(self._speaker(attempt.chain.opening_sha256, client, found))
            except (BrokenSelectionError, IdentityError) as error:
                troubles[client] = error.message
        if troubles:
            run.say(each_once(troubles, "took no part in the selection"), warning=True)
        heard = {hosts[each.client] for each in speakers}
        available = [client for client in there if hosts.get(client) in heard]
        members = run.services.trust.members
        if members is not None:  # hosts refuse clients that are not members
            of = {members.hosts[each.client] for each in speakers}
            available = [client for client in available if members.hosts.get(client) in of]
        least = run.plan.run_file.clients_per_round
        if len(available) < min(least, len(there)) or not available:
            scarce = (
                f"round {key.round}: hosts of {len(available)} clients answered the opening of "
                f"the selection, but {least} clients are needed"
            )
            if sum(not each.chain.attendees for each in log.attempts_at(key.round)) >= MOST_DRAWS:
                raise RunError(f"{scarce}; this is attempt {MOST_DRAWS} of {MOST_DRAWS}")
            raise ScarceError(scarce)
        times = None
        if self._joint and needs_times(opening.selector):
            times = tuple(attempt.chain.times.get(client, 0) for client in available)
        attendees = Attendees(
            previous=attempt.chain.opening_sha256,
            available=tuple(available),
            times=times,
            speakers=tuple(speakers),
        )
        await in_thread(log.attend, attendees)

    def _without_silent(
        self, log: SelectionLog, there: Sequence[str], round_number: int
    ) -> Sequence[str]:
        """Return the clients whose hosts revealed their shares in all attempts at this round up to
        now; all of them if too few are left."""
        run, silent = self._run, [each.silent for each in log.attempts_at(round_number)]
        least = min(run.plan.run_file.clients_per_round, len(there))
        for some in (silent, silent[-2:]):  # the last attempt is the current one
            named = [client for each in some for client in each]
            hosts = self._hosts([*there, *named])
            away = {hosts[client] for client in named if client in hosts}
            left = [client for client in there if hosts.get(client) not in away]
            with contextlib.suppress(ScarceError):
                check_hosts(run.selecting, run.plan, round_number, np.sort(run.roster.rows(left)))
                if len(left) >= least:
                    return left
        return there

    async def _send_missed(
        self, log: SelectionLog, hosts: Mapping[str, str], key: AttemptKey
    ) -> None:
        """Send hosts the documents that they have missed, so that they can count turns. hosts: a
        client of each of these hosts, by host."""
        if not hosts:
            return
        *history, _ = log.documents()  # without the current opening
        places = {sha256: place for place, (sha256, _, _) in enumerate(history)}
        first = {
            client: places.get(self._held.get(host, ""), -1) + 1 for host, client in hosts.items()
        }
        for place, (sha256, kind, text) in enumerate(history):
            behind = [client for client, start in first.items() if start <= place]
            document = rpc.SelectionDocument(missed=True, **{kind: text})
            answers = await self._send(key, f"missed-{place}", behind, document, sha256)
            for client in behind:
                if client not in answers:
                    del first[client]

    async def _shares(self, log: SelectionLog, attempt: LoggedAttempt, key: AttemptKey) -> None:
        """Send the attendees; store the shares that hosts reveal."""
        attendees = attempt.chain.attendees
        assert attendees is not None  # noqa: S101  # the caller has checked it
        document = rpc.SelectionDocument(attendees=attendees.encode())
        sha256 = attempt.chain.attendees_sha256
        answers = await self._send(key, "2", self._speakers(attempt), document, sha256)
        shares, opening = {}, attempt.chain.opening_sha256
        for each in attendees.speakers:
            share = answers[each.client].share if each.client in answers else ""
            if self._joint and _opens(each, opening, share):
                shares[each.client] = share
        await in_thread(log.reveal, shares)
        await self._note_signatures(log, attempt.chain.attendees_sha256, answers)

    def _check(
        self, attempt: LoggedAttempt, context: SelectionContext, cohort: Sequence[str]
    ) -> None:
        """Raise RunError if hosts would compute a different cohort."""
        if self._joint and attempt.chain.recomputed(context.seed) != cohort:
            raise RunError(
                "selection.hosts_verify: the cohort was changed after its selection, because a "
                "masked round needs clients on more hosts; raise clients_per_round, lower "
                "masking.hosts, or start one client per host"
            )

    def _placement(self) -> Mapping[str, object]:
        """Return the clients' hosts and tag limits for the log; empty if both are unused."""
        selecting, limits = self._run.selecting, self._run.selecting.tag_limits()
        if not limits and not self._run.plan.rules.hosts:
            return {}
        return {
            "hosts": list(selecting.hosts()),
            "limits": [[tag, list(values), most] for tag, values, most in limits],
        }

    # Hosts ------------------------------------------------------------------------------------

    def _hosts(self, clients: Sequence[str]) -> dict[str, str]:
        """Return the host of each connected client, by client."""
        sessions = {client: self._run.services.attendance.session_of(client) for client in clients}
        return {client: each.host_id for client, each in sessions.items() if each is not None}

    def _speakers(self, attempt: LoggedAttempt) -> list[str]:
        attendees = attempt.chain.attendees
        return [] if attendees is None else [each.client for each in attendees.speakers]

    def _speaker(self, opening: str, client: str, found: rpc.SelectionReceipt) -> Speaker:
        """Build a speaker from its receipt of the opening.

        Raises BrokenSelectionError if the receipt is malformed, IdentityError if it has no valid
        signature of a member."""
        valid = is_digest(found.commitment) if self._joint else not found.commitment
        if not valid:
            raise BrokenSelectionError("the host's commitment to a share of the seed is malformed")
        members = self._run.services.trust.members
        if members is not None:
            signed = receipt(opening, client, found.commitment)
            members.verify(client, signed, found.signature, utc())
        return Speaker(
            client=client,
            commitment=found.commitment,
            signature=found.signature.hex() if members is not None else "",
        )

    async def _send(
        self,
        key: AttemptKey,
        step: str,
        clients: Sequence[str],
        document: rpc.SelectionDocument,
        sha256: str,
    ) -> dict[str, rpc.SelectionReceipt]:
        """Send a document to clients; return their receipts. Warn about clients that refuse."""
        run, hosts = self._run, self._hosts(clients)
        answers = await gather(
            run.services.attendance,
            [
                rpc.Instruction(
                    id=f"{key.run_id}/{key.round}.{key.attempt}/selection.{step}/{client}",
                    client_id=client,
                    run_id=key.run_id,
                    round=key.round,
                    selection=document,
                )
                for client in clients
            ],
            seconds=run.plan.run_file.round.question_deadline_seconds,
            present=run.is_present,
        )
        refusals = {
            client: f"{answer.failure.message[:300]} ({answer.failure.reason[:80]})"
            for client, answer in answers.items()
            if answer.WhichOneof("outcome") != "receipt"
        }
        if refusals:
            said = each_once(
                refusals, f"refused the {document.WhichOneof('document')} of a selection"
            )
            run.say(f"round {key.round}: {said}", warning=True)
        receipts = {
            client: answers[client].receipt
            for client in clients
            if client in answers and client not in refusals
        }
        self._held.update({hosts[client]: sha256 for client in receipts if client in hosts})
        return receipts

    async def _note_signatures(
        self, log: SelectionLog, sha256: str, answers: Mapping[str, rpc.SelectionReceipt]
    ) -> None:
        """Store the valid signatures of members on a document."""
        members = self._run.services.trust.members
        if members is None:
            return
        valid = {}
        for client, found in answers.items():
            try:
                members.verify(client, receipt(sha256, client), found.signature, utc())
            except IdentityError as error:
                self._run.say(f"{error.message}", warning=True)
                continue
            valid[client] = found.signature.hex()
        await in_thread(log.sign, sha256, valid)

    async def _log(self) -> SelectionLog:
        if self._opened is None:
            folder = self._run.services.state_directory
            self._opened = await in_thread(SelectionLog, folder, self._run.id)
        return self._opened


def _opens(speaker: Speaker, opening: str, share: str) -> bool:
    """Return True if a speaker has committed to this share."""
    return is_digest(share) and commitment_to(share, opening, speaker.client) == speaker.commitment
