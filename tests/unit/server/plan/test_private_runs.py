"""Runs with noise for records or clients: the instruction, and refused settings."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.claims import privacy_claim
from potluck.common.run_file.runfile import parse_run_file
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.trainer import Capability
from potluck.rpc.v1 import transfer_pb2
from potluck.rpc.v1.coordinator_pb2 import WEIGHTING_EQUAL, Privacy, Question
from potluck.rpc.v1.transfer_pb2 import ModelReference
from potluck.server.hosts.instructions import check_instruction, question_instruction
from potluck.server.plan.compatibility import (
    check_noised_evaluation,
    check_noised_model,
    check_private_clients,
    check_private_training,
)
from potluck.server.plan.path_rules import NOISED
from potluck.server.plan.plan import draw_up
from potluck.server.selection import Ask
from potluck.server.updates.report_checks import report_said

PLUGINS = Path(__file__).parents[3] / "support" / "trainer_plugins"
RUN = """
rounds = 30
clients_per_round = 2
task.name = "digits"
selector.name = "{selector}"
strategy.name = "{strategy}"
{table}
[privacy]
{privacy}
"""


CONCATENATION = """
[model]
name = "concatenation"
groups = 2
of = { name = "perceptron", inputs = 64, classes = 10 }
"""


def text(
    privacy: str = "noise_multiplier = 1.5",
    *,
    table: str = "",
    selector: str = "uniform",
    strategy: str = "fedavg",
) -> str:
    return RUN.format(privacy=privacy, table=table, selector=selector, strategy=strategy)


def instructed(run_file: str) -> Privacy | None:
    """Return the noise settings in an instruction of a run; None if there are none."""
    plan = draw_up(run_file, source="run.toml")
    work = check_instruction(plan, "i", "run", 1, "client-0", b"").check.train
    return work.privacy if work.HasField("privacy") else None


def test_instruction_carries_the_noise_settings_of_the_run() -> None:
    found = instructed(text("noise_multiplier = 1.5\nclip = 0.5"))
    assert found == Privacy(unit="record", noise_multiplier=1.5, delta=1e-5, clip=0.5, trainings=30)
    found = instructed(text("epsilon = 3\ndelta = 1e-6\ntrainings = 12"))
    assert found == Privacy(unit="record", epsilon=3.0, delta=1e-6, clip=1.0, trainings=12)


def asked(run_file: str, kind: str) -> Question:
    """Return a question of a run's selector, as in the instruction for a client."""
    plan = draw_up(run_file, source="run.toml")
    ask = Ask(rows=np.zeros(1, np.int64), kind=kind)
    model = ModelReference()
    return question_instruction(plan, "i", "run", 1, "client-0", ask, model, None).question


def test_question_about_data_has_the_noise_accounted_for_in_training() -> None:
    run_file = text("epsilon = 3\nanswer_clip = 2.0", selector="pow-d")
    noise = asked(run_file, "loss").privacy
    assert noise == instructed(run_file)
    assert (noise.answers, noise.answer_clip, noise.answer_noise_multiplier) == (30, 2.0, 0.0)
    run_file = text("noise_multiplier = 1\nanswer_noise_multiplier = 25", selector="flash")
    assert asked(run_file, "context").privacy.answer_noise_multiplier == 25.0


def test_question_that_does_not_read_data_has_no_noise() -> None:
    assert not asked(text(selector="refl"), "availability").HasField("privacy")
    without = text(selector="pow-d").replace("[privacy]\nnoise_multiplier = 1.5", "")
    assert not asked(without, "loss").HasField("privacy")


def test_instruction_of_a_run_without_a_privacy_table_has_no_noise() -> None:
    assert instructed(text().replace("[privacy]\nnoise_multiplier = 1.5", "")) is None


@pytest.mark.parametrize(
    ("run_file", "words"),
    [
        (text(""), "either `noise_multiplier` or `epsilon`"),
        (text("noise_multiplier = 1\nepsilon = 1"), "either `noise_multiplier` or `epsilon`"),
        (text("noise_multiplier = 1\ntrainings = 3"), "`trainings` needs"),
        (text('unit = "household"\nepsilon = 1'), "record' or 'client'"),
        (text('noise = "coordinator"\nepsilon = 1'), 'set unit = "client"'),
        (text("epsilon = 1\nclip_quantile = 0.5"), '`clip_quantile` needs unit = "client"'),
        (text(selector="pow-d"), "does not set the noise of the answers; set privacy.answer_noi"),
        (text(selector="hcsfed"), "hcsfed asks clients for sketch"),
        (text("noise_multiplier = 1\nanswers = 3"), "`answers` needs"),
        (text(selector="oort"), "oort wants utility reported"),
        (text(table='profiles.disclosure = "exact"', selector="kl"), 'disclosure = "exact" is not'),
        (text(table='profiles.sum_mode = "exact"', selector="kl"), 'sum_mode = "exact" is not'),
        (text(strategy="fedbio"), "clients compute tensors from records without noise"),
        (
            text(
                strategy="fedconcat",
                table=f'{CONCATENATION}\n[profiles]\ndisclosure = "exact"',
            ),
            'profiles.disclosure = "exact" is not compatible',
        ),
        (text(table='personal.method = "ditto"'), "ditto"),
        (text(table="evaluation.fine_tune_epochs = 1"), "fine_tune_epochs = 0"),
        (text(table="training.validation_share = 0.1"), "validation_share"),
        (text(table="training.kept_epochs = 1"), "kept_epochs"),
    ],
)
def test_settings_that_release_data_without_noise_are_refused_before_the_run(
    run_file: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        draw_up(run_file, source="run.toml")


@pytest.mark.parametrize("selector", ["uniform", "fedentopt", "refl"])
@pytest.mark.parametrize("strategy", ["fedavg", "fednova", "median", "scaffold"])
def test_selectors_and_strategies_that_use_only_noised_values_are_accepted(
    selector: str, strategy: str
) -> None:
    assert instructed(text(selector=selector, strategy=strategy)) is not None


def test_record_noise_is_accepted_with_secure_aggregation() -> None:
    run_file = text(table="secure_aggregation = true").replace("round = 2", "round = 7")
    assert instructed(run_file) is not None


def test_record_noise_is_accepted_with_fedconcat() -> None:
    assert instructed(text(strategy="fedconcat", table=CONCATENATION)) is not None


@pytest.mark.parametrize("capable", [True, False])
def test_trainer_without_the_privacy_capability_is_refused(
    capable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PLUGINS)
    if capable:
        trainer = import_module("potluck_trainers").Descent
        monkeypatch.setattr(trainer, "capabilities", frozenset({Capability.PRIVACY}))
        assert instructed(text().replace('"digits"', '"line"')) is not None
        return
    with pytest.raises(ConfigurationError, match=r"does not declare the capability `privacy`"):
        draw_up(text().replace('"digits"', '"line"'), source="run.toml")


# Noise at the coordinator ----------------------------------------------------------------------

AT_COORDINATOR = 'unit = "client"\nnoise = "coordinator"\nnoise_multiplier = 1.0'


def test_run_with_noise_at_the_coordinator_sends_no_noise_settings_to_hosts() -> None:
    plan = draw_up(text(AT_COORDINATOR), source="run.toml")
    assert plan.path is plugins.find(plugins.UPDATE_PATHS, NOISED)
    assert instructed(text(AT_COORDINATOR)) is None
    claim = privacy_claim(plan.run_file.model_dump(exclude_none=True))
    assert "the coordinator and its operators see each update" in claim


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"table": "secure_aggregation = true"}, "can't clip updates that it can't see"),
        ({"table": "host_sums.enabled = true"}, "can't clip single updates in a sum"),
        ({"table": "round.late_updates.rounds = 1"}, "late_updates.rounds = 0"),
        (
            {"table": 'profiles.disclosure = "exact"', "selector": "kl"},
            "discloses counts of records",
        ),
        ({"selector": "feddiverse"}, "needs triplet of each client"),
        ({"selector": "pow-d"}, "pow-d asks clients for loss"),
        ({"selector": "oort"}, "oort wants utility reported"),
        ({"selector": "greedyfed"}, "greedyfed measures means"),
        ({"selector": "everyone"}, "has all clients train"),
        ({"strategy": "scaffold"}, "corrects the single steps"),
        ({"strategy": "median"}, "median .* reads single updates"),
        ({"strategy": "clipped-mean"}, "reads single updates"),
        ({"strategy": "fednova"}, "counts the single steps"),
        ({"strategy": "fedconcat"}, "fedconcat"),
    ],
)
def test_settings_that_use_values_without_noise_are_refused_in_private_runs(
    changes: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        draw_up(text(AT_COORDINATOR, **changes), source="run.toml")


@pytest.mark.parametrize("selector", ["uniform", "round-robin", "fedentopt", "kl", "refl"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam"])
def test_selectors_without_exact_data_are_accepted_with_noise_at_the_coordinator(
    selector: str, strategy: str
) -> None:
    assert draw_up(text(AT_COORDINATOR, selector=selector, strategy=strategy), source="run.toml")


def test_training_metrics_are_dropped_in_runs_with_noise_at_the_coordinator() -> None:
    plan = draw_up(text(AT_COORDINATOR), source="run.toml")
    message = transfer_pb2.TrainingReport(samples=9, steps=3, loss=0.25)
    found = report_said(plan, message)
    assert (found.samples, found.loss, found.measures) == (9, None, {})


def test_running_statistics_are_refused_with_noise_at_the_coordinator() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    arrays = state_arrays(network)
    with pytest.raises(ConfigurationError, match=r"running statistics \('1'\).*group"):
        check_noised_model(network, Layout.of(arrays))
    trained = {name: each for name, each in arrays.items() if name.startswith("0.")}
    check_noised_model(network, Layout.of(trained))


@pytest.mark.parametrize(
    ("table", "on_clients", "refused"),
    [
        ('stop = {measure = "accuracy", patience = 3}', True, "stop.measure"),
        ('stop = {measure = "accuracy", patience = 3}', False, ""),
        ('retention.keep_best = "accuracy"', True, "retention.keep_best"),
        ("evaluation.every = 1", True, ""),
    ],
)
def test_client_evaluations_that_choose_a_model_are_refused_with_noise(
    table: str, on_clients: bool, refused: str
) -> None:
    plan = draw_up(text(AT_COORDINATOR, table=table), source="run.toml")
    expected = pytest.raises(ConfigurationError, match=refused) if refused else nullcontext()
    with expected:
        check_noised_evaluation(plan.run_file, on_clients=on_clients)


def test_batch_normalisation_is_refused_with_a_remedy() -> None:
    class Normalised(Digits):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    with pytest.raises(ConfigurationError, match=r"batch normalisation .* group"):
        check_private_training(LocalTraining(), Normalised(), source="run.toml")


CLIENTS = 'unit = "client"\nnoise_multiplier = 4'
MASKED = "secure_aggregation = true\nclients_per_round = 7"


def whole(privacy: str = CLIENTS, *, table: str = MASKED, **parts: str) -> str:
    """Return the text of a run file with noise for whole clients."""
    return text(privacy, table=table, **parts).replace("clients_per_round = 2\n", "")


def test_client_noise_makes_all_update_weights_equal() -> None:
    plan = draw_up(whole(), source="run.toml")
    work = check_instruction(plan, "i", "run", 1, "client-0", b"").check.train
    assert work.weighting == WEIGHTING_EQUAL


def test_coordinator_computes_the_noise_multiplier_of_client_noise() -> None:
    found = instructed(whole(f"{CLIENTS}\nclip = 0.5"))
    assert found == Privacy(
        unit="client", noise="clients", noise_multiplier=4, delta=1e-5, clip=0.5, trainings=30
    )
    found = instructed(whole('unit = "client"\nepsilon = 2\ntrainings = 10'))
    assert found is not None
    assert (found.epsilon, found.trainings) == (2.0, 10)
    assert 5 < found.noise_multiplier < 10


@pytest.mark.parametrize(
    ("run_file", "words"),
    [
        (whole(table="clients_per_round = 7"), "set secure_aggregation = true"),
        (whole(strategy="fednova"), "fednova .* counts the single steps"),
        (whole(strategy="scaffold"), "scaffold"),
        (whole(strategy="median"), "median reads single updates"),
        (whole(selector="pow-d"), "pow-d asks clients for loss"),
        (whole(selector="oort"), "oort wants utility"),
        (whole(table=f'{MASKED}\npersonal.method = "ditto"'), "ditto"),
        (whole(table=f"{MASKED}\nevaluation.fine_tune_epochs = 1"), "fine_tune_epochs = 0"),
        (whole('unit = "client"\nepsilon = 1e-9'), "no noise .* gives ε = 1e-09"),
    ],
)
def test_settings_that_client_noise_does_not_protect_are_refused_before_the_run(
    run_file: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        draw_up(run_file, source="run.toml")


@pytest.mark.parametrize("selector", ["uniform", "fedentopt"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam"])
def test_strategies_that_take_plain_means_are_accepted_with_client_noise(
    selector: str, strategy: str
) -> None:
    assert instructed(whole(selector=selector, strategy=strategy)) is not None


def test_running_statistics_are_refused_with_client_noise() -> None:
    class Normalised(Digits):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    run_file = parse_run_file(whole(), source="run.toml")
    with pytest.raises(ConfigurationError, match=r"running statistics .*resnet18-gn"):
        check_private_clients(run_file, Normalised(), source="run.toml")
