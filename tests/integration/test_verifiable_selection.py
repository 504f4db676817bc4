"""`potluck audit-selection` on runs of a real coordinator with real hosts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.sum_federation import EXACT, Members, SumFederation, sum_federation
from typer.testing import CliRunner

from potluck.common.errors import ConfigurationError
from potluck.server.store import RunState
from potluck.verifiable.audit_command import app
from potluck.verifiable.coordinator.selection_audit import AuditedSelection, SelectionAudit

CLIENTS = 6
RUN = f"""
rounds = 3
clients_per_round = 3
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 2}}
evaluation = {{every = 0}}
"""
VERIFIABLE = RUN + "selection = {verifiable = true}\n"
VERIFIED = RUN + "selection = {verifiable = true, hosts_verify = true}\n"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SumFederation]:
    members = Members.make(tmp_path_factory.mktemp("members"), CLIENTS)
    folder = tmp_path_factory.mktemp("federation")
    async with sum_federation(members, folder) as found:
        await found.start(disclosure=EXACT.model_copy(update={"questions": ("loss",)}))
        yield found
        await found.stack.aclose()


async def finished(federation: SumFederation, run_file: str) -> str:
    row = await federation.finished(run_file)
    assert row.state is RunState.FINISHED, row.reason
    return row.run_id


def audited(federation: SumFederation, run_id: str) -> list[AuditedSelection]:
    return list(SelectionAudit(federation.coordinator.config, run_id).results())


def database(federation: SumFederation) -> Path:
    return federation.coordinator.config.state_directory / "potluck.sqlite3"


@pytest.mark.parametrize("selector", ["uniform", "fedentopt", "pow-d", "oort", "divfl", "everyone"])
async def test_audit_of_an_honest_run_finds_no_difference(
    federation: SumFederation, selector: str
) -> None:
    """The selectors have no state, or need profiles, questions, reports or facts about updates."""
    asks = 'profiles = {disclosure = "noisy", epsilon = 1.0}\n' * (selector == "fedentopt")
    run_id = await finished(federation, f'{VERIFIABLE}selector = {{name = "{selector}"}}\n{asks}')
    found = audited(federation, run_id)
    assert [each.round for each in found] == [1, 2, 3]
    assert [each.differences for each in found] == [()] * 3
    assert all(each.committed and each.signatures == 3 * CLIENTS for each in found)


async def cohorts(federation: SumFederation, run_id: str) -> list[list[str]]:
    rows = await federation.coordinator.store.call(lambda store: store.rounds(run_id))
    return [[member.client_id for member in row.members] for row in rows]


async def test_masked_run_with_tag_limit_agrees(federation: SumFederation) -> None:
    """The selector may be called again because of tags, and hosts may be added to the cohort."""
    masked = VERIFIABLE.replace("clients_per_round = 3", "clients_per_round = 5")
    limits = "selector_limits = {at_most_per = {site = 5}}\nsecure_aggregation = true\n"
    found = audited(federation, await finished(federation, masked + limits))
    assert [each.differences for each in found] == [()] * 3


async def test_verifiable_run_selects_the_same_cohorts(federation: SumFederation) -> None:
    plain, verifiable = await finished(federation, RUN), await finished(federation, VERIFIABLE)
    assert await cohorts(federation, plain) == await cohorts(federation, verifiable)


async def test_audit_finds_a_changed_cohort(federation: SumFederation) -> None:
    run_id = await finished(federation, VERIFIED)
    assert all(each.agrees for each in audited(federation, run_id))
    with sqlite3.connect(database(federation)) as connection:
        connection.execute(
            "UPDATE members SET reason = 'a favour' WHERE run_id = ? AND round = 2", [run_id]
        )
    [_, second, _] = audited(federation, run_id)
    assert second.differences == (
        "the reasons stored with the round are not the reasons of the selection",
    )


async def test_audit_finds_changed_inputs(federation: SumFederation) -> None:
    run_id = await finished(federation, VERIFIABLE)
    log = federation.coordinator.config.state_directory / "selections" / f"{run_id}.jsonl"
    log.write_text(log.read_text().replace('\\"rounds\\":3', '\\"rounds\\":4', 1))
    [first, second, _] = audited(federation, run_id)
    assert first.differences == ("the inputs of the selection are not the committed inputs",)
    assert second.agrees


async def test_audit_finds_a_round_without_commitment(federation: SumFederation) -> None:
    run_id = await finished(federation, VERIFIABLE)
    log = federation.coordinator.config.state_directory / "selections" / f"{run_id}.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    [third] = [n for n, line in enumerate(lines) if '\\"round\\":3' in line and '"opening"' in line]
    log.write_text("".join(lines[:third]))
    assert [each.differences for each in audited(federation, run_id)] == [
        (),
        (),
        ("the log has no committed selection for this round",),
    ]


async def test_audit_command_exits_with_1_if_a_selection_differs(
    federation: SumFederation, tmp_path: Path
) -> None:
    run_id = await finished(federation, VERIFIED)
    settings = federation.coordinator.config
    config = tmp_path / "coordinator.toml"
    tls = settings.tls
    config.write_text(
        f"state_directory = {json.dumps(str(settings.state_directory))}\n"
        f"federation_root = {json.dumps(str(settings.federation_root))}\n"
        f"members = {json.dumps(str(settings.members))}\n"
        f"[tls]\ncertificate = {json.dumps(str(tls.certificate))}\n"
        f"key = {json.dumps(str(tls.key))}\nauthority = {json.dumps(str(tls.authority))}\n"
    )
    arguments = [run_id, "--config", str(config)]
    honest = CliRunner().invoke(app, arguments)
    assert honest.exit_code == 0, honest.output
    assert f"run {run_id} has 3 selections, of which 0 differ from the record" in honest.output
    with sqlite3.connect(database(federation)) as connection:
        connection.execute(
            "UPDATE members SET client_id = 'client-x' WHERE run_id = ? AND round = 1 "
            "AND position = 0",
            [run_id],
        )
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 1
    [first, *others] = map(json.loads, found.output.splitlines())
    assert not first["agrees"]
    assert "client-x" in first["differences"][0]
    assert all(each["agrees"] for each in others)


async def test_audit_of_a_run_without_commitments_is_refused(federation: SumFederation) -> None:
    run_id = await finished(federation, RUN.replace("rounds = 3", "rounds = 1"))
    with pytest.raises(ConfigurationError, match="did not commit to its selections"):
        audited(federation, run_id)


async def test_verifiable_run_with_hidden_selector_inputs_is_refused(
    federation: SumFederation,
) -> None:
    with pytest.raises(ConfigurationError, match="hosts can't recompute selector 'fedentopt'"):
        await federation.coordinator.start_run(f'{VERIFIED}selector = {{name = "fedentopt"}}\n')
