"""Selector states pass through the real store and the real files after every round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.populations import population, rounds
from support.stored import AT, RUN, UPDATE, commit, digest

from potluck.common.learning.heterogeneity import triplets
from potluck.common.settings.plugins import SELECTORS, installed
from potluck.server.live.models import States, read_states, write_states
from potluck.server.plan.plan import draw_up
from potluck.server.selection import Population, Selection
from potluck.server.state import State
from potluck.server.store import AttemptKey, MemberState, Store
from potluck.server.store.model_files import ModelFiles

ROUNDS, COUNT, CLIENTS = 8, 5, 20


def federation() -> Population:
    generator = np.random.default_rng(3)
    matrices = generator.integers(0, 30, (CLIENTS, 3, 2)).astype(np.float64)
    return population(
        CLIENTS,
        classes=3,
        label_counts=matrices.sum(axis=2),
        triplet_rows=triplets(matrices),
        matrices=matrices,
    )


class Coordinators:
    """Simulates successive coordinators: each commits a round, the next one reads the stored
    state."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'potluck.db'}"
        self.folder = folder / "models"
        self.folder.mkdir()
        self.round = 0
        with Store.open(self.url) as store:
            store.add_run(RUN)
            store.set_initial_model(RUN.run_id, digest(0), AT)

    def files(self) -> ModelFiles:
        return ModelFiles(self.folder)

    def through(self, state: State) -> State:
        """Return the state as the next coordinator reads it; the first one is not stored before a
        commit."""
        if self.round:
            key = AttemptKey(RUN.run_id, self.round, 1)
            written = write_states(self.files(), States(selector=state, strategy=State()))
            row = replace(
                commit(key, ["a"]), state_blake3=written, selector_scalars=dict(state.scalars)
            )
            with Store.open(self.url) as store:
                store.begin_attempt(key, [0], AT)
                store.set_cohort(key, [("a", "h", "because")])
                store.set_member(key, "a", MemberState.RECEIVED, update=UPDATE)
                store.commit_round(row)
            with Store.open(self.url) as store:
                last = store.last_round(RUN.run_id)
            assert last is not None
            scalars = (last.selector_scalars, last.strategy_scalars)
            state = read_states(self.files(), last.state_blake3, *scalars).selector
        self.round += 1
        return state


@pytest.mark.parametrize("name", installed(SELECTORS))
def test_selector_selects_the_same_if_the_coordinator_restarts_each_round(
    name: str, tmp_path: Path
) -> None:
    options = "added = 2" if name.startswith("dc-") else ""
    run_file = f'[task]\nname = "colored-digits"\n[selector]\nname = "{name}"\n{options}'
    selector = draw_up(run_file, source="test").selector
    straight = list(rounds(selector, federation(), COUNT, ROUNDS))
    coordinators = Coordinators(tmp_path)
    killed = list(rounds(selector, federation(), COUNT, ROUNDS, store=coordinators.through))
    assert coordinators.round == ROUNDS + 1
    assert [chosen(each) for each in killed] == [chosen(each) for each in straight]


def chosen(selection: Selection) -> tuple[list[int], list[str]]:
    return selection.rows.tolist(), list(selection.reasons)
