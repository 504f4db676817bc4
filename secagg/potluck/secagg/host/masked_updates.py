"""Masked updates: appointments for their secure sums, the masking, and the files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from potluck.client.private_training import SumGrid, UpdateNoise
from potluck.client.training.unmasked_update import Differences
from potluck.common.errors import RoundClosedError
from potluck.common.tensors.flat import TensorBorders
from potluck.common.tensors.tensor_files import FileDigest, open_tensors, write_tensors
from potluck.common.updates.sum_files import AUXILIARY, BODY
from potluck.common.updates.training_agreement import (
    check_alike,
    settings_sha256,
    training_sha256,
)
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.masked_vectors import (
    HEAD,
    NORMALIZER,
    WITHIN,
    file_layout,
    metric_names,
    vector_lengths,
)
from potluck.secagg.protocol import Envelope, Expectation, Masking, Purpose
from potluck.secagg.protocol.primitives.masks import word_dtype
from potluck.secagg.protocol.rules import BrokenRuleError, Rule, require
from potluck.secagg.protocol.vectors.updates import (
    BodyEncoder,
    encode_failed_head,
    encode_head,
)
from potluck.secagg.protocol.vectors.word_limits import largest_sum, to_words, vector_scale

# Appointments -------------------------------------------------------------------------------------
# `sum_sessions` drives the session, and `training_handler` the training. An appointment connects
# both, because the clients agree on masks while they train.

T = TypeVar("T")


@dataclass(kw_only=True)
class Appointment:
    """Connects one client's training with the sum of its update. Runs on the event loop.

    expected: the client's expectation of the sum, set once it has the round's model. agreed: set
    once the clients have agreed on masks. over: the last replies (empty, or a refusal); set once
    the update is delivered or has failed. said: set once the replies in `over` were passed on for
    sending.
    """

    expected: asyncio.Future[Expectation] = field(default_factory=lambda: _future())
    agreed: asyncio.Future[None] = field(default_factory=lambda: _future())
    over: asyncio.Future[tuple[Envelope, ...]] = field(default_factory=lambda: _future())
    said: asyncio.Event = field(default_factory=asyncio.Event)
    session_id: bytes = b""

    def close(self, replies: tuple[Envelope, ...] = ()) -> None:
        """End the appointment, after the training has succeeded or failed."""
        for waiting in (self.expected, self.agreed):
            waiting.cancel()
        if not self.over.done():
            self.over.set_result(replies)


class Appointments:
    """The `Appointment`s of all clients of a host: one per client and update.

    The coordinator chooses the ids of updates, so an id alone could connect a client's training
    with the sum that another client expects.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Appointment] = {}

    def of(self, client: str, update_id: str) -> Appointment:
        """Return the appointment of a client's update; make it if it does not exist."""
        return self._made.setdefault((client, update_id), Appointment())

    def close(self, client: str, update_id: str, replies: tuple[Envelope, ...] = ()) -> None:
        """Close the appointment of a training that is over; do nothing if it has none."""
        appointment = self._made.pop((client, update_id), None)
        if appointment is not None:
            appointment.close(replies)

    async def expectation(self, client: str, update_id: str) -> Expectation:
        """Wait for the client's expectation of the sum of its update.

        Raises RoundClosedError if its training does not begin."""
        waiting = self.of(client, update_id).expected
        try:
            return await kept(waiting)
        finally:
            if not waiting.done():  # the training has never begun
                self.close(client, update_id)


async def kept(waiting: asyncio.Future[T]) -> T:
    """Wait for a future that has other waiters too. Raises RoundClosedError if it is cancelled."""
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if waiting.cancelled():
            raise RoundClosedError("the training for the secure sum has ended") from None
        raise


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


# Masking ------------------------------------------------------------------------------------------


_BLOCK: Final = 2**18
"""Number of elements encoded and masked at once."""


def expectation(instruction: rpc.Instruction, model: Path, data_epoch: int) -> Expectation:
    """Return a client's expectation of the sum of a training. Blocks: reads the model.

    Raises ProtocolError if the training is for this client alone.
    """
    work = instruction.train
    check_alike(instruction)
    with open_tensors(model) as file:
        parameters = file.layout.parameters
    noisy = work.HasField("privacy")
    metrics = metric_names(normalized=work.normalized, noisy=noisy)
    # The input's name omits settings, seed and run: with other values of these, it is still the
    # same input. With noise, each upload is a new input, and its privacy loss is recorded.
    of_noise = f" with noise {instruction.id}" * noisy
    committed = frozenset(work.selection.cohort) if work.HasField("selection") else None
    return Expectation(
        within=committed,
        purpose=Purpose.UPDATE,
        input_id=f"update {work.model.blake3}/epoch {data_epoch}{of_noise}",
        lengths=vector_lengths(
            parameters, metrics, work.auxiliary.names, counts=work.privacy.counted_share > 0
        ),
        model_digest=bytes.fromhex(work.model.blake3),
        training_sha256=training_sha256(work),
        settings_sha256=settings_sha256(work),
        data="" if noisy else f"updates/epoch {data_epoch}",
        metrics=metrics,
        header_fields={"run": instruction.run_id, "round": instruction.round},
    )


def write_masked(
    path: Path, update: Differences, report: UpdateReport, masking: Masking
) -> FileDigest:
    """Encode an update, mask it and write its file. Blocks; writes over the update's arrays.

    report: its number of samples is the weight; its other numbers go into the masked vector
    `head`.
    Writes zeros if the update contains NaN or infinity. Raises StorageError.
    """
    try:
        words = _encoded(update, report, masking)
    except BrokenRuleError:
        return write_zeros(path, masking)
    return _write(path, words, masking)


def write_zeros(path: Path, masking: Masking) -> FileDigest:
    """Mask and write the vector of a client whose training failed. Blocks the calling thread.

    The vector's weight is 0, so no mean changes; the head counts the failed training. Raises
    StorageError.
    """
    words = {
        vector.name: np.zeros(vector.length, word_dtype(vector.modulus_bits))
        for vector in masking.header.vectors
    }
    for name, zeros in words.items():
        if name != HEAD:
            masking.add_masks(name, zeros)
    return _write(path, words | {HEAD: encode_failed_head(masking.header)}, masking)


def write_noisy(
    path: Path, update: Differences | None, masking: Masking, noise: UpdateNoise
) -> FileDigest:
    """Add noise to an update, or to zeros for None, mask it, write its file. Blocks the thread.

    Charges the client's ledger first. The vector `head` is the same for all clients, so that only
    the noisy numbers depend on data. Writes over the update's arrays. Raises StorageError,
    BrokenRuleError (policy) if clients may have unequal weights, and what `UpdateNoise.charge`
    raises.
    """
    header, clients = masking.header, masking.clients
    body = header.vector(BODY)
    names = {BODY, HEAD} | ({WITHIN} if noise.counts else set())
    plain = header.weight_bound == 1 and {each.name for each in header.vectors} == names
    require(
        plain, Rule.POLICY, "updates with noise must have equal weights and no auxiliary values"
    )
    if noise.counts:  # the count gets the same noise as the parameters
        alike = replace(header.vector(WITHIN), name=BODY, length=body.length) == body
        require(
            alike,
            Rule.POLICY,
            "the vector of the count must have the same encoding as the vector of the update",
        )
    values = np.zeros(body.length, np.float32) if update is None else update.body
    counted = None if update is None else noise.bound(values)
    if counted is None:  # a failed training counts as half within the clip
        values[:], counted = 0.0, 0.0
    draw = noise.charge(
        SumGrid(
            scale=vector_scale(body, clients),
            values=body.length + noise.counts,
            clients=clients,
            contributors=masking.certain,
            largest=largest_sum(body.modulus_bits),
        )
    )
    encoder, dtype = BodyEncoder(header, body, clients, 1), word_dtype(body.modulus_bits)
    out = values.view(dtype) if dtype.itemsize == 4 else np.empty(values.size, dtype)
    for begin in range(0, values.size, _BLOCK):
        block = out[begin : begin + _BLOCK]
        encoder.encode(values[begin : begin + _BLOCK], block)
        block += to_words(draw(block.size), body.modulus_bits)
        masking.add_masks(BODY, block, begin)
    words = {BODY: out, HEAD: encode_head(header, clients, weight=1, metrics=(), clipped=0)}
    if noise.counts:
        words[WITHIN] = word = np.empty(1, dtype)
        encoder.encode(np.array([counted]), word)
        word += to_words(draw(1), body.modulus_bits)
        masking.add_masks(WITHIN, word)
    return _write(path, words, masking)


def _write(path: Path, words: Mapping[str, NDArray[Any]], masking: Masking) -> FileDigest:
    """Mask the head, and write all vectors; the other vectors are already masked."""
    masking.add_masks(HEAD, words[HEAD])
    return write_tensors(path, words, layout=file_layout(masking.header.vectors))


def _encoded(
    update: Differences, report: UpdateReport, masking: Masking
) -> dict[str, NDArray[Any]]:
    """Return the words of all vectors; all vectors except the head are masked."""
    header, clients = masking.header, masking.clients
    values = report.values()
    metrics = {name: values[name] for name in header.metrics}
    normalizer = metrics.get(NORMALIZER, 1.0)
    words: dict[str, NDArray[Any]] = {}
    clipped = 0
    for vector in header.vectors:
        if vector.name == HEAD:
            continue
        of_body = vector.name == BODY
        auxiliary = vector.name.removeprefix(AUXILIARY)
        numbers = update.body if of_body else update.auxiliaries[auxiliary]
        # Auxiliaries are summed without weights: the maximum weight stands for 1.
        weight = report.samples if of_body else header.weight_bound
        encoder = BodyEncoder(header, vector, clients, weight)
        if of_body and normalizer != 1.0:
            _divide(numbers, normalizer, update)
        dtype = word_dtype(vector.modulus_bits)
        out = numbers.view(dtype) if dtype.itemsize == 4 else np.empty(numbers.size, dtype)
        for begin in range(0, numbers.size, _BLOCK):
            block = out[begin : begin + _BLOCK]
            encoder.encode(numbers[begin : begin + _BLOCK], block)
            masking.add_masks(vector.name, block, begin)
        words[vector.name] = out
        clipped += encoder.clipped
    head = encode_head(
        header,
        clients,
        weight=report.samples,
        metrics=list(metrics.values()),
        clipped=clipped,
    )
    return {**words, HEAD: head}


def _divide(vector: NDArray[np.float32], by: float, update: Differences) -> None:
    """Divide all parameters, but not buffers, in place."""
    for place, name in TensorBorders(update.layout).parts(0, vector.size):
        if name not in update.buffers:
            vector[place] /= np.float32(by)
