"""Sums of a host that lies: of others' clients, of the same client twice, of impossible words.

A coordinator process, an honest host with one client, and one with two clients that lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from grpc import StatusCode as Status
from support.federation import Federation, crash_federation, until
from support.raw_host import RawHost, header, next_training, whole

from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.common.updates.fixed_point import LARGEST_WORD, Words, members_digest
from potluck.common.updates.sum_files import BODY, write_sum_file
from potluck.deploy.operator.model_download import download_model
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import operator_pb2, transfer_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

HONEST = "client-0"
MINE = ("client-1", "client-2")
SAMPLES = 32
SUM = transfer_pb2.ENCODING_SUM
LAYOUT = (Status.INVALID_ARGUMENT, "UPDATE_LAYOUT_MISMATCH")
CLOSED = (Status.FAILED_PRECONDITION, "ROUND_CLOSED")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("sums"), clients=3, hosts=2, count=3, rounds=1, start_hosts=False
    ) as federation:
        await federation.processes.start_host(0)
        await federation.until_attending(1)
        yield federation


class Told:
    """Instructions that the lying host received, and the sums it can send."""

    def __init__(
        self, host: RawHost, run_id: str, trainings: Mapping[str, rpc.Instruction]
    ) -> None:
        self.host, self.run_id, self.trainings = host, run_id, trainings
        self.parameters = 0

    def member(self, client: str, **changes: Any) -> transfer_pb2.SumMember:
        report = transfer_pb2.TrainingReport(samples=SAMPLES, steps=3, seconds=0.1, loss=1.0)
        values: dict[str, Any] = {
            "client_id": client,
            "update_id": self.id_of(client),
            "report": report,
        }
        return transfer_pb2.SumMember(**(values | changes))

    def id_of(self, client: str) -> str:
        return f"{self.run_id}/1.1/{client}"

    async def send(
        self, content: bytes, *members: transfer_pb2.SumMember, **changes: Any
    ) -> object:
        """Send a sum and return the answer."""
        first = members[0] if members else self.member(MINE[0])
        values = {"encoding": SUM, "delta": True, "members": members, "report": None}
        answer = await self.host.submit(
            whole(first.update_id, first.client_id, content, **(values | changes))
        )
        return answer if isinstance(answer, tuple) else answer.duplicate


@contextlib.asynccontextmanager
async def told_to_train(federation: Federation, *assignments: str) -> AsyncIterator[Told]:
    async with (
        RawHost.of(federation.files.hosts[1]) as host,
        host.attending(*MINE) as call,
    ):
        run_id = await federation.start_run(
            'strategy.name="fedavg"',
            'selector.name="uniform"',
            "host_sums.enabled=true",
            "host_sums.weight_unit=32",
            *assignments,
        )
        trainings: dict[str, rpc.Instruction] = {}
        while len(trainings) < len(MINE):
            instruction = await next_training(call, run_id)
            trainings[instruction.client_id] = instruction
        told = Told(host, run_id, trainings)
        path = federation.files.folder / "model"
        path.write_bytes(await host.fetch(trainings[MINE[0]].train.model))
        with open_tensors(path) as file:
            told.parameters = file.layout.parameters
        yield told


def words_file(path: Path, words: Words, *ids: str) -> bytes:
    write_sum_file(path, {BODY: lambda a, b: words[a:b]}, {BODY: words.size}, members_digest(ids))
    return path.read_bytes()


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    with open_tensors(path) as file:
        arrays = {name: array.copy() for name, array in file.arrays.items()}
    change(arrays)
    write_tensors(path, arrays)
    return path.read_bytes()


async def states(federation: Federation, run_id: str) -> Mapping[str, int]:
    [committed] = await federation.history(run_id)
    return {member.client_id: member.state for member in committed.members}


async def test_host_can_sum_only_its_own_clients_and_each_once(
    federation: Federation, tmp_path: Path
) -> None:
    async with told_to_train(federation) as told:
        one, other = (told.member(client) for client in MINE)
        # The words of a client with 32 samples whose difference is 1 for every parameter.
        words = np.full(told.parameters, 2**30, np.int64)
        content = words_file(tmp_path / "sum", 2 * words, told.id_of(MINE[0]), told.id_of(MINE[1]))

        assert await told.send(content, one, told.member(HONEST)) == (
            Status.PERMISSION_DENIED,
            "IDENTITY_REFUSED",
        )
        unknown = told.member(MINE[1], update_id="unknown")
        assert await told.send(content, one, unknown) == CLOSED
        absurd = transfer_pb2.TrainingReport(samples=0, steps=3)
        wrong = {
            "twice": await told.send(content, one, one),
            "no members": await told.send(content),
            "another first": await told.send(content, one, other, client_id=MINE[1]),
            "a report besides": await told.send(content, one, other, report=one.report),
            "not as a sum": await told.send(content, one, encoding=transfer_pb2.ENCODING_FLOAT32),
            "of no samples": await told.send(content, one, told.member(MINE[1], report=absurd)),
        }
        assert wrong == dict.fromkeys(wrong, LAYOUT)

        federation.points.hold("evaluate")  # the run must not end before the sum is sent again
        assert await told.send(content, one, other) is False
        assert await told.send(content, one, other) is True
        alone = words_file(tmp_path / "alone", 9 * words, told.id_of(MINE[0]))
        assert await told.send(alone, one) == CLOSED
        federation.points.release()
        await federation.finished(told.run_id)
        await download_model(federation.operator, told.run_id, tmp_path / "model")
    included = operator_pb2.MEMBER_STATE_INCLUDED
    assert await states(federation, told.run_id) == dict.fromkeys([HONEST, *MINE], included)
    with (
        open_tensors(federation.files.folder / "model") as before,
        open_tensors(tmp_path / "model") as after,
    ):
        moved = after.arrays["ballast"] - before.arrays["ballast"]
    # The honest client does not change the ballast.
    np.testing.assert_allclose(moved, 2 / 3, rtol=1e-6)


async def test_host_does_not_learn_whether_the_update_of_another_client_has_arrived(
    federation: Federation,
) -> None:
    async with told_to_train(federation, "host_sums.enabled=false") as told:
        await until(lambda: len(federation.spooled()) == 1)
        own = [told.member(MINE[0])]
        for victim in (HONEST, "client-9"):
            first = header(told.id_of(victim), victim, b"x", members=own)
            answer = await told.host.submit([first])
            assert answer == (Status.PERMISSION_DENIED, "IDENTITY_REFUSED")
        await federation.operator.stop_run(told.run_id)


def out_of_range(path: Path, told: Told) -> bytes:
    words = np.full(told.parameters, 3 * LARGEST_WORD, np.int64)
    return words_file(path, words, *map(told.id_of, MINE))


def of_others(path: Path, told: Told) -> bytes:
    return words_file(path, np.zeros(told.parameters, np.int64), told.id_of(MINE[0]))


def of_another_model(path: Path, told: Told) -> bytes:
    words = np.zeros(told.parameters + 1, np.int64)
    return words_file(path, words, *map(told.id_of, MINE))


def wider_than_needed(path: Path, told: Told) -> bytes:
    words_file(path, np.ones(told.parameters, np.int64), *map(told.id_of, MINE))

    def widen(arrays: dict[str, Any]) -> None:
        arrays["body/widths"] *= np.uint8(2)
        arrays["body/lanes"] = np.ones(told.parameters, "<i2").view(np.uint8)

    return changed(path, widen)


@pytest.mark.parametrize("made", [out_of_range, of_others, of_another_model, wider_than_needed])
async def test_invalid_sum_fails_only_its_members(
    federation: Federation, tmp_path: Path, made: Callable[[Path, Told], bytes]
) -> None:
    """The honest host's client is not a member, and completes the round."""
    async with told_to_train(federation, "round.quorum=0.3") as told:
        answer = await told.send(made(tmp_path / "sum", told), *map(told.member, MINE))
        assert isinstance(answer, tuple)
        assert answer[0] is Status.INVALID_ARGUMENT
        await federation.finished(told.run_id)
    failed = operator_pb2.MEMBER_STATE_FAILED
    assert await states(federation, told.run_id) == {
        HONEST: operator_pb2.MEMBER_STATE_INCLUDED,
        **dict.fromkeys(MINE, failed),
    }


async def test_excessive_sample_count_in_a_sum_ends_the_attempt(
    federation: Federation, tmp_path: Path
) -> None:
    """A part of a sum can't get a lower weight, so the round is repeated without that client."""
    async with told_to_train(federation, "round.quorum=0.3", "round.attempts=3") as told:
        words = np.zeros(told.parameters, np.int64)
        content = words_file(tmp_path / "sum", words, *map(told.id_of, MINE))
        flattering = transfer_pb2.TrainingReport(samples=1 << 40, steps=3, loss=1.0)
        members = [told.member(MINE[0], report=flattering), told.member(MINE[1])]
        assert await told.send(content, *members) is False
        log = federation.files.log("coordinator")
        why = "sample_limits.maximum, which hosts apply"
        await until(lambda: why in log.read_text(), "a reason in the log")
        tried = "clients have more samples than sample_limits allows"
        await until(lambda: tried in log.read_text(), "the end of the attempt in the log")
    await federation.operator.stop_run(told.run_id)
