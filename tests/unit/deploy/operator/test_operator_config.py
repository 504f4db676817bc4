from __future__ import annotations

import os
from pathlib import Path

import pytest

from potluck.common.errors import ConfigurationError
from potluck.deploy.operator.operator_config import (
    OperatorFlags,
    example_operator_config,
    load_operator_config,
)
from potluck.deploy.operator.run_overrides import override

FILE = """
coordinator = "file:1"
[tls]
certificate = "pki/file.pem"
key = "pki/file.key"
authority = "/etc/authority.pem"
"""


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("POTLUCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "operator.toml"
    path.write_text(FILE)
    return path


def test_operator_file_is_sufficient_and_its_paths_are_relative_to_it(file: Path) -> None:
    config = load_operator_config(OperatorFlags(), [Path("none.toml"), file])
    assert config.coordinator == "file:1"
    assert config.tls.certificate == file.parent / "pki" / "file.pem"
    assert config.tls.authority == Path("/etc/authority.pem")


def test_flags_override_the_environment_which_overrides_the_operator_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_COORDINATOR", "environment:2")
    monkeypatch.setenv("POTLUCK_KEY", "environment.key")
    config = load_operator_config(OperatorFlags(config=file), [])
    assert config.coordinator == "environment:2"
    assert config.tls.key == Path("environment.key")
    assert config.tls.certificate == file.parent / "pki" / "file.pem"
    flags = OperatorFlags(config=file, coordinator="flag:3", key=Path("flag.key"))
    config = load_operator_config(flags, [])
    assert (config.coordinator, config.tls.key) == ("flag:3", Path("flag.key"))


def test_operator_flags_are_sufficient_without_a_file() -> None:
    flags = OperatorFlags(
        coordinator="flag:3", certificate=Path("a"), key=Path("b"), authority=Path("c")
    )
    config = load_operator_config(flags, [])
    assert config.tls.model_dump() == {
        "certificate": Path("a"),
        "key": Path("b"),
        "authority": Path("c"),
    }


def test_missing_operator_settings_are_named_with_the_remedy() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"are not in \./here\.toml; .* give --certificate, --key, --authority",
    ):
        load_operator_config(OperatorFlags(coordinator="a:1"), [Path("here.toml")])


def test_missing_operator_file_given_by_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
        load_operator_config(OperatorFlags(config=Path("nowhere.toml")), [])


def test_example_operator_file_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "operator.toml"
    path.write_text(example_operator_config())
    config = load_operator_config(OperatorFlags(config=path), [])
    assert config.coordinator == "127.0.0.1:7443"
    assert config.server_name is None


def test_overrides_replace_or_add_values_and_keep_comments() -> None:
    text = '# why\nrounds = 3\n[task]\nname = "digits"\n'
    changed = override(
        text,
        ["rounds=5", "training.epochs=2", "task.alpha=0.5", 'task.only=["a"]', "name=my run"],
        source="run.toml",
    )
    assert changed.startswith("# why\nrounds = 5\n")
    assert '[task]\nname = "digits"\nalpha = 0.5\nonly = ["a"]\n' in changed
    assert "[training]\nepochs = 2\n" in changed
    assert 'name = "my run"' in changed


def test_list_of_one_table_is_overridden_like_a_table() -> None:
    one = '[[objective]]\nname = "fedprox"\n'
    assert override(one, ["objective.mu=2"], source="run.toml") == one + "mu = 2\n"
    with pytest.raises(ConfigurationError, match="'objective' is a value, not a table"):
        override(one + one, ["objective.mu=2"], source="run.toml")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("rounds", "not KEY=VALUE"),
        (".a=1", "not KEY=VALUE"),
        ("rounds.a=1", "'rounds' is a value, not a table"),
    ],
)
def test_invalid_overrides_are_refused(assignment: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        override("rounds = 3", [assignment], source="run.toml")


def test_override_of_an_invalid_toml_file_names_the_file() -> None:
    with pytest.raises(ConfigurationError, match=r"run\.toml: not valid TOML"):
        override("rounds = = 3", ["rounds=1"], source="run.toml")


@pytest.mark.parametrize("key", ["count", "clients_per_round"])
@pytest.mark.parametrize("assigned", ["count", "clients_per_round"])
@pytest.mark.filterwarnings("ignore::potluck.common.settings.old_spelling.OldSpellingWarning")
def test_assignment_replaces_a_value_under_its_old_name(key: str, assigned: str) -> None:
    changed = override(f"{key} = 3  # few\n", [f"{assigned}=4"], source="run.toml")
    assert changed == "clients_per_round = 4  # few\n"
