"""The cards of workloads, and the page that shows them."""

import re

import pytest
from support.repository import ROOT
from typer.testing import CliRunner

from potluck.experiments.benchmark.tier import tier_named
from potluck.experiments.commands.data_commands import app
from potluck.experiments.grid.definition import merged
from potluck.experiments.reports.workload_card import card_markdown, workload_card

PAGE = (ROOT / "docs" / "reference" / "workloads.md").read_text()


def test_the_page_has_the_cards_that_the_code_makes() -> None:
    """Checked are the workloads of the standard tier that need no files."""
    tier = tier_named("standard")
    tasks = [merged(tier.run, each.run)["task"] for each in tier.workloads.values()]
    own = [task for task in tasks if task["name"] in ("heart", "digits", "colored-digits")]
    assert len(own) == 8
    for task in own:
        options = {key: value for key, value in task.items() if key != "name"}
        card = card_markdown(workload_card(task["name"], options, None))
        assert f"\n{card}\n" in PAGE


def test_a_card_has_the_counts_of_its_clients() -> None:
    card = workload_card("heart", {}, None)
    counts = [client.label_counts for client in card.description.clients]
    total = sum(map(sum, counts))
    assert card.names == ("cleveland", "hungarian", "switzerland", "va")
    assert card.samples == (87.0, 173.0, 213.0)
    assert card.majority == pytest.approx(max(map(sum, zip(*counts, strict=True))) / total)
    assert card.own_majority == pytest.approx(sum(max(c) / sum(c) for c in counts) / 4)
    ill = sum(c[1] for c in counts) / total
    assert card.distances[2] == pytest.approx(max(abs(c[1] / sum(c) - ill) for c in counts))
    assert (card.inputs, card.parameters) == ((31,), 64)


def test_hospitals_as_groups_are_not_attributes() -> None:
    """Like a task with an attribute, the task has two classes and four groups."""
    assert workload_card("heart", {}, None).description.metrics.gai is None


def test_a_task_with_attributes_has_their_metrics() -> None:
    card = card_markdown(workload_card("colored-digits", {}, None))
    assert "| GCI, GAI, GSC | 0.000, 0.000, 0.160 |" in card


def test_the_command_prints_the_options_in_the_title() -> None:
    found = CliRunner().invoke(app, ["card", "digits", "-o", "clients=12"])
    assert found.exit_code == 0, found.output
    assert found.output.startswith("## digits, `clients = 12`\n")
    assert "| clients | 12 |" in found.output


@pytest.mark.parametrize("tier", ["smoke", "standard", "full"])
def test_the_page_states_what_there_is_to_learn_in_each_workload_of_a_tier(tier: str) -> None:
    """The data of `writers` are not at hand."""
    for name in set(tier_named(tier).workloads) - {"writers"}:
        assert re.search(rf"(?m)^- \w.* \(`{name}` in .*`{tier}`.*\)\.$", PAGE), name
