"""Commands of `potluck` that other packages provide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.common.errors import PluginError
from potluck.common.settings.extras import not_installed
from potluck.deploy.cli import app

MODULE = '''
import typer

def hello(name: str, loud: bool = False) -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}{'!' * loud}")

app = typer.Typer(help="Count in several ways.")

@app.command()
def up(to: int) -> None:
    """Count upwards."""
    typer.echo(" ".join(str(number) for number in range(1, to + 1)))

@app.command()
def down(to: int) -> None:
    """Count downwards."""
'''
ENTRY_POINTS = """[potluck.commands]
hello = brought_commands:hello
count = brought_commands:app
lacking = lacking_commands:hello
failing = failing_commands:hello
demo = brought_commands:hello
"""


@pytest.fixture(autouse=True)
def _brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brought_commands.py").write_text(MODULE)
    (tmp_path / "lacking_commands.py").write_text("import absent_library\n")
    (tmp_path / "failing_commands.py").write_text("import os\nos.environ['ABSENT']\n")
    information = tmp_path / "brought_commands-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["hello", "Ann", "--loud"], "hello Ann!\n"), (["count", "up", "3"], "1 2 3\n")],
)
def test_installed_function_and_app_are_called_by_their_names(
    arguments: list[str], printed: str
) -> None:
    assert CliRunner().invoke(app, arguments).stdout == printed


def test_help_lists_installed_commands_including_ones_that_can_not_be_loaded() -> None:
    text = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).stdout.split())
    assert "hello Greet somebody." in text
    assert "count Count in several ways." in text
    assert "experiment Run a grid of settings" in text
    assert text.index("From other packages") < text.index("hello Greet")
    assert "lacking Can't be loaded; call it to see why." in text
    assert "failing Can't be loaded; call it to see why." in text


def test_calling_a_command_that_can_not_be_loaded_reports_the_reason() -> None:
    result = CliRunner().invoke(app, ["lacking", "Ann", "--loud"])
    assert isinstance(result.exception, PluginError)
    assert "No module named 'absent_library'" in result.exception.message
    result = CliRunner().invoke(app, ["failing", "Ann"])
    assert isinstance(result.exception, PluginError)
    assert result.exception.message.endswith("failing_commands:hello: KeyError: 'ABSENT'")


def test_installed_command_does_not_replace_a_built_in_one() -> None:
    text = CliRunner().invoke(app, ["demo", "--help"]).stdout
    assert "throwaway federation" in text


WITHOUT_EXTRAS = """
import sys
from typer.testing import CliRunner
sys.modules |= {"docker": None, "pandas": None}  # their imports fail as if they were missing
from potluck.deploy.cli import app
runner = CliRunner(env={"COLUMNS": "200"})
print(runner.invoke(app, ["--help"]).stdout)
for command in ("deploy", "evaluate"):
    print(runner.invoke(app, [command, "x", "--y"]).exception)
"""


def test_commands_whose_extra_is_missing_name_the_extra() -> None:
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = " ".join(printed.split())
    for name, library, extra in (
        ("deploy", "docker", "operator"),
        ("evaluate", "pandas", "notebook"),
    ):
        assert f"{name} Needs the extra '{extra}', which is not installed." in text
        why = not_installed(library, f"potluck[{extra}]")
        assert f"`potluck {name}` needs the extra '{extra}': {why}" in text


def test_misspelled_command_of_another_package_is_suggested() -> None:
    assert "Did you mean 'count'?" in CliRunner().invoke(app, ["cuont", "up", "3"]).stderr


@pytest.mark.parametrize(("called", "imported"), [("", []), ("config", ["config_command"])])
def test_only_the_command_that_is_called_is_imported(called: str, imported: list[str]) -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from potluck.deploy.cli import app
assert not {called!r} or "[task]" in CliRunner().invoke(app, [{called!r}]).stdout
print(*sorted(name for name in sys.modules if name.startswith("potluck.deploy.commands.")))
"""
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = ["all_commands", *imported]
    assert printed.split() == [f"potluck.deploy.commands.{name}" for name in names]


def test_commands_that_ask_the_coordinator_start_without_numpy_and_run_files() -> None:
    code = """
import sys
from typer.testing import CliRunner
from potluck.deploy.cli import app
for name in ("clients", "runs", "watch"):
    assert CliRunner().invoke(app, [name, "--config", "absent"]).exit_code == 1
print(*({"numpy", "potluck.common.run_file.run_settings"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "\n"


def test_subcommands_of_clients_are_completed() -> None:
    asked = {
        "_POTLUCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "potluck clients ",
        "COMP_CWORD": "2",
    }
    assert CliRunner(env=asked).invoke(app, [], prog_name="potluck").stdout.split() == [
        *("list", "quarantine", "readmit")
    ]
