"""Decides which clients skip their upload: clients offer updates, the selector chooses.

A client that has trained answers a question about its model and waits with its upload. When each
client has answered or is lost, the coordinator stores the answers, and then the selector decides. A
restarted coordinator therefore makes the same decision from the stored answers.
"""

from __future__ import annotations

import asyncio

import numpy as np

from potluck.common.errors import ProtocolError, RunError, StorageError
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.live.run import Run
from potluck.server.live.run_updates import Offer
from potluck.server.machine import events as rounds
from potluck.server.plan.plan import RunPlan
from potluck.server.select.interview import OFFERS, read_scalars, stored_answers
from potluck.server.selection import Offers, Spared
from potluck.server.state import State
from potluck.server.store.records import AttemptKey, Exchange, JsonObject

_LARGEST_SAMPLES = 1 << 53
_SAMPLES = "samples"


def is_offer(question: JsonObject) -> bool:
    """Return True if a stored question asked clients about the models they trained, before
    upload."""
    return OFFERS in question


def read_offer(plan: RunPlan, answer: coordinator_pb2.Answer) -> Offer:
    """Return a client's offer of its update. Raises ProtocolError if the answer is not a valid
    offer."""
    asked = plan.before_upload
    if asked is None:
        raise ProtocolError("the client offered an update that it was instructed to send")
    scalars = coordinator_pb2.Answer(scalars=answer.offer.answer)
    numbers = read_scalars(scalars, asked.wanted)
    if answer.offer.samples > _LARGEST_SAMPLES:
        raise ProtocolError(
            f"the client reports {answer.offer.samples} samples; the maximum is {_LARGEST_SAMPLES}"
        )
    return Offer(numbers=numbers, samples=answer.offer.samples)


async def decide_uploads(run: Run, action: rounds.DecideUploads) -> None:
    """Have the selector decide which clients skip their upload."""
    key = AttemptKey(run.id, action.round, action.attempt)
    exchanges: list[Exchange] = await run.services.in_store(lambda store: store.answers(key))
    found = [each for each in exchanges if is_offer(each.question) and each.answers is not None]
    if found and found[0].answers is not None:
        offers = _read(found[0].answers, key)
    else:
        offers = _gathered(run, action.clients)
        record = _record(offers)
        asked = run.plan.before_upload
        question: JsonObject = {"kind": "" if asked is None else asked.kind, OFFERS: True}
        step = len(exchanges) + 1
        await run.services.in_store(lambda store: store.add_answers(key, step, question, record))
    spared = await asyncio.to_thread(_spared, run.plan, run.models.states.selector, offers)
    clients = run.roster.clients(spared.rows)
    run.attempt.spared.update(clients)
    run.log.info("uploads decided", round=key.round, attempt=key.attempt, spared=clients)
    why = tuple(zip(clients, spared.reasons, strict=True))
    run.post(rounds.UploadsDecided(action.round, action.attempt, why))


def _spared(plan: RunPlan, state: State, offers: Offers) -> Spared:
    name = plan.run_file.selector.name
    spared: Spared = plan.selector.spare(state, offers)
    rows = [int(row) for row in spared.rows]
    strangers = set(rows) - set(offers.rows.tolist())
    if strangers or len(set(rows)) != len(rows) or len(rows) >= len(offers.rows):
        raise RunError(
            f"selector '{name}' lets {len(rows)} of {len(offers.rows)} clients skip their "
            "upload; the selector must name only clients that have trained, without repetition, "
            "and not all clients",
            selector=name,
        )
    if len(spared.reasons) != len(rows):
        raise RunError(
            f"selector '{name}' must return one reason for each client that skips its upload",
            selector=name,
        )
    return spared


def _gathered(run: Run, clients: tuple[str, ...]) -> Offers:
    told = [run.updates.offers[client] for client in clients]
    asked = run.plan.before_upload
    names = () if asked is None else asked.wanted
    table = np.array([each.numbers for each in told], dtype=np.float64)
    return Offers(
        rows=run.roster.rows(clients),
        values={name: table[:, column] for column, name in enumerate(names)},
        samples=np.array([each.samples for each in told], dtype=np.int64),
    )


# What is stored ---------------------------------------------------------------------------------


def _record(offers: Offers) -> JsonObject:
    values = {name: column.tolist() for name, column in offers.values.items()}
    return {"rows": offers.rows.tolist(), "values": values, _SAMPLES: offers.samples.tolist()}


def _read(record: JsonObject, key: AttemptKey) -> Offers:
    answers = stored_answers(record, key)
    samples = np.array(record.get(_SAMPLES), dtype=np.int64)
    if samples.shape != answers.rows.shape:
        raise StorageError(f"the stored offers of {key} can't be read; restore the database")
    return Offers(rows=answers.rows, values=answers.values, samples=samples)
