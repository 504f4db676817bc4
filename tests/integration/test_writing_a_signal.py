"""The package of docs/guides/writing-a-signal.md is built, installed and used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tomlkit
from pydantic import ValidationError
from support.federation import set_values
from support.guide_packages import install_package_of
from support.profile_federation import ledgers, profile_federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, terms
from potluck.common.disclosure import Mode, Parameters, Request, TaskReference
from potluck.common.errors import DisclosureRefusedError, PluginError, ProtocolError
from potluck.common.signal import read_payload, signal_named

EXACT = Parameters(mode=Mode.EXACT, task=TaskReference(name="digits"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("brightness")
    files = ["brightness.py", "darkest_first.py", "pyproject.toml"]
    return install_package_of("writing-a-signal.md", folder, files=files)


async def test_selector_receives_the_guide_signal_from_owners_that_allow_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(package))
    missing = 'profiles.missing="exclude"'
    async with profile_federation(
        tmp_path, selector="darkest-first", rounds=1, assignments=[missing], start_hosts=False
    ) as federation:
        allowing, _ = federation.files.hosts  # the other host allows only built-in signals
        table = {"signals": ["label_counts", "triplet", "brightness"], "epsilon": 2.0}
        set_values(allowing, {"disclosure": tomlkit.item(table)})
        await federation.start_hosts()
        run_id = await federation.start_run()
        await federation.finished(run_id)
        [committed] = await federation.history(run_id)
        kept = ledgers(federation)
    members = {member.client_id: member.reason for member in committed.members}
    assert len(members) == 2
    assert sorted(kept) == sorted(members)  # the clients of the allowing host, and no others
    for client, ledger in kept.items():
        [release] = ledger["releases"]
        assert (release["signal"], release["epsilon"]) == ("brightness", 2.0)
        counts = json.loads(release["payload_json"])["brightness"]
        positive = [max(0, count) for count in counts]
        assert members[client] == f"{positive[0] / max(sum(positive), 1):.0%} dark"


def test_invalid_payloads_of_the_signal_are_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    text = '{"brightness": [1, 2, 3, 4]}'
    assert read_payload("brightness", EXACT, text, classes=10).tolist() == [1, 2, 3, 4]
    for hostile in (
        '{"brightness": [1, 2, 3]}',
        '{"brightness": [1, 2, 3, -4]}',
        '{"brightness": [1, 2, 3, NaN]}',
        '{"brightness": [1, 2, 3, 4], "more": 1}',
        '{"label_counts": [1, 2, 3, 4]}',
    ):
        with pytest.raises(ProtocolError, match="a brightness profile is not valid"):
            read_payload("brightness", EXACT, hostile, classes=10)


def test_owners_must_allow_each_form_of_the_signal(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="'brightness' is not installed; installed: inter"):
        DisclosurePolicy(signals=("brightness",))
    monkeypatch.syspath_prepend(str(package))
    exact, task = Request(mode=Mode.EXACT), EXACT.task

    def ask(policy: DisclosurePolicy) -> Parameters:
        return terms(policy, "a", "brightness", exact, task=task, model=None)

    with pytest.raises(DisclosureRefusedError, match="`signals` does not list 'brightness'"):
        ask(DisclosurePolicy(exact_signals=("brightness",)))
    with pytest.raises(DisclosureRefusedError, match="`exact_signals` does not list"):
        ask(DisclosurePolicy(signals=("brightness",)))
    allowing = DisclosurePolicy(signals=("brightness",), exact_signals=("brightness",))
    assert ask(allowing).epsilon is None


def test_error_without_the_package_lists_installed_signals() -> None:
    with pytest.raises(PluginError, match="installed: interaction_matrix, label_counts, triplet"):
        signal_named("brightness")
