"""Run files as the coordinator completes and checks them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from potluck.common.disclosure import Mode
from potluck.common.errors import ConfigurationError, RunError
from potluck.common.learning.triplet import TripletSettings
from potluck.common.run_file.runfile import example_run_file
from potluck.common.signal import signal_named
from potluck.server.plan.plan import draw_up
from potluck.server.select.selection_checks import check_declared, check_selection
from potluck.server.selection import Population, Selection, SelectionContext
from potluck.server.selectors.kl import KullbackLeibler
from potluck.server.selectors.pyramidfl import PyramidFL
from potluck.server.state import State

RUN_FILE = """
[task]
name = "colored-digits"
[selector]
name = "feddiverse"
[profiles.triplet]
"""


def asked(text: str) -> TripletSettings | None:
    request = signal_named("triplet").request(draw_up(text, source="test").run_file.profiles)
    assert request.mode is Mode.NOISY_TRIPLET
    return request.settings


def test_triplet_profile_request_uses_the_settings_the_task_recommends() -> None:
    recommended = TripletSettings(attribute_learning_rate=0.1, attribute_steps=100)
    assert asked(RUN_FILE) == recommended
    example = example_run_file().replace('"digits"', '"colored-digits"')
    assert asked(example) == recommended
    assert asked(RUN_FILE + "q = 0.5\nattribute_steps = 10") == recommended.model_copy(
        update={"q": 0.5, "attribute_steps": 10}
    )


def test_pretraining_settings_come_from_the_run_file() -> None:
    text = RUN_FILE + "pretraining_rounds = 3\npretraining_participation = 'all'"
    settings = draw_up(text, source="test").run_file.profiles.triplet
    assert (settings.pretraining_rounds, settings.pretraining_participation) == (3, "all")
    assert settings.attribute_steps == 100
    assert asked(text) == asked(RUN_FILE)  # the pretrained model's digest stands for these settings


def test_unknown_triplet_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="attribute_step"):
        draw_up(RUN_FILE + "attribute_step = 3", source="test")


def test_training_setting_recommended_by_a_selector_is_the_default() -> None:
    def kept_back(selector: str, training: str = "") -> float:
        text = f'[task]\nname = "digits"\n[selector]\nname = "{selector}"\n[training]\n{training}'
        return draw_up(text, source="test").training.validation_share

    assert kept_back("uniform") == 0.0
    assert kept_back("flash") == 0.1
    assert kept_back("flash", "validation_share = 0.2") == 0.2


def test_selector_declares_the_values_that_clients_report() -> None:
    text = '[task]\nname = "digits"\n[selector]\nname = "{}"\n'
    assert draw_up(text.format("oort"), source="test").reports == {"utility"}
    assert draw_up(text.format("uniform"), source="test").reports == frozenset()


def test_client_paces_are_drawn_only_on_a_virtual_clock() -> None:
    clock = "[virtual_clock]\nenabled = {}\ndeadline_seconds = 50\n"
    simulated, real = (
        draw_up(RUN_FILE + clock.format(value), source="test") for value in ("true", "false")
    )
    assert simulated.client_pace(1, "a") > 1.0
    assert real.client_pace(1, "a") == 0.0
    assert (simulated.rules.simulated, simulated.rules.simulated_deadline) == (True, 50.0)
    assert not real.rules.simulated


def test_quotas_of_wrong_shape_are_refused() -> None:
    population = Population(
        ids=["a", "b"],
        classes=2,
        samples=np.array([4, 4]),
        label_counts=np.array([[3.0, 1.0], [1.0, 3.0]]),
    )
    rows = np.arange(2)
    context = SelectionContext(round=1, seed=0, count=2, population=population, available=rows)
    selection = KullbackLeibler(truncate=True).select(State(), context)
    assert isinstance(selection, Selection)
    check_selection(selection, context, "kl")
    assert selection.quotas is not None
    for wrong in (selection.quotas[:1], -selection.quotas, selection.quotas * np.nan):
        with pytest.raises(RunError, match=r"'kl' must return quotas.*2 clients × 2 classes"):
            check_selection(dataclasses.replace(selection, quotas=wrong), context, "kl")


def test_work_per_client_is_refused_if_invalid_or_not_declared_by_the_selector() -> None:
    population = Population(ids=["a", "b"], classes=2, samples=np.array([4, 4]))
    rows, names = np.arange(2), ["v", "w"]
    context = SelectionContext(
        round=1, seed=0, count=2, population=population, available=rows, tensors=names
    )
    plain = Selection(rows=rows, reasons=["first", "second"])
    sound = dataclasses.replace(plain, epochs=np.array([1, 9]), dropped=[{"v"}, ()])
    check_selection(sound, context, "mine")
    for epochs in ([1], [1, 0], [1, 2.5], [1, 10**7]):
        with pytest.raises(
            RunError, match="'mine' must return a whole number of epochs from 1 to 1000000"
        ):
            check_selection(dataclasses.replace(plain, epochs=np.array(epochs)), context, "mine")
    wrong: list[list[set[str]]] = [[{"v"}], [{"v"}, {"v", "w"}], [{"u"}, {"v"}]]
    for dropped in wrong:
        with pytest.raises(RunError, match=r"'mine' must return, .* some of the 2 param"):
            check_selection(dataclasses.replace(plain, dropped=dropped), context, "mine")
    check_declared(PyramidFL(prolong=True, drop=True), sound, "mine")
    with pytest.raises(RunError, match="without declaring `sets_epochs`; set this attribute"):
        check_declared(PyramidFL(drop=True), sound, "mine")
    with pytest.raises(RunError, match="without declaring `drops_tensors`; set this"):
        check_declared(PyramidFL(prolong=True), sound, "mine")
    limited = dataclasses.replace(plain, quotas=np.full((2, 3), np.inf))
    check_declared(KullbackLeibler(truncate=True), limited, "mine")
    with pytest.raises(RunError, match="without declaring `sets_quotas`; set this attribute"):
        check_declared(KullbackLeibler(), limited, "mine")


def test_personal_models_and_kept_tensors_together_are_refused() -> None:
    both = 'task = {name = "digits"}\npersonal = {method = "ditto"}\nmodel = {keep = ["3.*"]}\n'
    with pytest.raises(ConfigurationError, match="remove one of them"):
        draw_up(both, source="test")
    plan = draw_up(both.replace("model = ", "#"), source="test")
    assert plan.kept == ["personal"]
    assert plan.client_models == ["personal_"]
