"""Words of settings that were replaced: accepted until 0.2, with one line that names both."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import run_program

from potluck.client.config import example_config
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.run_file.runfile import RunFile, parse_run_file
from potluck.common.settings.configuration import parse
from potluck.common.settings.old_spelling import OldSpellingWarning


def run_file(line: str) -> RunFile:
    text = f'[task]\nname = "digits"\n[profiles]\n{line}\n'
    return parse_run_file(text, source="run.toml")


REPLACED = [
    ("disclosure", "dp-once", "noisy"),
    ("triplet_mode", "ldp", "noisy"),
    ("triplet_mode", "plain", "exact"),
]


@pytest.mark.parametrize(("key", "old", "new"), REPLACED)
def test_an_old_word_of_a_run_file_means_the_new_one(key: str, old: str, new: str) -> None:
    with pytest.warns(OldSpellingWarning) as noticed:
        found = run_file(f'{key} = "{old}"')
    assert found == run_file(f'{key} = "{new}"')
    assert [str(each.message) for each in noticed] == [
        f'{key} = "{old}" is written {key} = "{new}" now; the old word is accepted until 0.2'
    ]


@pytest.mark.parametrize(("old", "new"), [("ldp", "noisy"), ("plain", "exact")])
def test_an_old_word_of_a_policy_means_the_new_one(old: str, new: str) -> None:
    with pytest.warns(OldSpellingWarning, match=f'triplet = "{old}" is written triplet = "{new}"'):
        found = parse(DisclosurePolicy, f'triplet = "{old}"', source="host.toml")
    assert found == DisclosurePolicy(triplet="noisy" if new == "noisy" else "exact")


def test_the_new_words_are_the_defaults() -> None:
    assert run_file("").profiles.disclosure == run_file("").profiles.triplet_mode == "noisy"
    assert DisclosurePolicy().triplet == "noisy"


def test_a_program_shows_an_old_word_in_one_line_and_goes_on(tmp_path: Path) -> None:
    host = example_config().replace('triplet = "noisy"', 'triplet = "ldp"')
    (tmp_path / "host.toml").write_text(host)
    done = run_program("potluck-client", "disclosures", "--config=host.toml", folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr.decode() == (
        'potluck-client: triplet = "ldp" is written triplet = "noisy" now; the old word is '
        "accepted until 0.2\n"
    )
