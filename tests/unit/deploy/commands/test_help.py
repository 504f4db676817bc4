"""Help and messages of `potluck` without a coordinator, from the command line."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from potluck.client.cli import app as client_app
from potluck.common.process.command_line import exit_code_of
from potluck.deploy.cli import app
from potluck.deploy.commands.all_commands import GROUPS, OTHERS
from potluck.relay.cli import app as relay_app
from potluck.server.cli import app as server_app

WIDE = {"COLUMNS": "200"}
PROGRAMS = {
    "potluck": app,
    "potluck-client": client_app,
    "potluck-relay": relay_app,
    "potluck-server": server_app,
}
LONGEST_HELP = 60

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls `potluck` in a folder without operator.toml, and returns the
    exit code and all output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    def play(*arguments: str) -> tuple[int, str]:
        code = exit_code_of(lambda: app(arguments, standalone_mode=False), program="potluck")
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return play


def commands(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command of a program, with the words that call it."""
    yield words, command
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), *words, name)


def test_help_lists_commands_in_five_groups() -> None:
    text = CliRunner(env=WIDE).invoke(app, ["--help"]).stdout
    found = re.findall(r"^╭─ (.+?) ─+╮$|^│ ([a-z][a-z-]*)  ", text, re.MULTILINE)
    listed: dict[str, list[str]] = {}
    for title, name in found:
        if title:
            listed[title] = []
        elif name:
            listed[list(listed)[-1]].append(name)
    assert listed.pop("Options") == []
    assert OTHERS not in listed
    assert listed == {title: list(names) for title, names in GROUPS.items()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_shows_no_type_for_an_option_without_a_value(program: str) -> None:
    for words, _ in commands(typer.main.get_command(PROGRAMS[program])):
        text = CliRunner(env=WIDE).invoke(PROGRAMS[program], [*words, "--help"]).stdout
        assert "--help" in text
        assert "bool" not in text, words


def test_each_command_of_potluck_is_described_in_a_short_line() -> None:
    listed = typer.main.get_command(app)
    context = typer.Context(listed)
    assert isinstance(listed, TyperGroup)
    for name in listed.list_commands(context):
        command = listed.get_command(context, name)
        assert command is not None
        line = (command.help or "").partition("\n\n")[0].strip()
        assert 0 < len(line) <= LONGEST_HELP, f"{name}: {line}"


def test_run_file_is_checked_before_the_operator_configuration(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('rounds = 0\ntask = {name = "digits"}\n')
    code, told = run("run", "run.toml")
    assert (code, told.startswith("potluck: run.toml: 'rounds': must be")) == (1, True)
    code, told = run("run")
    assert (code, told.startswith("potluck: no run file given; name a run file")) == (1, True)
    code, told = run("run", "run.toml", "--again", "3f9a")
    assert (code, told.startswith("potluck: both the run file run.toml and --again")) == (1, True)


def test_run_file_on_standard_input_is_checked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"rounds = 0\n")))
    code, told = run("run", "-")
    assert (code, told.startswith("potluck: standard input: 'rounds': must be")) == (1, True)


@pytest.mark.parametrize("command", ["watch", "resume", "runs", "clients"])
def test_command_without_an_operator_configuration_lists_the_remedies(
    run: Run, command: str
) -> None:
    code, told = run(command)
    assert code == 1
    assert "in neither ./operator.toml nor ~/.config/potluck/operator.toml; write a file" in told
    assert "or give --coordinator, --certificate, --key, --authority" in told
    assert "try `potluck demo`" in told


def test_doctor_marks_each_line_and_exits_with_0_without_an_error(run: Run) -> None:
    code, told = run("doctor")
    lines = told.splitlines()
    assert code == 0
    assert lines[0] == "this machine"
    assert re.fullmatch(r"ok +software +Potluck .* on Python .*", lines[1].strip())
    assert lines[2] == "the federation"
    assert re.match(r"warning +operator +can't find a coordinator", lines[3].strip())
    assert "→ write a file (`potluck config operator > operator.toml`" in told
    assert lines[-1] == "1 ok, 1 warning"


def test_doctor_exits_with_1_after_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "coordinator.toml").write_text("listen = 3\n")
    code, told = run("doctor", "coordinator.toml")
    assert code == 1
    assert re.search(r"^ *error +configuration +coordinator.toml: ", told, re.MULTILINE)
    assert told.splitlines()[-1] == "1 ok, 1 warning, 1 error"
