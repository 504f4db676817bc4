"""The plan of a run with noise: ε of a client by number of trainings, and the noise for an ε."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from potluck.client.disclosure.disclosure_policy import AVAILABILITY
from potluck.common.errors import ConfigurationError
from potluck.common.learning.task_loading import make_task
from potluck.common.learning.training import training_for
from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.accounting import GaussianSteps, epsilon_by_pld, rdp_of
from potluck.privacy.planned_training import (
    answer_noise,
    noise_multiplier_for,
    planned_answers,
    rdp_of_answers,
)
from potluck.privacy.rdp_filter import added, epsilon_spent, solved_noise
from potluck.rpc.v1 import coordinator_pb2 as rpc

_SHARES = (0.1, 0.25, 0.5, 1.0)


def plan_lines(
    run_file: RunFile,
    *,
    samples: Sequence[int],
    trainings: int | None,
    targets: Sequence[float],
    source: str,
) -> Iterator[str]:
    """Yield the plan as lines of text.

    samples: number of training samples of each client to plan for. trainings: number of trainings
    of a client in the run; None means one per round. Raises ConfigurationError if the run has no
    [privacy].
    """
    privacy = run_file.privacy
    if privacy is None:
        raise ConfigurationError(
            f"{source}: the table [privacy] is missing; add it with noise_multiplier or epsilon"
        )
    most = trainings or privacy.trainings or run_file.rounds
    if privacy.unit == "client":
        yield from _of_updates(privacy, run_file.rounds, most, targets)
        return
    task = make_task(run_file.task.name, run_file.task.options)
    settings = training_for(task, run_file.training, source=f"{source}: [training]")
    if settings.unfit_for_noise:
        raise ConfigurationError(f"{source}: {settings.unfit_for_noise}")
    counts = sorted({max(1, round(share * most)) for share in _SHARES})
    asked = _answers(run_file, privacy)
    beside = rdp_of_answers(asked)
    if asked.answers:
        yield (
            f"the numbers below include {asked.answers} answers to questions of selector "
            f"{run_file.selector.name}, with noise multiplier {answer_noise(asked):.3g}; all "
            f"answers alone have ε = {epsilon_spent(beside, privacy.delta):.3g}"
        )
    yield (
        f"ε per record (δ = {privacy.delta:g}) by number of trainings, as hosts compute it; "
        "'fixed' is a smaller ε, valid if no result changes the schedule"
    )
    heads = ["samples", "rate", "steps", "noise", *map(str, counts), "fixed"]
    yield _row(heads)
    for number in samples:
        event = _event(privacy, settings, number, run_file.rounds, beside)
        losses = [
            epsilon_spent(added(rdp_of(_times(event, count)), beside), privacy.delta)
            for count in counts
        ]
        answered = [planned_answers(asked)] if asked.answers else []
        fixed = epsilon_by_pld([_times(event, most), *answered], privacy.delta)
        cells = [f"{each:.3g}" for each in (*losses, fixed)]
        rate, noise = f"{event.sampling_rate:.3g}", f"{event.noise_multiplier:.3g}"
        yield _row([str(number), rate, str(event.steps), noise, *cells])
    yield ""
    yield f"noise multiplier that gives each ε after {most} trainings"
    yield _row(["samples", *(f"ε = {each:g}" for each in targets)])
    for number in samples:
        event = _shape(settings, number)
        needed = [
            solved_noise(
                epsilon=each,
                delta=privacy.delta,
                sampling_rate=event.sampling_rate,
                steps=event.steps * most,
                beside=rdp_of_answers(_aimed_at(asked, each)),
            )
            for each in targets
        ]
        yield _row([str(number), *(f"{each:.3g}" for each in needed)])


def _of_updates(
    privacy: PrivateUpdates, rounds: int, most: int, targets: Sequence[float]
) -> Iterator[str]:
    """Yield the plan of a run whose noise hides whole updates; all clients have the same plan."""
    noise = privacy.noise_multiplier or noise_multiplier_for(
        epsilon=privacy.epsilon or 0.0, delta=privacy.delta, trainings=privacy.trainings or rounds
    )
    counts = sorted({max(1, round(share * most)) for share in _SHARES})
    who, limit = "hosts compute", ". Hosts limit both rows by training_epsilon"
    if privacy.at_coordinator:
        who, limit = "the coordinator computes", ""
    yield (
        f"ε (δ = {privacy.delta:g}) by number of trainings of a client, as {who} it, with noise "
        f"multiplier {noise:.4g}; 'fixed' is a smaller ε, valid if no result changes the "
        f"schedule{limit}"
    )
    yield _row(["unit", "noise", *map(str, counts), "fixed"])
    for unit, multiplier in (("client", noise), ("record", noise / 2)):
        event = GaussianSteps(noise_multiplier=multiplier)
        losses = [epsilon_spent(rdp_of(_times(event, count)), privacy.delta) for count in counts]
        fixed = epsilon_by_pld([_times(event, most)], privacy.delta)
        yield _row([unit, f"{multiplier:.3g}", *(f"{each:.3g}" for each in (*losses, fixed))])
    yield ""
    yield f"noise multiplier that gives each ε per client after {most} trainings"
    yield _row([f"ε = {each:g}" for each in targets])
    needed = (
        noise_multiplier_for(epsilon=each, delta=privacy.delta, trainings=most) for each in targets
    )
    yield _row([f"{each:.3g}" for each in needed])


def _shape(settings: LocalTraining, samples: int) -> GaussianSteps:
    """Return a client's training as steps with noise multiplier 1, a placeholder for the real
    one."""
    return GaussianSteps(
        sampling_rate=min(1.0, settings.batch_size / samples),
        noise_multiplier=1.0,
        steps=settings.planned_steps(samples),
    )


def _answers(run_file: RunFile, privacy: PrivateUpdates) -> rpc.Privacy:
    """Return the terms of the answers for the run's selector; 0 answers if it asks no questions."""
    chosen = run_file.selector
    selector: Any = plugins.find(plugins.SELECTORS, chosen.name)(**chosen.options)
    asks = set(selector.asks_questions) - {AVAILABILITY}
    if asks and not (privacy.epsilon or privacy.answer_noise_multiplier):
        raise ConfigurationError(
            f"selector {chosen.name} asks clients about their data, and [privacy] has no noise "
            "for the answers; set privacy.answer_noise_multiplier, such as 20"
        )
    return rpc.Privacy(
        epsilon=privacy.epsilon or 0.0,
        delta=privacy.delta,
        answers=(privacy.answers or run_file.rounds) if asks else 0,
        answer_noise_multiplier=privacy.answer_noise_multiplier or 0.0,
    )


def _aimed_at(asked: rpc.Privacy, epsilon: float) -> rpc.Privacy:
    """Return the terms of a run's answers, with this ε in place of the ε of the run."""
    found = rpc.Privacy()
    found.CopyFrom(asked)
    found.epsilon = epsilon
    return found


def _event(
    privacy: PrivateUpdates,
    settings: LocalTraining,
    samples: int,
    rounds: int,
    beside: tuple[float, ...],
) -> GaussianSteps:
    """Return a client's training as steps with the noise that its host would add."""
    shape = _shape(settings, samples)
    noise = privacy.noise_multiplier or solved_noise(
        epsilon=privacy.epsilon or 0.0,
        delta=privacy.delta,
        sampling_rate=shape.sampling_rate,
        steps=shape.steps * (privacy.trainings or rounds),
        beside=beside,
    )
    return replace(shape, noise_multiplier=noise)


def _times(event: GaussianSteps, count: int) -> GaussianSteps:
    return replace(event, steps=event.steps * count)


def _row(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>9}" for cell in cells).rstrip()
