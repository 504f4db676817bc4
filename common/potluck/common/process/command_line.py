"""Errors of commands: a one-line message, and an exit code for scripts.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed; standard error has the reason (no text if the reader of the output has closed it) |
| 2 | the command line is wrong |
| 130 | interrupted from the keyboard |
| 143 | asked to end (SIGTERM), for commands that handle this signal |
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperOption

from potluck.common.errors import PotluckError
from potluck.common.net.build_version import software_version
from potluck.common.plain_text import plain, without_passwords
from potluck.common.process.entry import INTERRUPTED as INTERRUPTED  # re-exported: an exit code
from potluck.common.settings.extras import missing_library
from potluck.common.settings.old_spelling import OldSpellingWarning

FAILED = 1

TRACEBACK_VARIABLE = "POTLUCK_TRACEBACK"
"""Environment variable; 1 prints a traceback with every error."""


PLAIN = "potluck.plain"
"""Name of an error handler for texts.

It replaces characters that a stream can't encode with similar characters of the same width.
"""

_LIKE = str.maketrans("→←·–—…×≥≤‘’“”ε", "><---.x><''\"\"e")


_type_of_value = TyperOption.display_type_rich


def _shown_type(option: TyperOption, ctx: Any) -> str | None:
    """Return the type of an option's value for the help text; None for a flag."""
    return None if option.is_flag else _type_of_value(option, ctx=ctx)


setattr(TyperOption, "display_type_rich", _shown_type)  # noqa: B010  # else help shows `<bool>`


MetricsAddressOption = Annotated[
    str | None,
    typer.Option(
        help="Serve /metrics, /healthz and /readyz here: a port (on 127.0.0.1) or HOST:PORT."
    ),
]
"""The option `--metrics-address` of a program that runs until it is stopped."""


def version_option(program: str) -> Any:
    """Return the option `--version` of a program."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{program} {software_version()}")
            raise typer.Exit

    return typer.Option(
        "--version", help="Print the version and end.", callback=show, is_eager=True
    )


def run_command_line(app: Callable[..., Any], *, program: str) -> NoReturn:
    """Run a typer app with the process's arguments, then exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
    show = warnings.showwarning

    def show_in_one_line(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, OldSpellingWarning):
            _say(program, str(message))
        else:
            show(message, category, *place)

    warnings.showwarning = cast(Any, show_in_one_line)
    sys.exit(exit_code_of(lambda: app(prog_name=program, standalone_mode=False), program=program))


def exit_code_of(command: Callable[[], Any], *, program: str) -> int:
    """Run `command` and return the exit code. If it fails, print one line on standard error.

    If `command` returns an integer, this is the exit code.
    """
    try:
        result = command()
        sys.stdout.flush()
    except Exception as error:
        return _explain(error, program)
    except KeyboardInterrupt:
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end].translate(_LIKE)
    shown = "".join(map(_ascii, unknown))
    return shown, error.end


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    return "*" if "\u2800" <= character <= "\u28ff" else "?"  # spinners are Braille characters


codecs.register_error(PLAIN, _plainly)


def _explain(error: Exception, program: str) -> int:
    cause = _first_cause(error)
    if isinstance(cause, BrokenPipeError):
        _detach_output()
        return FAILED
    if isinstance(cause, typer.Abort):
        return INTERRUPTED
    if isinstance(cause, typer.Exit):
        return cause.exit_code
    if isinstance(cause, typer.TyperException):
        return _explain_usage(cause, program)
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    if isinstance(cause, PotluckError):
        _say(program, cause.message)
    elif remedy := missing_library(cause):
        _say(program, remedy)
    elif isinstance(cause, OSError) and cause.strerror:
        where = "" if cause.filename is None else f" ({cause.filename})"
        _say(program, f"{cause.strerror}{where}")
    else:
        name = type(cause).__name__
        _say(
            program,
            f"unexpected error {name}: {cause}; set {TRACEBACK_VARIABLE}=1 to see the traceback",
        )
    return FAILED


def _explain_usage(error: typer.TyperException, program: str) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message().replace("Value error, ", "")
    message = message.replace(": Input should be ", ": must be ")
    if context is None:
        _say(program, message)
    elif type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)  # noqa: T201  # the help text itself
    else:
        _say(program, f"{message.rstrip('.')}; see `{context.command_path} --help`")
    return error.exit_code


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _say(program: str, message: str) -> None:
    line = " ".join(plain(without_passwords(message)).split())
    print(f"{program}: {line}", file=sys.stderr)  # noqa: T201  # this is where errors are shown


def _detach_output() -> None:
    """Redirect standard output, so that Python's flush at exit does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
