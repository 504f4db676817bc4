"""Every selector with a quarter of the strategies, and with two objectives, in one federation.

Two hosts hold 20 clients; every combination is a run of two rounds, or is refused with the reason
that docs/reference/strategies/compatibility.md gives. The quarters differ between selectors, so
that every strategy also meets a quarter of the selectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import QUESTIONS, Federation
from support.profile_federation import profile_federation

from compatibility_table import built_in
from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import OBJECTIVES, SELECTORS, STRATEGIES, create
from potluck.rpc.v1 import operator_pb2
from potluck.server.strategy import Strategy

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]
PAGE = Path(__file__).parents[2] / "docs/reference/strategies/compatibility.md"
TWO = ("cross-entropy", "noise-robust")
PARTS = 4
"""Number of parts of the strategies; a selector trains with those of one part."""
COUNT, CLIENTS = 3, 20
ADAPTIVE = '{name="scaffold", control="gradients"}'
ADAM: tuple[list[str], list[str]] = (
    [],
    ['training.optimizer="adam"', "training.learning_rate=0.001"],
)
OPTIONS = {
    # Its default, equal weights, needs a strategy that takes weights from the selector.
    "clustered-sampling": ['selector.weights="samples"'],
    "dc-exhaustive": ["selector.added=1"],
    "delta": ['selector.weights="samples"'],
    "k-vib": ['selector.weights="samples"'],
    "ocs": ['selector.weights="samples"'],
    "osmd": ['selector.weights="samples"'],
    "feddf": ["strategy.steps=2"],
}
"""Options of selectors and strategies, by name."""
SPARED = {"fedentropy": 2, "fedpns": 1}
"""Number of uploads per round that a selector may skip, by selector."""
NEAR_THE_MEAN = {"clipped-mean", "feddf", "rhfl"}
"""Strategies that may give the model of `fedavg` here, depending on the cohort.

The noise of profiles changes cohorts. In some, no update is longer than the bound of
`clipped-mean`. `feddf` keeps the mean where distilling does not improve it. `rhfl` gives every
client the same weight in its first round.
"""
REFUSED = [
    ['strategy.name="scaffold"', 'strategy.step="fednova"'],
    ['strategy.name="scaffold"', 'strategy.step="scaffold"'],
    ['strategy.name="scaffold"', 'training.optimizer="adam"'],
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with profile_federation(
        tmp_path_factory.mktemp("matrix"),
        task="colored-digits",
        clients=CLIENTS,
        count=COUNT,
        rounds=2,
        assignments=[
            "task.public=60",
            "training.steps=1",
            "training.batch_size=8",
            "evaluation.every=0",
            "profiles.triplet.pretraining_rounds=0",
            "profiles.triplet.bias_steps=1",
            "profiles.triplet.attribute_steps=1",
            'model.name="perceptron"',
            "model.inputs=768",
            "model.hidden=[8]",
            "model.classes=2",
        ],
        disclosure={
            "signals": ["label_counts", "triplet", "interaction_matrix"],
            "questions": list(QUESTIONS),
        },
    ) as found:
        await found.until_attending()
        yield found


def two_of(objectives: Sequence[str]) -> list[str]:
    return [name for name in objectives if name in TWO]


def strategies_of(selector: str) -> list[str]:
    """Return the strategies with which a selector trains here.

    Left out are strategies that need a special model: one with tensors that the strategy changes
    itself (`one_way`), or one with parts that clients train (`parts`). Strategies that train on the
    coordinator (`trains`) meet a twelfth of the selectors: each of their rounds starts a process,
    which imports torch.
    """
    place = built_in(SELECTORS).index(selector)
    made = {name: create(Strategy, name, {}) for name in built_in(STRATEGIES)}
    suited = [n for n, each in made.items() if not each.one_way and not each.parts]
    return [
        name
        for number, name in enumerate(suited)
        if (number + place) % (3 * PARTS if made[name].trains else PARTS) == 0
    ]


async def test_every_strategy_meets_several_selectors() -> None:
    met = Counter(name for selector in built_in(SELECTORS) for name in strategies_of(selector))
    assert len(met) >= 13
    assert min(met.values()) >= 3


@pytest.mark.parametrize("selector", built_in(SELECTORS))
async def test_selector_trains_with_a_quarter_of_the_strategies_and_two_objectives(
    federation: Federation, selector: str
) -> None:
    models = []
    plain, other = two_of(built_in(OBJECTIVES))
    combinations = [(strategy, plain) for strategy in strategies_of(selector)]
    combinations += [("fedavg", other)]
    assert len(combinations) >= 5
    for strategy, objective in combinations:
        run_id = await federation.start_run(
            f'selector.name="{selector}"',
            f'strategy.name="{strategy}"',
            f'objective.name="{objective}"',
            *OPTIONS.get(selector, []),
            *OPTIONS.get(strategy, []),
        )
        model = await federation.finished(run_id)
        if strategy not in NEAR_THE_MEAN:
            models.append(model)
        history = await federation.history(run_id)
        members = [[member.state for member in entry.members] for entry in history]
        cohort = CLIENTS if selector == "everyone" else COUNT
        for states in members:
            spared = states.count(operator_pb2.MEMBER_STATE_SPARED)
            assert spared <= SPARED.get(selector, 0), (strategy, objective)
            included = states.count(operator_pb2.MEMBER_STATE_INCLUDED)
            assert included + spared == cohort, (strategy, objective)
    # With three updates, median and trimmed mean are equal.
    assert len(set(models)) >= len(models) - 1 >= 2, "strategies or objectives make no difference"


@pytest.mark.parametrize("selector", built_in(SELECTORS)[::PARTS])
async def test_selector_trains_with_a_strategy_for_client_groups(
    federation: Federation, selector: str
) -> None:
    """FedConcat, by clusters of label counts: a round of encoders, then one of the head."""
    perceptron = 'name="perceptron", inputs=768, hidden=[8], classes=2'
    run_id = await federation.start_run(
        f'selector.name="{selector}"',
        'strategy={name="fedconcat", groups=2, rounds=1}',
        f'model={{name="concatenation", groups=2, of={{{perceptron}}}}}',
        *OPTIONS.get(selector, []),
    )
    await federation.finished(run_id)


@pytest.mark.parametrize("selector", built_in(SELECTORS)[:: 6 * PARTS])
async def test_selector_trains_with_client_specific_models(
    federation: Federation, selector: str
) -> None:
    """RHFL, with models of two kinds that learn from one another on public samples. Only a
    few selectors are tested, since each of its rounds starts a process that imports torch."""
    await own_models(federation, selector)


async def test_client_specific_models_are_sent_as_int8_deltas(federation: Federation) -> None:
    await own_models(federation, "uniform", 'transport.up={encoding="int8", delta=true}')


async def own_models(federation: Federation, selector: str, *assignments: str) -> None:
    kinds = ", ".join(
        f'{{name="perceptron", inputs=768, hidden=[{width}], classes=2}}' for width in (8, 4)
    )
    run_id = await federation.start_run(
        f'selector.name="{selector}"',
        f'strategy={{name="rhfl-logits", clients={CLIENTS}}}',
        f'model={{name="ensemble", members={CLIENTS}, of=[{kinds}]}}',
        *OPTIONS.get(selector, []),
        *assignments,
    )
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert len({entry.model_blake3 for entry in history}) == 2


async def test_terms_of_an_objective_are_added(federation: Federation) -> None:
    """A table is a list of one term, and a single term is added to cross-entropy."""
    both = '[{name = "noise-robust"}, {name = "fedprox", mu = 0.5}]'
    # Several steps, since the proximal term is 0 in the first one.
    several = ('selector.name="uniform"', "training.steps=3")
    models = {
        objective: await federation.finished(
            await federation.start_run(*several, f"objective={objective}")
        )
        for objective in (
            both,
            '{name = "noise-robust"}',
            '[{name = "noise-robust"}]',
            '{name = "fedprox", mu = 0.5}',
            '[{name = "cross-entropy"}, {name = "fedprox", mu = 0.5}]',
        )
    }
    composed, single, listed, term, spelled_out = models.values()
    assert single == listed
    assert term == spelled_out
    assert len({composed, single, term}) == 3
    # FLASH, combined with other strategies.
    for strategy in ('{name="fedavg"}', '{name="fednova"}', ADAPTIVE):
        names = ('selector.name="flash"', f"strategy={strategy}", f"objective={both}")
        await federation.finished(await federation.start_run(*names, *ADAM[strategy == ADAPTIVE]))


@pytest.mark.parametrize("assignments", REFUSED, ids=lambda each: each[-1])
async def test_incompatible_plugins_are_refused_with_the_documented_reason(
    federation: Federation, assignments: list[str]
) -> None:
    before = len(await federation.operator.list_runs())
    with pytest.raises(ConfigurationError) as refusal:
        await federation.start_run(*assignments)
    reason = refusal.value.message.removeprefix("run file: ").removeprefix("strategy scaffold ")
    explained = reason.rpartition("are not compatible: ")[2]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert any("| refused" in line and f" {explained} |" in line for line in lines), explained
    assert len(await federation.operator.list_runs()) == before


async def test_fednova_with_adam_trains_and_warns(federation: Federation) -> None:
    run_id = await federation.start_run('strategy.name="fednova"', 'training.optimizer="adam"')
    await federation.finished(run_id)
    log = federation.files.folder / "coordinator.log"
    assert "fednova with optimizer adam: FedNova's effective number of steps" in log.read_text()
