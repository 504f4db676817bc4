"""A coordinator that selects other clients than it committed to, or tries seeds until it likes one.

The hosts recompute each cohort from a seed that they have helped to make.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from adversary.conftest import CLIENTS, Scene
from adversary.proxy import Script
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.federation import until
from support.sum_federation import host_of

from potluck.client.disclosure.member_keys import key_of
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.store import RunState
from potluck.verifiable.chain import Chain
from potluck.verifiable.coordinator.selection_audit import SelectionAudit
from potluck.verifiable.coordinator.selection_log import SelectionLog
from potluck.verifiable.documents import (
    COORDINATOR,
    Attendees,
    BrokenSelectionError,
    Opening,
    Outcome,
    Speaker,
    commitment_to,
    joint_seed,
    receipt,
)
from potluck.verifiable.host.selection_report import SelectionReport

RUN = f"""
rounds = 2
clients_per_round = 3
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 2}}
evaluation = {{every = 0}}
round = {{deadline_seconds = 60.0, attempts = 1, quorum = 1.0}}
selection = {{verifiable = true, hosts_verify = true}}
"""
ONE_UPDATE = RUN.replace("quorum = 1.0", "quorum = 0.3")
"""One update of three is enough for a round."""
SHARE = "11" * 32
MASKED = RUN.replace("clients_per_round = 3", "clients_per_round = 5") + "secure_aggregation = true"
Fields = dict[str, Any]


@dataclass
class Rewritten(Script):
    """Rewrites the documents of one kind on their way to hosts, from JSON object to JSON object.

    victims: hosts that receive the rewritten document; None for all.
    """

    kind: str
    edit: Callable[[Fields], Fields]
    victims: frozenset[str] | None = None

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        selection = message.instruction.selection
        hit = self.victims is None or host in self.victims
        if hit and selection.WhichOneof("document") == self.kind:
            edited = self.edit(json.loads(getattr(selection, self.kind)))
            text = json.dumps(edited, sort_keys=True, separators=(",", ":"))
            setattr(selection, self.kind, text.encode())
        return [message]


@dataclass
class EditedTrainings(Script):
    """Rewrites all trainings."""

    edit: Callable[[rpc.Train], None]

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if message.instruction.WhichOneof("work") == "train":
            self.edit(message.instruction.train)
        return [message]


@dataclass
class Watching(Script):
    """Changes nothing. cohort: clients of the first outcome. newest: whether `training` is the last
    training, or the first."""

    newest: bool = False
    cohort: tuple[str, ...] = ()
    training: rpc.Instruction | None = None
    trained: asyncio.Event = field(default_factory=asyncio.Event)

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        instruction = message.instruction
        selection = instruction.selection
        if selection.outcome and not self.cohort:
            self.cohort = Outcome.parse(selection.outcome).cohort
        wanted = self.newest or self.training is None
        if instruction.WhichOneof("work") == "train" and wanted:
            self.training = rpc.Instruction()
            self.training.CopyFrom(instruction)
            self.trained.set()
        return [message]


def swapped(outcome: Fields) -> Fields:
    """Replace the last client of the cohort by another one."""
    others = [f"client-{n}" for n in range(CLIENTS) if f"client-{n}" not in outcome["cohort"]]
    return outcome | {"cohort": [*outcome["cohort"][:-1], others[0]]}


def another_share(outcome: Fields) -> Fields:
    return outcome | {"share": "ab" * 32}


def most_shares_dropped(outcome: Fields) -> Fields:
    return outcome | {"shares": dict(sorted(outcome["shares"].items())[:2])}


def another_commitment(attendees: Fields) -> Fields:
    first, *others = attendees["speakers"]
    return attendees | {"speakers": [first | {"commitment": "cd" * 32}, *others]}


def unsigned(attendees: Fields) -> Fields:
    return attendees | {"speakers": [each | {"signature": ""} for each in attendees["speakers"]]}


def without_count(opening: Fields) -> Fields:
    return opening | {"count": 0}


def with_a_stranger(attendees: Fields) -> Fields:
    return attendees | {"available": [*attendees["available"], "client-77"]}


def without_a_speaker(attendees: Fields) -> Fields:
    return attendees | {"speakers": attendees["speakers"][1:]}


def told(scene: Scene, *, from_hosts: Iterable[str] = ()) -> list[str]:
    """Return the failures that hosts reported; of some hosts only, if any are named."""
    hosts = set(from_hosts)
    return [
        message.answer.failure.message
        for host, message in scene.liar.said
        if message.answer.HasField("failure") and (not hosts or host in hosts)
    ]


@pytest.mark.parametrize("selector", ["uniform", "round-robin"])
async def test_honest_selections_are_accepted_by_all_hosts(scene: Scene, selector: str) -> None:
    row = await scene.federation.finished(f'{RUN}selector = {{name = "{selector}"}}\n')
    assert row.state is RunState.FINISHED, row.reason
    assert told(scene) == []


@pytest.mark.parametrize(
    ("kind", "edit", "why"),
    [
        pytest.param("opening", without_count, "has no size of the cohort", id="no size"),
        pytest.param("outcome", swapped, "give another cohort", id="one client swapped"),
        pytest.param(
            "outcome", another_share, "does not match its commitment", id="own share replaced"
        ),
        pytest.param("outcome", most_shares_dropped, "are required", id="shares dropped"),
        pytest.param(
            "attendees", another_commitment, "commitment|signature", id="commitment of a host"
        ),
        pytest.param("attendees", unsigned, "no signature", id="commitments without signatures"),
        pytest.param(
            "attendees",
            with_a_stranger,
            "is not a member on the host",
            id="client without a record",
        ),
        pytest.param(
            "attendees",
            without_a_speaker,
            "is not a member on the host|lacks client",
            id="clients of a host without a speaker",
        ),
    ],
)
async def test_a_selection_that_was_not_committed_to_is_refused(
    scene: Scene, kind: str, edit: Callable[[Fields], Fields], why: str
) -> None:
    scene.liar.script = Rewritten(kind, edit)
    row = await scene.federation.finished(RUN)
    assert row.state is RunState.FAILED
    hosts = [host_of(client) for client in scene.federation.members.names]

    def unconvinced() -> list[str]:
        return [h for h in hosts if not any(re.search(why, t) for t in told(scene, from_hosts=[h]))]

    await until(lambda: not unconvinced(), f"a refusal by each host: {told(scene)}")


class WithoutShares(Script):
    """Claims that the hosts of these clients revealed no share, and sends the cohort that follows
    from the others."""

    def __init__(self, *dropped: str) -> None:
        self._dropped = dropped
        self._chain: Chain | None = None

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        selection = message.instruction.selection
        if selection.opening:
            self._chain = Chain.begin(message.instruction.run_id).opened(selection.opening)
        elif selection.attendees and self._chain is not None:
            self._chain = self._chain.attended(selection.attendees)
        elif selection.outcome and self._chain is not None:
            outcome = Outcome.parse(selection.outcome)
            shares = {each: s for each, s in outcome.shares.items() if each not in self._dropped}
            cohort = self._chain.recomputed(seed_of(self._chain, outcome.share, shares))
            forged = outcome.model_copy(update={"shares": shares, "cohort": cohort})
            selection.outcome = forged.encode()
        return [message]


def seed_of(chain: Chain, share: str, shares: Mapping[str, str]) -> int:
    """Return the seed that these shares make, also if some are missing."""
    assert chain.attendees is not None
    speakers = [each.client for each in chain.attendees.speakers]
    revealed = [shares[client] for client in speakers if client in shares]
    return joint_seed(chain.attendees_sha256, share, revealed)


@pytest.mark.parametrize("dropped", [["client-0"], ["client-0", "client-5"]])
async def test_a_seed_without_the_shares_of_some_hosts_is_refused_by_all_hosts(
    scene: Scene, dropped: list[str]
) -> None:
    """Also by those whose shares are in the seed. So no client trains, although one update would be
    enough for the round."""
    scene.liar.script = WithoutShares(*dropped)
    row = await scene.federation.finished(ONE_UPDATE)
    assert row.state is RunState.FAILED
    why = f"{CLIENTS - len(dropped)} of 6 hosts revealed their shares of the seed, but all are"
    for host in map(host_of, scene.federation.members.names):
        assert any(why in text for text in told(scene, from_hosts=[host])), host
    refused = [text for text in told(scene) if "is not the last one that this host" in text]
    assert len(refused) == 3  # the cohort


@dataclass
class Malformed(Script):
    """A host that sends its commitment or its share in another form, and signs what it sends.

    key: the member key of its client.
    """

    field: str
    form: Callable[[str], str]
    key: Ed25519PrivateKey
    opening: bytes = b""

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if host == "host-0":
            self.opening = message.instruction.selection.opening or self.opening
        return [message]

    def from_host(self, host: str, message: rpc.AttendRequest) -> Iterable[rpc.AttendRequest]:
        found = message.answer.receipt if message.HasField("answer") else None
        if host == "host-0" and found is not None and getattr(found, self.field):
            setattr(found, self.field, self.form(getattr(found, self.field)))
            if found.commitment:
                sha256 = Opening.digest_of(self.opening)
                found.signature = self.key.sign(receipt(sha256, "client-0", found.commitment))
        return [message]


@pytest.mark.parametrize(
    ("field", "form"),
    [
        pytest.param("commitment", lambda _: "Z" * 64, id="commitment"),
        pytest.param("share", lambda share: " ".join(textwrap.wrap(share, 2)), id="share"),
    ],
)
async def test_a_malformed_answer_of_one_host_does_not_end_the_run(
    scene: Scene, field: str, form: Callable[[str], str]
) -> None:
    key = key_of(scene.federation.members.root / "members", "client-0")
    scene.liar.script = Malformed(field, form, key)
    row = await scene.federation.finished(ONE_UPDATE)
    assert row.state is RunState.FINISHED, row.reason
    log = SelectionLog(scene.federation.coordinator.config.state_directory, row.run_id)
    others = [f"client-{n}" for n in range(1, CLIENTS)]
    given_up = 0
    for attempt in log.attempts:
        assert attempt.shares is not None
        assert sorted(attempt.shares) == others
        if attempt.silent:
            assert attempt.chain.outcome is None
            given_up += 1
        else:
            assert attempt.chain.attendees is not None
            assert list(attempt.chain.attendees.available) == others
    assert given_up == (2 if field == "share" else 0)
    found = list(SelectionAudit(scene.federation.coordinator.config, row.run_id).results())
    assert [each.missed for each in found] == ([1, 0, 1, 0] if field == "share" else [0, 0])
    assert all(each.agrees for each in found)


async def test_a_coordinator_that_drops_shares_has_no_other_seed(scene: Scene) -> None:
    row = await scene.federation.finished(RUN)
    assert row.state is RunState.FINISHED, row.reason
    log = SelectionLog(scene.federation.coordinator.config.state_directory, row.run_id)
    for attempt in log.attempts:
        shares = attempt.shares
        assert shares is not None
        attempt.chain.seed(attempt.share, shares)
        for revealed in range(CLIENTS):
            for some in itertools.combinations(shares.items(), revealed):
                with pytest.raises(BrokenSelectionError, match="but all are required"):
                    attempt.chain.seed(attempt.share, dict(some))


@pytest.mark.parametrize(
    ("newest", "why"),
    [
        pytest.param(False, "is not the last one that this host has received", id="earlier"),
        pytest.param(True, "already has another training by this selection", id="last"),
    ],
)
async def test_another_training_by_an_earlier_or_the_last_selection_is_refused(
    scene: Scene, newest: bool, why: str
) -> None:
    """Otherwise, a coordinator that likes a cohort could keep it for the rest of the run."""
    watching = Watching(newest=newest)
    scene.liar.script = watching
    row = await scene.federation.finished(RUN)
    assert row.state is RunState.FINISHED, row.reason
    training = watching.training
    assert training is not None
    training.id += "/again"
    scene.liar.tell(host_of(training.client_id), training)
    await until(lambda: any(why in text for text in told(scene)), why)


class Forger:
    """A coordinator that makes the documents of a run on its own, and sends them to all hosts."""

    def __init__(self, scene: Scene, *, rounds: int = 2) -> None:
        self.chain = Chain.begin("forged")
        self.rounds = rounds
        self._scene = scene
        self._clients = scene.federation.members.names

    async def open(self, round_number: int, attempt: int, **changes: object) -> list[rpc.Answer]:
        """Open an attempt; return the hosts' answers."""
        opening = Opening(
            previous=self.chain.tip,
            run=self.chain.run,
            rounds=self.rounds,
            round=round_number,
            attempt=attempt,
            selector="uniform",
            count=3,
            inputs_sha256="22" * 32,
            commitment=commitment_to(SHARE, self.chain.tip, COORDINATOR),
        ).model_copy(update=changes)
        answers = await self._send(round_number, attempt, opening=opening.encode())
        if all(each.HasField("receipt") for each in answers):
            self.chain = self.chain.opened(opening.encode())
        return answers

    async def draw(self, receipts: Sequence[rpc.Answer]) -> list[rpc.Answer]:
        """Ask the hosts for their shares; return their answers. receipts: of the opening."""
        opening, speakers = self.chain.opening, list[Speaker]()
        assert opening is not None
        for client, answer in zip(self._clients, receipts, strict=True):
            signature = answer.receipt.signature.hex()
            commitment = answer.receipt.commitment
            speakers.append(Speaker(client=client, commitment=commitment, signature=signature))
        attendees = Attendees(
            previous=self.chain.opening_sha256,
            available=tuple(self._clients),
            speakers=tuple(speakers),
        )
        answers = await self._send(opening.round, opening.attempt, attendees=attendees.encode())
        if all(each.HasField("receipt") for each in answers):
            self.chain = self.chain.attended(attendees.encode())
        return answers

    async def settle(self, revealed: Sequence[rpc.Answer]) -> None:
        """Send all hosts the outcome, which they accept. revealed: their shares."""
        opening = self.chain.opening
        assert opening is not None
        given = zip(self._clients, revealed, strict=True)
        shares = {client: answer.receipt.share for client, answer in given}
        outcome = Outcome(
            previous=self.chain.attendees_sha256,
            cohort=self.chain.recomputed(self.chain.seed(SHARE, shares)),
            share=SHARE,
            shares=shares,
        ).encode()
        answers = await self._send(opening.round, opening.attempt, outcome=outcome)
        assert all(each.HasField("receipt") for each in answers), answers
        self.chain = self.chain.ended(outcome)

    async def _send(self, round_number: int, attempt: int, **document: Any) -> list[rpc.Answer]:
        answers: dict[str, rpc.Answer] = {}
        [kind] = document
        ids = {
            client: f"{self.chain.run}/{round_number}.{attempt}/{kind}/{client}"
            for client in self._clients
        }
        for client, name in ids.items():
            instruction = rpc.Instruction(
                id=name,
                client_id=client,
                run_id=self.chain.run,
                round=round_number,
                selection=rpc.SelectionDocument(**document),
            )
            self._scene.liar.tell(host_of(client), instruction)

        def answered() -> bool:
            for _, message in self._scene.liar.said:
                if message.HasField("answer"):
                    answers[message.answer.instruction_id] = message.answer
            return set(ids.values()) <= set(answers)

        await until(answered, f"answers to the {kind}")
        return [answers[name] for name in ids.values()]


def opens(forger: Forger, receipts: Sequence[rpc.Answer], shares: Sequence[rpc.Answer]) -> bool:
    """Return whether each host has revealed the share that it committed to."""
    return all(
        commitment_to(share.receipt.share, forger.chain.opening_sha256, client)
        == receipt.receipt.commitment
        for client, receipt, share in zip(
            [f"client-{n}" for n in range(CLIENTS)], receipts, shares, strict=True
        )
    )


async def test_a_coordinator_that_repeats_attempts_gets_ten_seeds(scene: Scene) -> None:
    """The coordinator learns the seed of each attempt, and gives the attempt up."""
    forger = Forger(scene)
    for attempt in range(1, 11):
        receipts = await forger.open(1, attempt)
        assert opens(forger, receipts, await forger.draw(receipts))
    for attempt in (11, 12):
        for answer in await forger.draw(await forger.open(1, attempt)):
            assert "10 selections were drawn one after another" in answer.failure.message
    for answer in await forger.open(2, 1):
        assert "round 2 was opened, but round 1 has no cohort" in answer.failure.message


async def test_a_coordinator_that_claims_gaps_gets_ten_seeds_and_hosts_keep_them(
    scene: Scene,
) -> None:
    """Hosts can't tell a gap from a broken connection, so they accept it; but it does not end their
    count of seeds."""
    forger = Forger(scene, rounds=20)
    gap = {"previous": "33" * 32, "commitment": commitment_to(SHARE, "33" * 32, COORDINATOR)}
    receipts = await forger.open(1, 1)
    assert opens(forger, receipts, await forger.draw(receipts))
    for number in range(2, 11):
        receipts = await forger.open(number, 1, **gap)
        assert opens(forger, receipts, await forger.draw(receipts))
    for answer in await forger.draw(await forger.open(11, 1, **gap)):
        assert "10 selections were drawn one after another" in answer.failure.message
    for client in scene.federation.members.names:
        report = SelectionReport(scene.federation.folder / host_of(client), [client])
        [run] = json.loads(report.values())["runs"]
        assert [each["gap"] for each in run["selections"]] == [False] + 10 * [True]


async def test_a_coordinator_that_selects_without_training_gets_no_more_rounds(
    scene: Scene,
) -> None:
    """It draws again in each round, but hosts refuse more rounds than the first opening named."""
    forger = Forger(scene)
    for number in (1, 2):
        receipts = await forger.open(number, 1)
        await forger.settle(await forger.draw(receipts))
    for answer in await forger.open(3, 1):
        assert "round 3 was opened, but the run has 2 rounds" in answer.failure.message
    forger.rounds = 3
    for answer in await forger.open(3, 2):
        assert "the number of rounds or the kind of seed changed" in answer.failure.message


async def test_a_coordinator_that_selects_without_training_gets_ten_cohorts_per_host(
    scene: Scene,
) -> None:
    """It names a million rounds, and trains no client until it likes the cohort."""
    forger, times = Forger(scene, rounds=1_000_000), dict.fromkeys(range(CLIENTS), 0)
    for number in itertools.count(1):
        receipts = await forger.open(number, 1)
        gone = {n for n, each in enumerate(receipts) if each.HasField("failure")}
        assert gone == {n for n, cohorts in times.items() if cohorts == 10}
        if gone:
            break
        await forger.settle(await forger.draw(receipts))
        outcome = forger.chain.outcome
        assert outcome is not None
        for client in outcome.cohort:
            times[int(client.removeprefix("client-"))] += 1
    why = "the last 10 cohorts with clients of this host trained none of them"
    assert all(why in receipts[n].failure.message for n in gone)
    assert number <= 20


async def test_a_second_list_of_commitments_gets_no_share(scene: Scene) -> None:
    class Twice(Script):
        def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
            text = message.instruction.selection.attendees
            if host != "host-0" or not text:
                return [message]
            second = rpc.AttendResponse()
            second.CopyFrom(message)
            fewer = json.loads(text)
            fewer["available"] = fewer["available"][:-1]
            fewer["speakers"] = fewer["speakers"][:-1]
            edited = json.dumps(fewer, sort_keys=True, separators=(",", ":"))
            second.instruction.id += "/again"
            second.instruction.selection.attendees = edited.encode()
            return [message, second]

    scene.liar.script = Twice()
    row = await scene.federation.finished(RUN)
    assert row.state is RunState.FINISHED, row.reason
    why = "hosts reveal shares for one list only"
    await until(lambda: any(why in text for text in told(scene, from_hosts=["host-0"])), why)


async def test_a_client_outside_the_cohort_does_not_train(scene: Scene) -> None:
    watching = Watching()
    scene.liar.script = watching
    row = await scene.federation.coordinator.start_run(RUN)
    await watching.trained.wait()
    training, stranger = watching.training, ""
    assert training is not None
    stranger = next(f"client-{n}" for n in range(CLIENTS) if f"client-{n}" not in watching.cohort)
    training.id, training.client_id = f"{row.run_id}/1.1/{stranger}", stranger
    scene.liar.tell(stranger.replace("client", "host"), training)
    ended = await scene.federation.ended(row.run_id)
    assert ended.state is RunState.FINISHED
    why = "not in the committed cohort"
    await until(lambda: any(why in text for text in told(scene)), why)


def names_none(work: rpc.Train) -> None:
    work.ClearField("selection")


def one_less(work: rpc.Train) -> None:
    del work.selection.cohort[-1]


def another_outcome(work: rpc.Train) -> None:
    work.selection.outcome_sha256 = "ef" * 32


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        pytest.param(names_none, "names no selection", id="none"),
        pytest.param(another_outcome, "is not the last one", id="another"),
        pytest.param(one_less, "another cohort than the committed cohort", id="another cohort"),
    ],
)
async def test_a_masked_cohort_that_is_not_the_committed_one_is_refused(
    scene: Scene, edit: Callable[[rpc.Train], None], why: str
) -> None:
    scene.liar.script = EditedTrainings(edit)
    row = await scene.federation.finished(MASKED)
    assert row.state is RunState.FAILED
    assert any(why in text for text in told(scene)), told(scene)
    assert not any(map(scene.federation.has_released, scene.federation.members.names))


async def test_an_honest_masked_round_is_bound_to_its_selection(scene: Scene) -> None:
    row = await scene.federation.finished(MASKED)
    assert row.state is RunState.FINISHED, row.reason
    assert told(scene) == []
