"""Asks clients a selector's questions before a selection, and passes the answers to the selector.

A question is stored before it is sent, and its answers are stored before the selector gets them.
After a restart, the coordinator calls the selector again, sends the stored answers into its new
generator, and continues from there. Hosts send an answer again if they are asked the same question
again.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from potluck.common.disclosure import SumKind
from potluck.common.errors import ProtocolError, RunError, StorageError
from potluck.common.interruptible import in_thread
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.eligibility.collected_sums import NO_SUMS, SumCollector
from potluck.server.hosts.gather import gather
from potluck.server.hosts.instructions import model_reference, question_instruction
from potluck.server.live.run import Run
from potluck.server.machine.troubles import each_once
from potluck.server.plan.cohort_limits import narrowed
from potluck.server.profiles.collect import is_unable
from potluck.server.select.cohort_hosts import complete
from potluck.server.select.selection_checks import check_ask, check_selection
from potluck.server.selection import Answers, Ask, AskSum, Selection, SelectionContext, Summed
from potluck.server.store.records import AttemptKey, Exchange, JsonObject

MOST_QUESTIONS = 100
"""Maximum number of questions in one round: a selector that asks more might never choose."""

OFFERS = "offers"
"""Key in a stored question: true if the question is about trained models."""

_AGAIN = "again"
"""Key in a stored question: how often the attempt had called the selector again before this
question, because too many chosen clients had the same tag."""


class ReplayError(RunError):
    """The stored answers of an attempt don't match the questions asked after a restart."""


async def choose(
    run: Run, context: SelectionContext, key: AttemptKey
) -> tuple[Selection, Sequence[Answers]]:
    """Run the selector, with its questions; return its choice and the answers of clients.

    If a cohort has too many clients with the same tag, the selector is called again with fewer
    available clients. The answers are those of the last call in which the selector asked clients. A
    cohort that is on too few hosts for masked or summed updates is completed.

    Raises RunError if the selector fails or its choice is invalid; ReplayError if, after a restart,
    its question differs from the stored one.
    """
    stored: Sequence[Exchange] = await run.services.in_store(lambda store: store.answers(key))
    steps, answers = _Steps(key=key, stored=stored), list[Answers]()
    limits, available = run.selecting.tag_limits(), context.available
    while True:
        selection, given = await _choose_once(run, context, steps)
        answers = given or answers
        fewer = narrowed(
            selection.rows, context.available, [(values, most) for _, values, most in limits]
        )
        if fewer is None:
            alarms = run.selecting.alarms
            alarms.look_at_tags(limits, len(selection.rows), context.count)
            alarms.choosing(available)
            context = replace(context, available=available)
            return complete(run.selecting, run.plan, selection, context), answers
        context = replace(context, available=fewer)
        steps.again += 1


async def _choose_once(
    run: Run, context: SelectionContext, steps: _Steps
) -> tuple[Selection, list[Answers]]:
    name, given = run.plan.run_file.selector.name, list[Answers]()
    said = await in_thread(run.plan.selector.select, run.models.states.selector, context)
    if isinstance(said, Generator):
        said = await _interview(run, said, context, steps, given)
    if not isinstance(said, Selection):
        raise RunError(
            f"selector '{name}' returned {_what(said)}; it must return a Selection", selector=name
        )
    check_selection(said, context, name)
    return said, given


@dataclass(kw_only=True)
class _Steps:
    """The questions of one attempt.

    stored: questions from before a restart. again: how often the selector was called again. step:
    number of the last question, from 1.
    """

    key: AttemptKey
    stored: Sequence[Exchange]
    again: int = 0
    step: int = 0

    def next(self) -> Exchange | None:
        """Count the next question. Return its stored exchange (question and answers); None if none
        is stored."""
        self.step += 1
        return self.stored[self.step - 1] if self.step <= len(self.stored) else None

    def record(self, question: JsonObject) -> JsonObject:
        """Return the question to store; add how often the selector was called again."""
        return {**question, _AGAIN: self.again} if self.again else question


async def _interview(
    run: Run,
    generator: Generator[Any, Any, Any],
    context: SelectionContext,
    steps: _Steps,
    given: list[Answers],
) -> Any:
    """Run the selector's generator to its end; return its result. Append clients' answers to
    `given`."""
    name = run.plan.run_file.selector.name
    answers: Answers | Summed | None = None
    try:
        for _ in range(MOST_QUESTIONS + 1):
            over, said = await in_thread(_advance, generator, answers)
            if over:
                return said
            check_ask(said, context, name)
            if isinstance(said, AskSum):
                answers = await _summed(run, said, steps)
                continue
            answers = await _answers(run, said, steps)
            given.append(answers)
    finally:
        generator.close()
    raise RunError(
        f"selector '{name}' asked more than {MOST_QUESTIONS} questions in round {context.round}; "
        "ask fewer questions",
        selector=name,
    )


# Asking -----------------------------------------------------------------------------------------


async def _answers(run: Run, ask: Ask, steps: _Steps) -> Answers:
    """Return the answers to a question: the stored answers, or those that clients send now."""
    question, in_store = steps.record(_question(ask)), run.services.in_store
    found, step, key = steps.next(), steps.step, steps.key
    _check_replayed(question, step, key, found)
    if found is not None and found.answers is not None:
        return stored_answers(found.answers, key)
    await in_store(lambda store: store.add_question(key, step, question))
    with run.services.observer.asking():
        answers = await _ask(run, ask, step, key)
    record = _record(answers)
    await in_store(lambda store: store.add_answers(key, step, question, record))
    return answers


async def _summed(run: Run, ask: AskSum, steps: _Steps) -> Summed | None:
    """Return the requested secure sum of label counts: the stored sum, or a new one."""
    question, in_store = steps.record(_sum_question(ask)), run.services.in_store
    found, step, key = steps.next(), steps.step, steps.key
    _check_replayed(question, step, key, found)
    if found is not None and found.answers is not None:
        return stored_sum(found.answers, key)
    await in_store(lambda store: store.add_question(key, step, question))
    with run.services.observer.asking():
        found_sum = await _collector(run).at_step(
            run.id, run.plan, run.roster.clients(ask.rows), run.is_present, run.say
        )
    summed = None
    if found_sum is not None:
        summed = Summed(rows=run.roster.rows(found_sum[0]), total=found_sum[1])
    record = _sum_record(summed)
    await in_store(lambda store: store.add_answers(key, step, question, record))
    return summed


def _collector(run: Run) -> SumCollector:
    """Return the collector of secure sums. Raises RunError if the run's settings don't allow a
    selector to request sums."""
    mode = run.plan.run_file.profiles.disclosure
    if mode != UNSAFE_STEPWISE:
        raise RunError(
            f"selector '{run.plan.run_file.selector.name}' asks for sums at every step, but this "
            f"run's profiles.disclosure is '{mode}'; set it to '{UNSAFE_STEPWISE}', or choose "
            "another selector"
        )
    sums = run.services.sums
    if sums is None:
        raise RunError(NO_SUMS)
    return sums


async def _ask(run: Run, ask: Ask, step: int, key: AttemptKey) -> Answers:
    reference = model_reference(run.models.current)
    clients = run.roster.clients(ask.rows)
    run.log.info("asking clients", kind=ask.kind, asked=len(clients), round=key.round)
    answers = await gather(
        run.services.attendance,
        [
            question_instruction(
                run.plan,
                f"{key.run_id}/{key.round}.{key.attempt}/question.{step}/{client}",
                key.run_id,
                key.round,
                client,
                ask,
                reference,
                run.kept_state(client),
                speed=run.speed(client),
            )
            for client in clients
        ],
        seconds=run.plan.run_file.round.question_deadline_seconds,
        present=run.is_present,
    )
    numbers: dict[int, Sequence[float]] = {}
    troubles: dict[str, str] = {}
    for row, client in zip(ask.rows.tolist(), clients, strict=True):
        try:
            numbers[row] = read_scalars(answers.get(client), ask.wanted)
        except ProtocolError as error:
            troubles[client] = error.message
    if troubles:
        silent = each_once(troubles, f"did not answer '{ask.kind}'")
        run.say(f"round {key.round}: of {len(ask.rows)} clients, {silent}", warning=True)
    unable = [client for client, answer in answers.items() if is_unable(answer)]
    if unable:
        await run.selecting.left_out.add_and_store({client: troubles[client] for client in unable})
    return _columns(numbers, ask.wanted)


def _advance(
    generator: Generator[Any, Any, Any], answers: Answers | Summed | None
) -> tuple[bool, Any]:
    """Run the generator to its next question. Return (False, question), or (True, result) at its
    end."""
    try:
        return False, generator.send(answers)
    except StopIteration as stop:
        return True, stop.value


def read_scalars(answer: coordinator_pb2.Answer | None, names: Sequence[str]) -> tuple[float, ...]:
    """Return a client's numbers, in the order of `names`. Raises ProtocolError, with the reason,
    unless the answer has exactly these numbers, all finite."""
    if answer is None:
        raise ProtocolError("no answer in time")
    if answer.WhichOneof("outcome") == "failure":
        raise ProtocolError(f"{answer.failure.message[:300]} ({answer.failure.reason[:80]})")
    if answer.WhichOneof("outcome") != "scalars":
        raise ProtocolError("the answer has no numbers")
    values = answer.scalars.values
    if len(values) != len(names) or not all(name in values for name in names):
        raise ProtocolError(
            f"the answer has {len(values)} numbers, but {', '.join(names)} were requested"
        )
    numbers = tuple(values[name] for name in names)
    if not all(map(math.isfinite, numbers)):
        raise ProtocolError(
            f"the answer is {', '.join(map(str, numbers))}; all numbers must be finite"
        )
    return numbers


def _columns(numbers: Mapping[int, Sequence[float]], names: Sequence[str]) -> Answers:
    table = np.array(list(numbers.values()), dtype=np.float64).reshape(len(numbers), len(names))
    return Answers(
        rows=np.array(list(numbers), dtype=np.int64),
        values={name: table[:, column] for column, name in enumerate(names)},
    )


def _check_replayed(
    question: JsonObject, step: int, key: AttemptKey, found: Exchange | None
) -> None:
    """Raise ReplayError if a stored question exists and differs from this one."""
    if found is not None and (found.step, found.question) != (step, question):
        raise ReplayError(
            f"question {step} of {key} differs from the question before the restart; the "
            "selector must be deterministic"
        )


# What is stored ---------------------------------------------------------------------------------


def _question(ask: Ask) -> JsonObject:
    return {
        "kind": ask.kind,
        "names": list(ask.wanted),
        "parameters": dict(ask.parameters),
        "rows": ask.rows.tolist(),
    }


def _record(answers: Answers) -> JsonObject:
    values = {name: column.tolist() for name, column in answers.values.items()}
    return {"rows": answers.rows.tolist(), "values": values}


def answers_of(exchanges: Sequence[Exchange], key: AttemptKey) -> list[Answers]:
    """Return the clients' answers to the questions of the selector's last call that asked any;
    secure sums and offers of updates are omitted."""
    answered = [
        each
        for each in exchanges
        if each.answers is not None and not _is_sum(each.question) and not each.question.get(OFFERS)
    ]
    last = answered[-1].question.get(_AGAIN) if answered else None
    return [
        stored_answers(each.answers, key)
        for each in answered
        if each.answers is not None and each.question.get(_AGAIN) == last
    ]


def stored_answers(record: JsonObject, key: AttemptKey) -> Answers:
    """Return the answers in a stored record. Raises StorageError if they can't be read."""
    try:
        rows = np.array(record["rows"], dtype=np.int64)
        named: Any = record["values"]
        values = {str(name): np.array(column, dtype=np.float64) for name, column in named.items()}
        if rows.ndim == 1 and all(column.shape == rows.shape for column in values.values()):
            return Answers(rows=rows, values=values)
        why = "columns of different lengths"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = repr(error)
    raise StorageError(f"the stored answers of {key} can't be read: {why}; restore the database")


def _sum_question(ask: AskSum) -> JsonObject:
    """Return the question to store for a secure sum."""
    return {"kind": SumKind.STEPWISE.value, "sum": ask.rows.tolist()}


def _is_sum(question: JsonObject) -> bool:
    """Return True if a stored question asks for a secure sum."""
    return "sum" in question


def _sum_record(summed: Summed | None) -> JsonObject:
    """Return the record to store for a secure sum."""
    if summed is None:
        return {"rows": [], "total": None}
    return {"rows": summed.rows.tolist(), "total": summed.total.tolist()}


def stored_sum(record: JsonObject, key: AttemptKey) -> Summed | None:
    """Return the secure sum in a stored record; None if the sum failed. Raises StorageError if it
    can't be read."""
    try:
        if record["total"] is None:
            return None
        rows = np.array(record["rows"], dtype=np.int64)
        total = np.array(record["total"], dtype=np.int64)
        if rows.ndim == 1 and total.ndim == 1:
            return Summed(rows=rows, total=total)
        why = "not lists of numbers"
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = repr(error)
    raise StorageError(f"the stored sum of {key} can't be read: {why}; restore the database")


def _what(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "nothing"
