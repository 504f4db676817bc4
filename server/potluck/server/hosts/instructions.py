"""Messages to hosts: instructions, and references to models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from potluck.common.disclosure import Weighting, canonical_json
from potluck.common.learning.measures import MeasuredModel
from potluck.common.run_file.run_settings import PluginTable, PrivateUpdates
from potluck.common.run_file.runfile import RunFile
from potluck.common.tensors.encoding import Encoding
from potluck.common.updates.training_agreement import client_seed
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2
from potluck.server.plan.needs_and_hides import AVAILABILITY
from potluck.server.plan.path_rules import fixed_point_terms
from potluck.server.plan.plan import RunPlan
from potluck.server.plan.update_noise import noise_multiplier
from potluck.server.selection import Ask, BeforeUpload
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import AS_THE_RUN_SAYS, MemberWork
from potluck.server.strategy import Summation

ENCODINGS = {
    Encoding.FLOAT32: transfer_pb2.ENCODING_FLOAT32,
    Encoding.BFLOAT16: transfer_pb2.ENCODING_BFLOAT16,
    Encoding.INT8: transfer_pb2.ENCODING_INT8,
}
MASKED = transfer_pb2.ENCODING_MASKED_UINT32
"""Encoding of masked updates, for any number of bits per value; the file states that number."""
SUM = transfer_pb2.ENCODING_SUM
"""Encoding of sums that hosts compute, even if a sum has only one client."""
WEIGHTINGS = {
    Weighting.EXACT: coordinator_pb2.WEIGHTING_EXACT,
    Weighting.BUCKETED: coordinator_pb2.WEIGHTING_BUCKETED,
    Weighting.EQUAL: coordinator_pb2.WEIGHTING_EQUAL,
}


def model_reference(model: ModelVersion) -> transfer_pb2.ModelReference:
    """Return the reference to a model, with the files in which hosts may fetch it."""
    return transfer_pb2.ModelReference(
        blake3=model.blake3,
        size=model.size,
        renditions=[
            transfer_pb2.Rendition(
                blake3=rendition.blake3,
                size=rendition.size,
                encoding=ENCODINGS[rendition.encoding],
                base_blake3=rendition.base_blake3,
                compressed=rendition.compressed,
            )
            for rendition in model.renditions
        ],
    )


def plugin(table: PluginTable) -> coordinator_pb2.Plugin:
    """Return the message that names a plug-in and its options."""
    return coordinator_pb2.Plugin(name=table.name, options_json=json.dumps(table.options))


def task_plugin(run_file: RunFile) -> coordinator_pb2.Plugin:
    """Return the message that names a run's task, with the model that replaces the task's own, if
    any."""
    message = plugin(run_file.task)
    if run_file.model is not None:
        table = run_file.model.with_seed(run_file.seed)
        message.model_json = json.dumps(table.model_dump(exclude_defaults=True))
    return message


def train_instruction_id(run_id: str, round_number: int, attempt: int, client: str) -> str:
    """Return the id of a client's training; it is the same after a restart of the coordinator."""
    return f"{run_id}/{round_number}.{attempt}/{client}"


def train_instruction(
    plan: RunPlan,
    instruction_id: str,
    run_id: str,
    round_number: int,
    client: str,
    model: transfer_pb2.ModelReference,
    auxiliary: coordinator_pb2.Auxiliary | None = None,
    *,
    member: MemberWork = AS_THE_RUN_SAYS,
    companions: Sequence[str] = (),
    speed: float = 1.0,
) -> coordinator_pb2.Instruction:
    """Return the instruction for a client to train.

    member: quotas, weight, passes and omitted tensors that the selector set for the client.
    companions: ids of the instructions of all clients that may be trained together, this client's
    included. speed: divisor of the simulated duration.
    """
    train = _train(plan, round_number, client, model)
    train.quotas.extend(member.quotas)
    train.dropped.extend(member.dropped)
    train.companions.extend(companions)
    passes = 1.0
    if member.epochs is not None:
        train.training_json = _training_json(plan, member.epochs)
        passes = member.epochs / plan.training.epochs
    train.pace = plan.client_pace(round_number, client, speed=speed, passes=passes)
    _add_personal(train, plan)
    if auxiliary is not None:
        train.auxiliary.CopyFrom(auxiliary)
    return _instruction(instruction_id, run_id, round_number, client, train=train)


def check_instruction(
    plan: RunPlan,
    instruction_id: str,
    run_id: str,
    round_number: int,
    client: str,
    layout: bytes,
    *,
    evaluates: bool = False,
) -> coordinator_pb2.Instruction:
    """Return the instruction that asks a host whether it can train and answer the run's questions.

    layout: layout of the run's model; may be empty. evaluates: True if clients evaluate on held-out
    samples.
    """
    least_group = plan.run_file.evaluation.disclosed_group if evaluates else 0
    train = _train(plan, round_number, client, transfer_pb2.ModelReference())
    _add_personal(train, plan)
    if plan.run_file.selection.hosts_verify:
        train.selection.hosts_verify = True
    correction = plan.strategy.correction
    if correction is not None:
        train.auxiliary.correction.name = correction.name
        train.auxiliary.correction.options_json = json.dumps(dict(correction.options))
    asks = sorted(plan.selector.asks_questions)
    check = coordinator_pb2.Check(
        train=train,
        layout=layout,
        questions=asks,
        evaluates=evaluates,
        least_group=least_group,
    )
    return _instruction(instruction_id, run_id, round_number, client, check=check)


def question_instruction(
    plan: RunPlan,
    instruction_id: str,
    run_id: str,
    round_number: int,
    client: str,
    ask: Ask,
    model: transfer_pb2.ModelReference,
    kept: coordinator_pb2.KeptState | None,
    *,
    speed: float = 1.0,
) -> coordinator_pb2.Instruction:
    """Return a question to a client before a round's selection.

    kept: reference to the client's stored state; None if clients store nothing. speed: divisor of
    the simulated duration of a training.
    """
    question = coordinator_pb2.Question(
        kind=ask.kind,
        parameters_json=canonical_json(ask.parameters),
        names=ask.wanted,
        pace=plan.client_pace(0, client, speed=speed),
        validation_share=plan.training.validation_share,
        task=task_plugin(plan.run_file),
        model=model,
        seed=client_seed(plan.run_file.seed, round_number, client),
        kept=kept,
    )
    if ask.trains:
        question.train.CopyFrom(_how_to_train(plan, round_number, client))
    if plan.run_file.privacy is not None and ask.kind != AVAILABILITY:
        question.privacy.CopyFrom(privacy_terms(plan.run_file.privacy, plan))
    return _instruction(instruction_id, run_id, round_number, client, question=question)


def question_before_upload(
    asked: BeforeUpload, training: coordinator_pb2.Instruction
) -> coordinator_pb2.Question:
    """Return the question that a client answers about its trained model, before the upload."""
    return coordinator_pb2.Question(
        kind=asked.kind,
        parameters_json=canonical_json(asked.parameters),
        names=asked.wanted,
        pace=training.train.pace,
        seed=training.train.seed,
    )


def evaluate_instruction(
    plan: RunPlan,
    instruction_id: str,
    run_id: str,
    round_number: int,
    client: str,
    model: transfer_pb2.ModelReference,
    kept: coordinator_pb2.KeptState | None,
    subject: MeasuredModel = MeasuredModel.ROUND,
) -> coordinator_pb2.Instruction:
    """Return the instruction for a client to evaluate a model on its held-out samples.

    kept: reference to the client's stored state; None if clients store nothing. subject: the model
    to evaluate: this one, or one that the client derives from it.
    """
    evaluate = coordinator_pb2.Evaluate(
        model=model,
        task=task_plugin(plan.run_file),
        seed=client_seed(plan.run_file.seed, round_number, client),
        kept=kept,
        least_group=plan.run_file.evaluation.disclosed_group,
        personal=subject is MeasuredModel.PERSONAL,
    )
    if subject is MeasuredModel.TUNED:
        tuning = _train(plan, round_number, client, model)
        tuning.ClearField("reports")
        epochs = plan.run_file.evaluation.fine_tune_epochs
        tuning.training_json = _training_json(plan, epochs)
        evaluate.tuning.CopyFrom(tuning)
    return _instruction(instruction_id, run_id, round_number, client, evaluate=evaluate)


def _train(
    plan: RunPlan, round_number: int, client: str, model: transfer_pb2.ModelReference
) -> coordinator_pb2.Train:
    """Return the message for a client's training, without the settings that the selector made for
    this client, and without auxiliary files."""
    run_file = plan.run_file
    up, masked = run_file.transport.up, run_file.secure_aggregation
    summed = run_file.host_sums.enabled
    train = coordinator_pb2.Train(
        model=model,
        task=task_plugin(run_file),
        encoding=MASKED if masked else SUM if summed else ENCODINGS[up.encoding],
        delta=masked or summed or up.delta,
        compressed=up.compress,
        weighting=WEIGHTINGS[run_file.weighting],
        reports=sorted(plan.reports),
        pace=plan.client_pace(round_number, client),
        normalized=(masked or summed) and plan.strategy.summation is Summation.NORMALIZED,
        one_way=plan.strategy.one_way,
    )
    if run_file.privacy is not None and not run_file.privacy.at_coordinator:
        train.privacy.CopyFrom(privacy_terms(run_file.privacy, plan))
        if run_file.privacy.unit == "client":
            train.weighting = WEIGHTINGS[Weighting.EQUAL]  # the noise assumes equal weights
    if summed:
        terms = fixed_point_terms(run_file, plan.strategy)
        train.summing.CopyFrom(coordinator_pb2.Summing(**dataclasses.asdict(terms)))
    train.MergeFrom(_how_to_train(plan, round_number, client))
    return train


def privacy_terms(settings: PrivateUpdates, plan: RunPlan) -> coordinator_pb2.Privacy:
    """Return the noise settings that a client needs for trainings, and for answers if the selector
    asks about data.

    With unit = record, each host computes its noise from its number of samples. With
    unit = client, the noise is the same for all clients."""
    rounds = plan.run_file.rounds
    whole = settings.unit == "client"
    multiplier = noise_multiplier(settings, rounds) if whole else settings.noise_multiplier
    noise = coordinator_pb2.Privacy(
        unit=settings.unit,
        noise=settings.noise if whole else "",
        counted_share=0.0 if settings.clip_quantile is None else settings.clip_quantile_share,
        noise_multiplier=multiplier or 0.0,
        epsilon=settings.epsilon or 0.0,
        delta=settings.delta,
        clip=settings.clip,
        trainings=settings.trainings or rounds,
    )
    if plan.asks_about_data:
        noise.answers = settings.answers or rounds
        noise.answer_noise_multiplier = settings.answer_noise_multiplier or 0.0
        noise.answer_clip = settings.answer_clip
    return noise


def _how_to_train(plan: RunPlan, round_number: int, client: str) -> coordinator_pb2.Train:
    """Return the settings that, together with the initial weights, determine the trained
    weights."""
    run_file = plan.run_file
    return coordinator_pb2.Train(
        objective=plugin(run_file.objective[0]),
        further_objectives=[plugin(table) for table in run_file.objective[1:]],
        training_json=plan.training.as_json(),
        seed=client_seed(run_file.seed, round_number, client),
        run_seed=run_file.seed,
    )


def _add_personal(train: coordinator_pb2.Train, plan: RunPlan) -> None:
    """Add the settings for training the client's own model, if the run has such models."""
    settings = plan.run_file.personal
    if settings.method == "ditto":
        train.personal.pull = settings.pull
        train.personal.training_json = _training_json(plan, settings.epochs)


def _training_json(plan: RunPlan, epochs: int | None) -> str:
    """Return the run's local training as JSON. epochs: number of passes, instead of the run's; None
    for the run's."""
    changes = {} if epochs is None else {"epochs": epochs, "steps": None}
    return plan.training.model_copy(update=changes).as_json()


def _instruction(
    instruction_id: str, run_id: str, round_number: int, client: str, **work: Any
) -> coordinator_pb2.Instruction:
    return coordinator_pb2.Instruction(
        id=instruction_id, client_id=client, run_id=run_id, round=round_number, **work
    )
