"""Code, settings and commands on the pages are valid.

Python is executed: here, or by the test of its page.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from support.adapted_training import settings_of
from support.doc_pages import Block, blocks
from support.repository import ROOT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.core import TyperGroup
from typer.exceptions import TyperException

from potluck.client.cli import app as client_app
from potluck.client.config import ClientConfig
from potluck.common.errors import PluginError
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings.configuration import Settings, validate
from potluck.common.settings.plugins import find, installed
from potluck.common.trainer import Contribution, PrivateTraining, TrainingProgress
from potluck.deploy.cli import app as operator_app
from potluck.deploy.machines.inventory import Inventory
from potluck.experiments.grid.definition import load_experiment
from potluck.privacy.host.noisy_steps import noisy_steps
from potluck.relay.cli import app as relay_app
from potluck.server.cli import app as server_app
from potluck.server.config import CoordinatorConfig

RUN_ELSEWHERE = {
    "README.md": "tests/e2e/test_readme.py",
    "docs/start/your-own-model.md": "tests/e2e/test_moving_a_script.py",
    "docs/start/selection-in-python.md": "tests/e2e/test_python_api.py",
    "docs/guides/trackers.md": "tests/unit/server/sinks/test_writing_a_sink.py",
    "docs/guides/writing-a-selector.md": "tests/integration/test_writing_a_selector.py",
    "docs/guides/writing-a-signal.md": "tests/integration/test_writing_a_signal.py",
    "docs/guides/writing-a-strategy.md": "tests/integration/test_writing_a_strategy.py",
    "docs/guides/writing-a-task.md": "tests/integration/test_writing_a_task.py",
    "docs/guides/writing-a-trainer.md": "tests/integration/test_writing_a_trainer.py",
}
"""Pages whose Python a test of their own executes.

All are whole files, except in README.md and selection-in-python.md."""
WHOLE_FILE = re.compile(r"# \S+\.py\n")


def test_python_on_every_page_is_executed_by_a_test() -> None:
    found = {str(block.page.relative_to(ROOT)) for block in blocks("python")}
    assert found == set(RUN_ELSEWHERE)
    for page, test in RUN_ELSEWHERE.items():
        assert page in (ROOT / test).read_text()


def test_python_fragments_on_pages_can_be_executed() -> None:
    parts = [
        block
        for block in blocks("python")
        if block.page.name not in ("README.md", "selection-in-python.md")
        and not WHOLE_FILE.match(block.text)
    ]
    assert [block.page.name for block in parts] == ["writing-a-trainer.md"] * 2
    private, without_torch = parts
    names: dict[str, Any] = {"torch": torch, "nn": nn, "Contribution": Contribution}
    exec(private.text, names)  # noqa: S102  # a page of ours
    settings = settings_of(epochs=2)
    terms = PrivateTraining(
        sampling_rate=0.5,
        noise_multiplier=1.0,
        steps=4,
        clip=1.0,
        expected_batch=3.0,
        engine=noisy_steps,
    )
    data = TensorDataset(torch.zeros(6, 3), torch.ones(6, 1))
    train, model, progress = names["train"], nn.Linear(3, 1), TrainingProgress()
    train(None, model, data, replace(settings, privacy=terms), progress)
    assert terms.within_terms
    train(None, model, DataLoader(data), settings, progress)
    names = {"np": np}
    exec(without_torch.text, names)  # noqa: S102  # a page of ours
    assert {name: array.shape for name, array in names["model"](None).items()} == {
        "coef": (1, 3),
        "intercept": (1,),
    }


# Settings ---------------------------------------------------------------------------------------

TLS = dict.fromkeys(("certificate", "key", "authority"), "file.pem")
HOST = {"coordinator": "127.0.0.1:7443", "clients": ["a"], "state_directory": "s", "tls": TLS}
COORDINATOR = {"state_directory": "state", "tls": TLS}
FEDERATION = {"federation": "demo", "address": "localhost:7443"}
OF_OTHERS = {"rare-first", "darkest-first", "fair", "circle"}
"""Names of plug-ins that are written on the pages themselves."""


def kind_of(values: Mapping[str, Any]) -> tuple[type[Settings], dict[str, Any]]:
    """Return the model of the file that such settings belong to, and its other required values."""
    if "machines" in values:
        return Inventory, FEDERATION
    if {"files", "sinks", "tracing"} & set(values):
        return CoordinatorConfig, COORDINATOR
    if {"disclosure", "tags", "availability", "metrics_address", "clients"} & set(values):
        return ClientConfig, HOST
    return RunFile, {"task": {"name": "digits"}}


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_settings_on_pages_are_accepted(block: Block, tmp_path: Path) -> None:
    if block.text.startswith("# pyproject.toml\n"):
        assert "project" in tomllib.loads(block.text)  # the page's own test builds it
        return
    for part in re.split(r"\n\n(?=# each host's)", block.text):
        values: dict[str, Any] = tomllib.loads(part)
        if set(values) == {"project"}:  # part of a pyproject.toml
            continue
        # Part of a machine's table.
        if set(values) == {"machines"} and isinstance(values["machines"], dict):
            values = {
                "machines": [
                    {"name": "here", "engine": "unix:///docker.sock", **values["machines"]}
                ]
            }
        if set(values) == {"run"}:  # the run of an experiment file
            values = values["run"]
        if "object_stores" in values:
            values = HOST | values
        if "axes" in values:
            file = tmp_path / "experiment.toml"
            file.write_text(part)
            assert load_experiment(file, quick=True) != load_experiment(file, quick=False)
            continue
        model, usual = kind_of(values)
        made = validate(model, {**usual, **values}, source=str(block))
        if isinstance(made, RunFile):
            plugins = {"tasks": made.task, "selectors": made.selector, "strategies": made.strategy}
            for group, table in plugins.items():
                if table.name not in OF_OTHERS:
                    assert table.name in installed(f"potluck.{group}")


# Commands ---------------------------------------------------------------------------------------

PROGRAMS = {
    "potluck": operator_app,
    "potluck-client": client_app,
    "potluck-relay": relay_app,
    "potluck-server": server_app,
}
COMMAND = re.compile(r"^(?:\$ )?(potluck(?:-\w+)? .*)$", re.MULTILINE)


def command_lines() -> list[tuple[str, str]]:
    """Return all calls of Potluck's programs on the pages, each with its place."""
    return [
        (line, str(block))
        for block in blocks("sh", "console", "bash")
        for line in COMMAND.findall(block.text.replace("\\\n", " "))
    ]


def parse(line: str) -> None:
    """Find the command of a command line and parse its options, without calling it."""
    words = shlex.split(line, comments=True)
    ends = [place for place, word in enumerate(words) if word in (">", "|", "&", "||", "&&")]
    program, *rest = words[: min(ends, default=len(words))]
    command: Any = typer.main.get_command(PROGRAMS[program])
    context = typer.Context(command, info_name=program)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, f"{line}: there is no command {rest[0]}"
        command, rest = found, rest[1:]
        context = typer.Context(command, parent=context)
    command.make_parser(context).parse_args(rest)


@pytest.mark.parametrize(("line", "place"), command_lines(), ids=lambda text: text[:60])
def test_commands_on_pages_have_only_existing_options(line: str, place: str) -> None:
    try:
        parse(line)
    except TyperException as error:
        pytest.fail(f"{place}: {line}: {error}")


def test_unknown_command_option_or_plugin_on_a_page_is_detected() -> None:
    with pytest.raises(TyperException):
        parse("potluck watch --no-such-option")
    with pytest.raises(AssertionError, match="no command wach"):
        parse("potluck wach")
    with pytest.raises(PluginError):
        find("potluck.selectors", "no-such-selector")
