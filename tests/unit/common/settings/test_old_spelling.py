"""Replaced names of settings: accepted until 0.2, with one line that names both."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import run_program

from potluck.client.config import example_config, load_config
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import OLD_KEYS, RunFile, parse_run_file
from potluck.common.settings.configuration import parse
from potluck.common.settings.old_spelling import OldSpellingWarning, with_current_keys
from potluck.secagg.host.sum_membership import rules_of_counts


def run_file(line: str) -> RunFile:
    text = f'[task]\nname = "digits"\n[profiles]\n{line}\n'
    return parse_run_file(text, source="run.toml")


REPLACED = [
    ("disclosure", "dp-once", "noisy"),
    ("disclosure", "protocol", "unsafe-stepwise"),
    ("triplet_mode", "ldp", "noisy"),
    ("triplet_mode", "plain", "exact"),
]


@pytest.mark.parametrize(("key", "old", "new"), REPLACED)
def test_old_value_in_a_run_file_means_the_new_one_with_a_warning(
    key: str, old: str, new: str
) -> None:
    with pytest.warns(OldSpellingWarning) as noticed:
        found = run_file(f'{key} = "{old}"')
    assert found == run_file(f'{key} = "{new}"')
    assert [str(each.message) for each in noticed] == [
        (
            f'{key} = "{old}" is written {key} = "{new}" now; the old word is accepted before '
            "version 0.2"
        )
    ]


@pytest.mark.parametrize(("old", "new"), [("ldp", "noisy"), ("plain", "exact")])
def test_old_value_in_a_policy_means_the_new_one_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(OldSpellingWarning, match=f'triplet = "{old}" is written triplet = "{new}"'):
        found = parse(DisclosurePolicy, f'triplet = "{old}"', source="host.toml")
    assert found == DisclosurePolicy(triplet="noisy" if new == "noisy" else "exact")


def test_old_sum_kind_in_a_policy_means_the_new_one_with_a_warning() -> None:
    with pytest.warns(OldSpellingWarning, match='"protocol" is written sums = "unsafe-stepwise"'):
        found = parse(DisclosurePolicy, 'sums = ["total", "protocol"]', source="host.toml")
    assert found == DisclosurePolicy(sums=("total", "unsafe-stepwise"))
    assert rules_of_counts(found).disclosures == {"total", "protocol"}  # messages keep the old name


RENAMED = [
    ("count", "clients_per_round", 4),
    ("roster", "expected_clients", 12),
    ("roster_timeout_seconds", "start_timeout_seconds", 5.0),
]
TASK = '[task]\nname = "digits"\n'


@pytest.mark.parametrize(("old", "new", "value"), RENAMED)
def test_old_key_in_a_run_file_means_the_new_one_with_a_warning(
    old: str, new: str, value: float
) -> None:
    with pytest.warns(OldSpellingWarning) as noticed:
        found = parse_run_file(f"{old} = {value}\n{TASK}", source="run.toml")
    assert found == parse_run_file(f"{new} = {value}\n{TASK}", source="run.toml")
    assert getattr(found, new) == value
    assert [str(each.message) for each in noticed] == [
        f"'{old}' is written '{new}' now; the old key is accepted before version 0.2"
    ]


def test_key_set_under_its_old_and_new_name_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_run_file(f"count = 4\nclients_per_round = 5\n{TASK}", source="run.toml")
    assert caught.value.message == (
        "run.toml: 'count' is the old name of 'clients_per_round', and both are set; remove 'count'"
    )


def test_old_top_level_keys_of_a_run_file_text_are_renamed() -> None:
    text = "# few\ncount = 4  # of 9\n[selector]\nname = 'mine'\ncount = 2\n"
    with pytest.warns(OldSpellingWarning):
        found = with_current_keys(text, OLD_KEYS)
    assert found == text.replace("count = 4", "clients_per_round = 4")


def test_new_values_are_the_defaults() -> None:
    assert run_file("").profiles.disclosure == run_file("").profiles.triplet_mode == "noisy"
    assert DisclosurePolicy().triplet == "noisy"


def test_program_warns_about_an_old_value_in_one_line_and_continues(tmp_path: Path) -> None:
    host = example_config().replace('triplet = "noisy"', 'triplet = "ldp"')
    (tmp_path / "host.toml").write_text(host)
    done = run_program("potluck-client", "disclosures", "--config=host.toml", folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr.decode() == (
        'potluck-client: triplet = "ldp" is written triplet = "noisy" now; the old word is '
        "accepted before version 0.2\n"
    )


def test_old_host_key_is_accepted_in_the_file_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host.toml").write_text(example_config())
    assert load_config(tmp_path / "host.toml", {}).cancel_timeout_seconds == 30
    old = example_config().replace("cancel_timeout_seconds = 30.0", "patience_seconds = 4")
    (tmp_path / "old.toml").write_text(old)
    with pytest.warns(OldSpellingWarning, match="'patience_seconds' is written"):
        assert load_config(tmp_path / "old.toml", {}).cancel_timeout_seconds == 4
    monkeypatch.setenv("POTLUCK_CLIENT_PATIENCE_SECONDS", "5")
    text = example_config().replace("cancel_timeout_seconds = 30.0\n", "")
    (tmp_path / "none.toml").write_text(text)
    with pytest.warns(OldSpellingWarning, match="'patience_seconds' is written"):
        assert load_config(tmp_path / "none.toml", {}).cancel_timeout_seconds == 5
