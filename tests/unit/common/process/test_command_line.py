from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from potluck.common.errors import ConfigurationError
from potluck.common.process.command_line import TRACEBACK_VARIABLE, exit_code_of


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


UNEXPECTED = (
    "potluck: unexpected error ZeroDivisionError: by zero; "
    "set POTLUCK_TRACEBACK=1 to see the traceback\n"
)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigurationError("seed is\n  -1"), 1, "potluck: seed is -1\n"),
        (PermissionError(13, "Not permitted", "x.toml"), 1, "potluck: Not permitted (x.toml)\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(143), 143, ""),
        (typer.Abort(), 130, ""),
        (ExceptionGroup("tasks", [ConfigurationError("inner")]), 1, "potluck: inner\n"),
        (ZeroDivisionError("by zero"), 1, UNEXPECTED),
    ],
)
def test_error_is_printed_in_one_line_with_an_exit_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(raising(error), program="potluck") == code
    assert capsys.readouterr() == ("", line)


def test_traceback_is_printed_if_the_environment_variable_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    assert exit_code_of(raising(ConfigurationError("bad")), program="potluck") == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("potluck: bad\n")


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (7, 7)])
def test_result_of_a_command_is_its_exit_code(result: int | None, code: int) -> None:
    assert exit_code_of(lambda: result, program="potluck") == code


def test_error_about_a_wrong_command_line_names_the_help_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(lambda: None)
    code = exit_code_of(
        lambda: app(["--nothing"], prog_name="potluck", standalone_mode=False), program="potluck"
    )
    assert code == 2
    assert capsys.readouterr().err == "potluck: No such option: --nothing; see `potluck --help`\n"


async def test_closed_output_pipe_ends_the_program_without_a_message() -> None:
    lines = "import itertools; [print(n) for n in itertools.count()]"
    program = (
        "from potluck.common.process.command_line import run_command_line\n"
        f"def app(**_): exec({lines!r})\n"
        "run_command_line(app, program='potluck')\n"
    )
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"")


@pytest.mark.parametrize("package", ["client", "deploy", "server"])
def test_command_line_modules_do_not_import_torch(package: str) -> None:
    """Importing torch takes seconds; only programs that train or evaluate need it."""
    code = f"import sys, potluck.{package}.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
