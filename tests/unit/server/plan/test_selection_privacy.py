"""The table of selectors in runs with noise agrees with the refusals, and with its page."""

from typing import cast

import pytest

from compatibility_table import built_in
from potluck.common.errors import ConfigurationError
from potluck.common.settings import plugins
from potluck.server.plan.plan import draw_up
from potluck.server.plan.selection_privacy import (
    Protection,
    SelectionVerdict,
    Treatment,
    verdict_on,
)
from potluck.server.selection import Selector
from reference_pages import SELECTION, marked, noise_table

NAMES = built_in(plugins.SELECTORS)
RUN = """
task.name = "digits"
privacy.noise_multiplier = 5.0
clients_per_round = 20
selector.name = "{name}"
{more}
"""
OF_RECORDS = "privacy.answer_noise_multiplier = 20.0"
OF_CLIENTS = 'privacy.unit = "client"'
SETTINGS = {
    "record": (Protection.RECORD, OF_RECORDS),
    "client": (Protection.CLIENT, f"secure_aggregation = true\n{OF_CLIENTS}"),
    "client, at the coordinator": (
        Protection.CLIENT,
        f'{OF_CLIENTS}\nprivacy.noise = "coordinator"',
    ),
}
"""The protected unit and the settings of each kind of run with noise, by the kind's name."""
ASKING = (
    "afl",
    "fedcor",
    "fedlecc",
    "feel",
    "flash",
    "neural-bandit",
    "ocs",
    "pow-d",
    "restless-bandit",
    "tifl",
)
WITHOUT_DATA = {
    "clustered-sampling",
    "dc-random",
    "everyone",
    "fedcs",
    "refl",
    "round-robin",
    "uniform",
}


def verdict(name: str, unit: Protection) -> SelectionVerdict:
    return verdict_on(cast(Selector, plugins.find(plugins.SELECTORS, name)()), name, unit)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("unit", "settings"), SETTINGS.values(), ids=SETTINGS.keys())
def test_run_with_a_selector_refused_under_noise_is_refused_with_reason_and_remedy(
    name: str, unit: Protection, settings: str
) -> None:
    found = verdict(name, unit)
    added = "\nselector.added = 2" if name == "dc-exhaustive" else ""
    text = RUN.format(name=name, more=settings + added)
    if found.treatment is not Treatment.REFUSED:
        assert draw_up(text, source="run.toml").run_file.selector.name == name
        return
    with pytest.raises(ConfigurationError) as refused:
        draw_up(text, source="run.toml")
    message = refused.value.message
    assert f"selector {name} is not compatible with [privacy]" in message
    assert message == f"run.toml: {found.refusal}"
    assert found.reason in message
    assert "; choose a selector" in message
    selector = cast(Selector, plugins.find(plugins.SELECTORS, name)())
    if selector.asks_questions:  # the refusal names a question
        assert any(asked in found.reason for asked in selector.asks_questions)


def test_selectors_that_ask_noised_questions_are_charged_privacy_loss() -> None:
    charged = {
        name for name in NAMES if verdict(name, Protection.RECORD).treatment is Treatment.CHARGED
    }
    assert charged == {*ASKING}


def test_selectors_that_use_no_client_data_cost_no_privacy_loss() -> None:
    free = {name for name in NAMES if verdict(name, Protection.RECORD).reason == ""}
    assert free == WITHOUT_DATA
    for name in sorted(free - {"clustered-sampling", "everyone"}):
        assert verdict(name, Protection.CLIENT).treatment is Treatment.FREE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pow-d", "asks clients for loss"),
        ("oort", "wants utility reported"),
        ("divfl", "each update's sketch"),
        ("delta", "each update's gram"),
        ("greedyfed", "means of some updates"),
        ("fedentropy", "skips uploads"),
        ("clustered-sampling", "sets the weight"),
        ("everyone", "has all clients train"),
    ],
)
def test_client_noise_refuses_selectors_that_read_single_clients(name: str, words: str) -> None:
    found = verdict(name, Protection.CLIENT)
    assert found.treatment is Treatment.REFUSED
    assert words in found.reason


def test_client_noise_does_not_cover_profiles_and_states_this() -> None:
    found = verdict("fedentopt", Protection.CLIENT)
    assert found.treatment is Treatment.FREE
    assert "leaves out" in found.reason


def test_selector_table_on_the_page_equals_that_of_the_code() -> None:
    page = SELECTION.read_text(encoding="utf-8")
    assert marked(page, "selectors", noise_table()) == page, "run: make pages"
