"""A coordinator that lies about rounds whose updates are masked, over real gRPC.

As in `test_secure_sums_hostile`, the coordinator is the real one, and what it sends to one of seven
clients is forged on its way out. That client refuses and names the rule, and the others continue
without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.common.disclosure import SumKind
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.protocol import Envelope, MessageType, decode, encode
from potluck.secagg.protocol.wire.messages import (
    Certificate,
    Delivery,
    Header,
    Invitation,
    RefusalMessage,
    RosterMessage,
    Survivors,
)
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 7
VICTIM = "client-0"
SEEDS = count(1)
"""Seeds of initial models: each test starts from a new model, whose updates were in no sum yet."""
RUN_FILE = f"""
secure_aggregation = true
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 1}}
masking = {{stage_seconds = 20.0}}
round = {{deadline_seconds = 60.0}}
"""
KINDS: dict[MessageType, type[Any]] = {
    MessageType.INVITATION: Invitation,
    MessageType.ROSTER: RosterMessage,
    MessageType.DELIVERY: Delivery,
    MessageType.SURVIVORS: Survivors,
    MessageType.CERTIFICATE: Certificate,
}
Edit = Callable[[Any], Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SumFederation]:
    folder = tmp_path_factory.mktemp("hostile")
    async with sum_federation(Members.make(folder / "members", CLIENTS), folder) as federation:
        await federation.start()
        yield federation


@contextlib.contextmanager
def attacking(
    federation: SumFederation, change: Callable[[rpc.Instruction], bool]
) -> Iterator[list[rpc.Answer]]:
    """Pass instructions to the victim through `change`, which returns True if it forged one; yield
    the answers to the forged ones."""
    attendance, answers = federation.coordinator.attendance, list[rpc.Answer]()
    honest = attendance.instruct

    def instruct(instruction: rpc.Instruction, **options: Any) -> None:
        if instruction.client_id == VICTIM and change(instruction):
            heard = options["on_answer"]

            def on_answer(answer: rpc.Answer) -> None:
                answers.append(answer)
                heard(answer)

            options["on_answer"] = on_answer
        honest(instruction, **options)

    attendance.instruct = instruct  # type: ignore[method-assign]
    try:
        yield answers
    finally:
        attendance.instruct = honest  # type: ignore[method-assign]


def forged(kind: MessageType, edit: Edit) -> Callable[[rpc.Instruction], bool]:
    """Return a function that forges the first message of a kind."""
    done: list[MessageType] = []

    def change(instruction: rpc.Instruction) -> bool:
        if not instruction.HasField("secure") or done:
            return False
        serialised = instruction.secure.envelope.SerializeToString(deterministic=True)
        envelope = decode(Envelope, serialised)
        if envelope.type is not kind:
            return False
        done.append(kind)
        message = edit(decode(KINDS[kind], envelope.payload))
        made = replace(envelope, payload=encode(message))
        instruction.secure.envelope.CopyFrom(wire.SecureEnvelope.FromString(encode(made)))
        return True

    return change


def header(change: Callable[[Header], dict[str, Any]]) -> Edit:
    def edit(message: Invitation) -> Invitation:
        found = decode(Header, message.header)
        return replace(message, header=encode(replace(found, **change(found))))

    return edit


async def refusal(federation: SumFederation, kind: MessageType, edit: Edit) -> str:
    """Return the rule of the victim's refusal; it disclosed nothing, and the round continues."""
    before = len(federation.ledger(VICTIM).of(VICTIM).releases)
    answers: list[rpc.Answer] = []
    while not answers:  # a sum may finish without the victim, whose answer is ignored then
        with attacking(federation, forged(kind, edit)) as answers:
            row = await federation.finished(f"seed = {next(SEEDS)}\n{RUN_FILE}")
        assert row.state is RunState.FINISHED, row.reason
    assert len(federation.ledger(VICTIM).of(VICTIM).releases) == before
    [message] = answers[0].secure.envelopes
    assert MessageType(message.type) is MessageType.REFUSAL
    return str(decode(RefusalMessage, message.payload).rule)


def vectors(**changes: Any) -> Edit:
    return header(
        lambda found: {"vectors": (replace(found.vectors[0], **changes), *found.vectors[1:])}
    )


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        pytest.param(header(lambda _: {"model_digest": bytes(32)}), "header", id="another model"),
        pytest.param(header(lambda _: {"run": "other"}), "header", id="another run"),
        pytest.param(header(lambda _: {"round": 2}), "header", id="another round"),
        pytest.param(header(lambda _: {"metrics": ()}), "header", id="other metrics"),
        pytest.param(header(lambda _: {"least_hosts": 3}), "policy", id="fewer hosts"),
        pytest.param(header(lambda _: {"disclosure": "total"}), "policy", id="as counts"),
        pytest.param(header(lambda _: {"threshold": 1}), "threshold", id="no threshold"),
        pytest.param(vectors(length=1), "input", id="one parameter only"),
        pytest.param(vectors(scale=2.0**40), "wrap", id="a sum that wraps"),
        pytest.param(header(lambda found: {"vectors": found.vectors[1:]}), "input", id="no body"),
        pytest.param(header(lambda _: {"weight_bound": 2**50}), "wrap", id="weights that wrap"),
    ],
)
async def test_clients_refuse_forged_headers(
    federation: SumFederation, edit: Edit, rule: str
) -> None:
    assert await refusal(federation, MessageType.INVITATION, edit) == rule


async def test_clients_refuse_to_sum_counts_as_updates(federation: SumFederation) -> None:
    outcome = await federation.sum(kind=SumKind.UPDATE)
    assert outcome.total is None
    assert outcome.record.refusals == dict.fromkeys(federation.members.names, "policy")


@pytest.mark.parametrize(
    ("kind", "edit", "rule"),
    [
        pytest.param(
            MessageType.ROSTER,
            lambda message: replace(message, adverts=message.adverts[:3]),
            "too-few",
            id="a roster of three",
        ),
        pytest.param(
            MessageType.DELIVERY,
            lambda message: replace(message, shares=message.shares[1:]),
            "share",
            id="a share is missing",
        ),
    ],
)
async def test_clients_refuse_forged_key_exchanges(
    federation: SumFederation, kind: MessageType, edit: Edit, rule: str
) -> None:
    assert await refusal(federation, kind, edit) == rule


@pytest.mark.parametrize(
    ("kind", "edit", "rule"),
    [
        pytest.param(
            MessageType.SURVIVORS,
            lambda message: replace(message, clients=message.clients[1:]),
            "set",
            id="victim missing",
        ),
        pytest.param(
            MessageType.SURVIVORS,
            lambda message: replace(message, clients=message.clients[:4]),
            "too-few",
            id="a sum over four",
        ),
        pytest.param(
            MessageType.CERTIFICATE,
            lambda message: replace(message, endorsements=message.endorsements[1:]),
            "certificate",
            id="no quorum",
        ),
    ],
)
async def test_clients_refuse_forged_messages_after_their_upload(
    federation: SumFederation, kind: MessageType, edit: Edit, rule: str
) -> None:
    """The other clients complete the sum, which contains the victim's update. It releases no
    shares."""
    assert await refusal(federation, kind, edit) == rule
