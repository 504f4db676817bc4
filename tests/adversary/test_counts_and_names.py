"""Counts that give one sample the weight of several, and names that would be links in a card."""

from __future__ import annotations

from typing import Any

import pytest
from markdown_it import MarkdownIt
from support.operator_service import status
from support.trainer_plugins.potluck_trainers import SAMPLES, CountedDescent, CountedLine

from potluck.client.training.own_training import OwnTraining
from potluck.client.training.task_training import LoadedTask
from potluck.common.errors import TrainerError
from potluck.common.names import ClientId
from potluck.deploy.cards.card_source import make_card
from potluck.rpc.v1.operator_pb2 import RunState

EVIL = "https://evil.example"


class SeveralLabels(CountedDescent):
    """Counts each sample in both classes, so that noise for one label hides no sample."""

    def label_counts(self, data: Any) -> list[int]:
        return [SAMPLES, SAMPLES]


def test_label_counts_with_a_sample_counted_twice_are_not_disclosed() -> None:
    honest, several = (
        OwnTraining(LoadedTask("line", CountedLine(), "cpu", None, None), trainer)
        for trainer in (CountedDescent(""), SeveralLabels(""))
    )
    assert sum(honest.label_counts(ClientId("client-0"))) == SAMPLES
    with pytest.raises(TrainerError, match="count each sample in one class at most"):
        several.label_counts(ClientId("client-0"))


@pytest.mark.parametrize(
    "name", [f"[a]({EVIL})", f"![a]({EVIL}/pixel.png)", f"`a` <img src={EVIL}>"]
)
def test_run_name_in_a_model_card_is_neither_link_nor_image(name: str) -> None:
    text = f"""
        rounds = 1
        task = {{name = "digits"}}
        selector = {{name = "{name}"}}
    """
    row = status(RunState.RUN_STATE_FINISHED).status
    card = make_card(row, [], text, []).model_copy(update={"name": name})
    html = MarkdownIt("commonmark").enable("table").render(card.markdown())
    assert "evil.example" in html
    assert not any(
        f'{each}="{EVIL}' in html or f"{each}={EVIL}>" in html for each in ("href", "src")
    )
