"""Selectors that learn from clients in every round, and a coordinator that is killed.

Durations are simulated, since measured ones differ from one run to the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.common.learning.availability_trace import TraceSpan, trace_text
from potluck.deploy.operator.run_overrides import override
from potluck.rpc.v1 import operator_pb2

INCLUDED, SPARED = operator_pb2.MEMBER_STATE_INCLUDED, operator_pb2.MEMBER_STATE_SPARED
LEARNING = [
    ['selector.name="fedpns"', "clients_per_round=4", "selector.share=0.5"],
    ['selector.name="clustered-sampling"', 'selector.by="updates"', "selector.unbiased=true"],
    ['selector.name="delta"', "rounds=6"],
    ['selector.name="divfl"', "selector.weighted=true", "rounds=6"],
    ['selector.name="hics-fl"', "rounds=6"],
    ['selector.name="greedyfed"', "rounds=6", "task.central=true"],
]
OPTIONS = {
    "fedcor": ["selector.warm_up=1", "selector.refresh=2"],
    "hics-fl": ['selector.entropies="told"', "selector.temperature=0.1"],
}
TRACE = "always.csv"
TRACED = [
    'selector.name="uniform"',
    f'virtual_clock.trace="{TRACE}"',
    "virtual_clock.deadline_seconds=10000",
    "round.quorum=1.0",
    "rounds=1",
]
"""A round that fails if a client fails. Each failed attempt takes 10,000 simulated seconds."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("selectors")
    (folder / TRACE).write_text(
        trace_text({f"client-{k}": [TraceSpan(0, 1_000_000, 1.0)] for k in range(6)})
    )
    async with crash_federation(
        folder,
        clients=6,
        count=2,
        rounds=4,
        coordinator={"data_directory": str(folder)},
        assignments=['strategy.name="fedavg"', "virtual_clock.enabled=true"],
    ) as federation:
        yield federation


async def states(federation: Federation, run_id: str) -> list[list[tuple[int, str]]]:
    """Return the states and troubles of each round's members."""
    history = await federation.history(run_id)
    return [[(member.state, member.trouble) for member in row.members] for row in history]


async def picked(federation: Federation, run_id: str) -> list[list[tuple[str, str]]]:
    """Return each round's cohort, with the reasons."""
    history = await federation.history(run_id)
    return [[(member.client_id, member.reason) for member in row.members] for row in history]


@pytest.mark.parametrize(
    "name",
    [
        "pow-d",
        "flash",
        "oort",
        "feel",
        "ocs",
        "refl",
        "hcsfed",
        "fedlecc",
        "fedcor",
        "hics-fl",
        "restless-bandit",
        "neural-bandit",
    ],
)
async def test_coordinator_killed_during_selection_gives_the_same_run(
    federation: Federation, name: str
) -> None:
    """Most selectors wait for answers that clients compute with the model; oort evaluates the
    model."""
    chosen = [f'selector.name="{name}"', *OPTIONS.get(name, [])]
    undisturbed = await federation.start_run(*chosen)
    digest = await federation.finished(undisturbed)
    federation.points.hold("forward")
    run_id = await federation.start_run(*chosen)
    await until(lambda: federation.points.reached("forward"))
    await federation.kill_coordinator()
    federation.points.release()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == digest
    assert await picked(federation, run_id) == await picked(federation, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("assignments", LEARNING, ids=lambda each: each[0].split('"')[1])
async def test_selector_state_from_updates_is_the_same_after_a_kill(
    federation: Federation, assignments: list[str]
) -> None:
    """The coordinator is killed after the selector has read the updates, before it commits the
    round."""
    undisturbed = await federation.start_run(*assignments)
    digest = await federation.finished(undisturbed)
    federation.points.note_boundaries()
    federation.points.kill("before-commit_round-4")
    run_id = await federation.start_run(*assignments)
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == digest
    assert await picked(federation, run_id) == await picked(federation, undisturbed)
    found = await states(federation, run_id)
    assert found == await states(federation, undisturbed)
    spared = {trouble for members in found for state, trouble in members if state == SPARED}
    assert bool(spared) == ("fedpns" in assignments[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("up", "boundary"),
    [
        ("", "before-commit_round-4"),
        ('encoding = "int8"\ndelta = true', "after-set_cohort-3"),
    ],
)
async def test_client_specific_work_is_the_same_after_a_kill(
    federation: Federation, up: str, boundary: str
) -> None:
    """The coordinator dies with updates in its spool that lack some tensors, or before any client
    has received its work."""
    text = (
        override(
            federation.files.run_file,
            [
                'selector.name="pyramidfl"',
                "selector.exploration=0.2",
                "selector.prolong=true",
                "selector.drop=true",
                "selector.least_dropped=0.4",
                "selector.most_dropped=0.9",
                "clients_per_round=3",
            ],
            source="test",
        ).replace("steps = 3", "epochs = 4")
        + f"\n[transport.up]\n{up}\n"
    )
    undisturbed = await federation.operator.start_run(text)
    digest = await federation.finished(undisturbed)
    said = str(await picked(federation, undisturbed))
    assert "passes" in said
    assert "leaves out 2 of 3 tensors" in said
    federation.points.note_boundaries()
    federation.points.kill(boundary)
    run_id = await federation.operator.start_run(text)
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == digest
    assert await picked(federation, run_id) == await picked(federation, undisturbed)


async def same_round_after_a_kill(
    federation: Federation, boundary: str, *assignments: str, failing: str = ""
) -> None:
    """Assert that a traced round has the same cohort, model and simulated seconds if the
    coordinator is killed at a boundary. failing: client whose training fails once in each run."""
    rows: list[operator_pb2.CommittedRound] = []
    for killed in (False, True):
        if failing:
            federation.points.fail(f"train-{failing}")
        if killed:
            federation.points.note_boundaries()
            federation.points.kill(boundary)
        run_id = await federation.start_run(*TRACED, *assignments)
        if killed:
            assert await federation.coordinator.ended() == 137
            await federation.restart_coordinator()
        await federation.finished(run_id)
        rows += await federation.history(run_id)
    undisturbed, resumed = rows
    cohorts = [[member.client_id for member in row.members] for row in rows]
    assert cohorts[0] == cohorts[1]
    assert resumed.model_blake3 == undisturbed.model_blake3
    assert resumed.seconds == undisturbed.seconds > 10_000, "no attempt failed"


@pytest.mark.slow
async def test_coordinator_killed_between_attempts_avoids_the_clients_that_failed(
    federation: Federation,
) -> None:
    usual = await federation.start_run(*TRACED)
    await federation.finished(usual)
    [[(client, _), *_]] = await picked(federation, usual)
    await same_round_after_a_kill(federation, "after-abandon_attempt-1", failing=client)


@pytest.mark.slow
async def test_coordinator_killed_in_the_third_attempt_counts_all_failed_attempts(
    federation: Federation,
) -> None:
    """Half of the clients drop out, so attempts fail until a cohort has none of them."""
    drop_outs = 'virtual_clock.drop_outs={"client-0:2"=1.0}'
    await same_round_after_a_kill(federation, "after-set_cohort-3", drop_outs, "round.attempts=9")


@pytest.mark.parametrize("weighting", ["exact", "bucketed"])
async def test_skipped_upload_discloses_no_sample_count_before_or_after_a_kill(
    federation: Federation, weighting: str
) -> None:
    """pow-d draws its candidates by the disclosed sample counts."""
    assignments = [
        'selector.name="pow-d"',
        "selector.candidates=4",
        "round.over_selection=2",
        "task.unequal=true",
        "rounds=6",
        f'weighting="{weighting}"',
    ]
    undisturbed = await federation.start_run(*assignments)
    digest = await federation.finished(undisturbed)
    history = await federation.history(undisturbed)
    assert all(any(m.state == SPARED for m in row.members) for row in history), (
        "no client is spared"
    )
    for committed in (1, 2, 3):
        federation.points.note_boundaries()
        federation.points.kill(f"after-commit_round-{committed}")
        run_id = await federation.start_run(*assignments)
        assert await federation.coordinator.ended() == 137
        await federation.restart_coordinator()
        assert await federation.finished(run_id) == digest
        assert await picked(federation, run_id) == await picked(federation, undisturbed)
    once = await federation.start_run(*assignments, "rounds=1")
    await federation.finished(once)
    [first] = await federation.history(once)
    _, profiles = await federation.operator.fetch_profiles(once)
    assert {each.client_id: each.samples for each in profiles if each.samples} == {
        member.client_id: member.samples for member in first.members if member.state == INCLUDED
    }
