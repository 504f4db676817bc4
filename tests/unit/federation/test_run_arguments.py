"""Arguments of `Federation.run` mean the same as keys of a run file."""

import inspect
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.run_file.run_settings import RoundPolicy
from potluck.common.run_file.runfile import OLD_KEYS, RunFile
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.old_spelling import OldSpellingWarning
from potluck.common.trainer import Measure
from potluck.federation import Federation
from potluck.federation.run_settings_text import checked_text, run_table
from potluck.integrations.adapters.loops import LoopTrainer
from potluck.integrations.adapters.script import script_task


def test_every_run_file_key_is_an_argument_of_run() -> None:
    arguments = list(inspect.signature(Federation.run).parameters)
    assert set(arguments) == {"self", "run_file", *RunFile.model_fields, *OLD_KEYS}


@pytest.mark.parametrize(("old", "new"), OLD_KEYS.items())
def test_an_argument_under_its_old_name_replaces_the_value_of_the_run_file(
    old: str, new: str
) -> None:
    with pytest.warns(OldSpellingWarning, match=f"'{old}' is written '{new}' now"):
        assert run_table(f"{new} = 3\n", {old: 4}) == {new: 4}


def test_run_arguments_as_settings_objects_equal_plain_tables() -> None:
    by_class = run_table(
        None,
        {
            "task": {"name": "digits"},
            "round": RoundPolicy(deadline_seconds=5.0),
            "training": LocalTraining(learning_rate=0.5),
            "seed": None,
        },
    )
    by_table = run_table(
        None,
        {
            "task": {"name": "digits"},
            "round": {"deadline_seconds": 5.0},
            "training": {"learning_rate": 0.5},
        },
    )
    assert by_class == by_table
    text, run = checked_text(by_class)
    assert tomllib.loads(text) == by_class
    assert (run.round.deadline_seconds, run.training) == (5.0, {"learning_rate": 0.5})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hosts": 0}, "hosts is 0, but must be a whole number from 1"),
        ({"hosts": "2"}, "hosts is '2'"),
        ({"clients": -1}, "clients is -1"),
        ({"device": "gpu"}, "device is 'gpu'; it must be 'cpu', 'auto'"),
        ({"folder": __file__}, "folder is .*, which is a file"),
        ({"data": "/no/such/folder"}, "data is '/no/such/folder', which is not a folder"),
    ],
)
def test_local_federation_with_invalid_arguments_is_refused(options: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Federation.local(**options)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"selector": "unifrom"}, "potluck.selectors: 'unifrom' is not installed"),
        ({"strategy": {"name": "fedavgm", "momentun": 1}}, "did you mean 'momentum'"),
        ({"strategy": int}, "<class 'int'> can't be used as strategy; give a name"),
        ({"objective": ["cross-entropy", "fedprox-"]}, "'fedprox-' is not installed"),
    ],
)
def test_invalid_plugins_are_refused_before_processes_start(
    tmp_path: Path, arguments: Any, why: str
) -> None:
    with (
        Federation.local(folder=tmp_path / "new") as federation,
        pytest.raises(PluginError, match=why),
    ):
        federation.run(task={"name": "digits", "clients": 4}, **arguments)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("as_path", [True, False])
def test_run_argument_replaces_the_value_of_the_run_file(tmp_path: Path, as_path: bool) -> None:
    text = 'rounds = 7\nseed = 1\n[task]\nname = "digits"\nclients = 3\n'
    path = tmp_path / "run.toml"
    path.write_text(text)
    values = run_table(path if as_path else text, {"rounds": 2, "task": {"name": "digits"}})
    assert values == {"rounds": 2, "seed": 1, "task": {"name": "digits"}}


def test_invalid_run_arguments_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"the run's arguments: .*rounds.*"):
        checked_text(run_table(None, {"task": {"name": "digits"}, "rounds": 0}))
    with pytest.raises(ConfigurationError, match="can't read the run file"):
        run_table("no-such-file.toml", {})
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        run_table("a =\nb", {})
    with pytest.raises(ConfigurationError, match="not valid TOML: lists and tables have more"):
        run_table(f"rounds = 1\nz = {'[' * 3_000}", {})


SCRIPT = script_task(
    model=lambda: {"weights": np.zeros(1, np.float32)},
    data=lambda client, folder: (folder / client, None),
    trainer=LoopTrainer(lambda *_: None, lambda *_: 0.0, {"loss": Measure(label="loss")}),
)


@pytest.mark.parametrize(
    ("options", "task", "why"),
    [
        ({"device": "cuda:99"}, "digits", r"does not have the device cuda:99; choose"),
        (
            {},
            SCRIPT,
            r"no folder with data is given; name the folder .* Federation.local\(data=\.\.\.",
        ),
        ({}, "mnist", r"task mnist reads mnist\.npz .* `potluck data prepare mnist --from FOLDER`"),
    ],
)
def test_options_this_machine_can_not_meet_are_refused_before_processes_start(
    tmp_path: Path, options: Any, task: Any, why: str
) -> None:
    with (
        Federation.local(folder=tmp_path / "new", **options) as federation,
        pytest.raises(ConfigurationError, match=why),
    ):
        federation.run(task)
    assert not (tmp_path / "new").exists()
