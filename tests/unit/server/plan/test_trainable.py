"""Settings compatible with a task that has its own trainer, checked before any training."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.common.errors import ConfigurationError
from potluck.server.plan.plan import draw_up

PLUGINS = Path(__file__).parents[3] / "support" / "trainer_plugins"
TASK = '[task]\nname = "line"\n'
STEPWISE = '[profiles]\ndisclosure = "unsafe-stepwise"\n'


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGINS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[selector]\nname = "fedentopt"\n',
            "selector fedentopt asks clients for label_counts, which the trainer of task",
        ),
        ('[selector]\nname = "feddiverse"\n', "selector feddiverse asks clients for"),
        ('[selector]\nname = "flash"\n', "selector flash asks clients for context, which"),
        (
            f'clients_per_round = 12\n[selector]\nname = "dc-balanced"\n{STEPWISE}',
            "selector dc-balanced asks clients for label_counts",
        ),
        (
            '[strategy]\nname = "scaffold"\n',
            "strategy scaffold corrects the single steps of the built-in loop, and task",
        ),
        ('[strategy]\nname = "fednova"\n', "strategy fednova counts the single steps"),
        ('[strategy]\nname = "feddf"\n', "strategy feddf trains a classifier on the coordinator"),
        (
            '[strategy]\nname = "rhfl-logits"\n',
            "strategy rhfl-logits has groups of clients train parts of a network",
        ),
        ('[personal]\nmethod = "ditto"\n', 'personal.method = "ditto" holds the steps of the'),
        ('[objective]\nname = "fedprox"\n', "objective fedprox is a loss for the built-in loop"),
    ],
)
def test_settings_unsupported_by_the_trainer_of_the_task_are_refused(
    text: str, message: str
) -> None:
    head, _, tables = text.partition("[")
    with pytest.raises(ConfigurationError, match=message):
        draw_up(f"{head}{TASK}[{tables}", source="run file")


@pytest.mark.parametrize("selector", ["uniform", "round-robin", "pow-d", "feel", "hcsfed", "oort"])
def test_selectors_supported_by_the_trainer_of_the_task_are_accepted(selector: str) -> None:
    plan = draw_up(f'{TASK}[selector]\nname = "{selector}"\n', source="run file")
    assert list(plan.measures) == ["squared_error", "near", "loss"]
