"""A coordinator that selects other clients than it committed to, or tries seeds until it likes one.

The hosts recompute each cohort from a seed that they have helped to make.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from adversary.conftest import CLIENTS, Scene
from adversary.proxy import Script
from support.federation import until

from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.store import RunState
from potluck.verifiable.chain import Chain
from potluck.verifiable.documents import Outcome

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
    """Changes nothing. cohort: clients of the first outcome. training: the first training."""

    cohort: tuple[str, ...] = ()
    training: rpc.Instruction | None = None
    trained: asyncio.Event = field(default_factory=asyncio.Event)

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        instruction = message.instruction
        selection = instruction.selection
        if selection.outcome and not self.cohort:
            self.cohort = Outcome.parse(selection.outcome).cohort
        if instruction.WhichOneof("work") == "train" and self.training is None:
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
        pytest.param("outcome", swapped, "give another cohort", id="one client swapped"),
        pytest.param(
            "outcome", another_share, "does not match its commitment", id="own share replaced"
        ),
        pytest.param("outcome", most_shares_dropped, "are required", id="shares dropped"),
        pytest.param("attendees", another_commitment, "commitment", id="commitment of a host"),
        pytest.param("attendees", unsigned, "no signature", id="commitments without signatures"),
    ],
)
async def test_a_selection_that_was_not_committed_to_is_refused(
    scene: Scene, kind: str, edit: Callable[[Fields], Fields], why: str
) -> None:
    scene.liar.script = Rewritten(kind, edit)
    row = await scene.federation.finished(RUN)
    assert row.state is RunState.FAILED
    assert any(why in text for text in told(scene)), told(scene)


class WithoutOneShare(Script):
    """Claims that host-0 revealed no share, and sends the cohort that follows from the others."""

    def __init__(self) -> None:
        self._chain: Chain | None = None

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        selection = message.instruction.selection
        if selection.opening:
            self._chain = Chain.begin(message.instruction.run_id).opened(selection.opening)
        elif selection.attendees and self._chain is not None:
            self._chain = self._chain.attended(selection.attendees)
        elif selection.outcome and self._chain is not None:
            outcome = Outcome.parse(selection.outcome)
            shares = {each: s for each, s in outcome.shares.items() if each != "client-0"}
            cohort = self._chain.recomputed(self._chain.seed(outcome.share, shares))
            forged = outcome.model_copy(update={"shares": shares, "cohort": cohort})
            selection.outcome = forged.encode()
        return [message]


async def test_a_seed_without_the_share_of_a_host_is_refused_by_that_host(scene: Scene) -> None:
    scene.liar.script = WithoutOneShare()
    row = await scene.federation.finished(RUN)
    assert row.state is RunState.FAILED
    said = told(scene, from_hosts=["host-0"])
    assert any("without the share that client 'client-0' revealed" in text for text in said), said


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
        pytest.param(another_outcome, "has not received", id="another"),
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
