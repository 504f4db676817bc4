"""A coordinator and a host without the secure-aggregation package."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.small_runs import RUN_FILE, small_run

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.report import Records
from potluck.client.handlers.sum_participant import check_masks, open_participant
from potluck.common.errors import ConfigurationError, DisclosureRefusedError, StorageError
from potluck.common.settings import plugins
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.plan.plan import draw_up
from potluck.server.store import Store

INSTRUCTION = rpc.Instruction(id="i", client_id="a")
MASKED = 'clients_per_round = 5\nsecure_aggregation = true\n[task]\nname = "digits"\nclients = 10\n'
TOTALS = RUN_FILE + '[selector]\nname = "dc-real"\n'


@pytest.fixture(autouse=True)
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the package's code but keep its entry points, as in a container image."""
    present = plugins.is_present

    def is_present(group: str, name: str) -> bool:
        return not plugins.origin(group, name).startswith("potluck.secagg") and present(group, name)

    monkeypatch.setattr(plugins, "is_present", is_present)


@pytest.mark.parametrize(
    ("run_file", "message"),
    [
        (MASKED, r"^run file: secure_aggregation = true needs .* potluck.secagg, .* install all"),
        (
            TOTALS + '[profiles]\ndisclosure = "cells"\n',
            r'profiles.disclosure = "cells" needs the package potluck.secagg, .* install all',
        ),
        (
            TOTALS.replace("= 3", "= 10") + '[profiles]\ndisclosure = "unsafe-stepwise"\n',
            r'profiles.disclosure = "unsafe-stepwise" needs the package potluck.secagg',
        ),
    ],
)
def test_run_that_needs_secure_sums_is_refused_without_the_package(
    run_file: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        draw_up(run_file, source="run file")


async def test_run_with_open_updates_starts_without_the_secagg_package(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store, TOTALS)
    assert small.run.services.sums is None
    assert small.run.selecting.eligibility.label_sums.totals is None


def test_host_that_requires_masked_updates_does_not_start_without_the_package() -> None:
    check_masks(DisclosurePolicy())
    with pytest.raises(ConfigurationError, match=r'updates = "masked" in .*; install all packages'):
        check_masks(DisclosurePolicy(updates="masked"))


async def test_host_without_the_secagg_package_refuses_secure_sums(tmp_path: Path) -> None:
    policy = DisclosurePolicy()
    sums = open_participant(policy, None, None, PrivacyBudget(tmp_path, policy))

    async def count() -> list[int]:
        raise AssertionError("the client's data were read")

    for refused in (
        sums.answer(INSTRUCTION, count),
        sums.meet(INSTRUCTION, tmp_path),
        sums.mask(INSTRUCTION, tmp_path, None, UpdateReport()),
    ):
        with pytest.raises(DisclosureRefusedError, match=r"lacks the package potluck.secagg; inst"):
            await refused
    sums.close(INSTRUCTION)


def test_spent_budget_of_a_client_with_sum_records_is_unknown_without_the_package(
    tmp_path: Path,
) -> None:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "a.jsonl").write_text('{"client": "a"}\n')
    budget = PrivacyBudget(tmp_path, DisclosurePolicy())
    assert budget.clients() == ["a"]
    assert budget.spent("b") == 0
    with pytest.raises(StorageError, match=r"ledger of secure sums of client 'a' .* install all"):
        budget.spent("a")
    with pytest.raises(StorageError, match=r"package potluck\.secagg"):
        Records(tmp_path, DisclosurePolicy()).values()


def test_plugin_whose_package_is_missing_is_not_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert plugins.is_present(plugins.UPDATE_PATHS, "masked")
    assert not plugins.is_present(plugins.UPDATE_PATHS, "sealed")
    absent = EntryPoint("masked", "potluck.absent.masked_rounds:Masked", "group")
    monkeypatch.setattr(plugins, "_entry_points", lambda *_: (absent,))
    assert not plugins.is_present(plugins.UPDATE_PATHS, "masked")
