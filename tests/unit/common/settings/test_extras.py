"""The error for a missing library names it in one line, with the extra that installs it."""

from __future__ import annotations

import pytest

from potluck.common.process.command_line import exit_code_of
from potluck.common.settings.extras import (
    MissingLibraryError,
    extra_named,
    missing_extra,
    missing_library,
    not_installed,
    require,
)


def import_from(module: str, statement: str) -> BaseException:
    """Return the error that a module of this name raises when it runs the import statement."""
    try:
        exec(statement, {"__name__": module})  # noqa: S102  # as a module of that name would
    except ImportError as error:
        return error
    raise AssertionError("it is installed")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("potluck.server.selectors.parts.flash_memory", "potluck[server]"),
        ("potluck.client.training.steps.loop", "potluck[client]"),
        ("potluck.deploy.machines.docker_engine", "potluck[operator]"),
        ("potluck.experiments.reports.tables", "potluck[experiments]"),
        ("potluck.experiments.cluster.ray_cluster", "potluck[experiments,ray]"),
        ("potluck.common.tensors.compression", "potluck"),
        ("potluck.integrations.adapters.lightning", "potluck[lightning]"),
        ("potluck.integrations.adapters.lora", "potluck[lora]"),
        ("potluck.integrations.adapters.loops", "potluck"),
        ("potluck.integrations.s3.store_requests", "potluck[s3]"),
        ("potluck.integrations.s3.object_store", "potluck[s3]"),
    ],
)
def test_missing_library_names_the_extra_of_the_importing_package(module: str, extra: str) -> None:
    error = import_from(module, "import absent_library.part")
    assert missing_library(error) == not_installed("absent_library", extra)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("docker.api.client", "import absent_library"),  # a broken library, not a missing one
        ("somebodys_plugin", "import absent_library"),
        ("potluck.deploy.cli", "import potluck.absent"),
        ("potluck.deploy.cli", "from json import absent"),
    ],
)
def test_other_import_failures_do_not_name_an_extra(module: str, statement: str) -> None:
    assert missing_library(import_from(module, statement)) is None


def test_program_reports_a_missing_library_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def draw() -> None:
        raise import_from("potluck.deploy.view.run_plot", "import absent_library")

    assert exit_code_of(draw, program="potluck") == 1
    assert capsys.readouterr().err == (
        "potluck: absent_library is not installed; in a checkout of Potluck: "
        "pip install '.[operator]', elsewhere: see docs/start/install.md\n"
    )


def test_python_interface_raises_missing_library_error_naming_the_extra() -> None:
    with (
        pytest.raises(MissingLibraryError, match=r"pip install '\.\[operator\]'"),
        extra_named(),
    ):
        raise import_from("potluck.deploy.view.run_plot", "import absent_library")
    with pytest.raises(ModuleNotFoundError, match="absent_library") as caught, extra_named():
        raise import_from("somebodys_plugin", "import absent_library")
    assert not isinstance(caught.value, MissingLibraryError)


def test_require_reports_a_missing_library_without_importing_it() -> None:
    require("json", "potluck[server]")
    with pytest.raises(MissingLibraryError, match="absent_library is not installed") as caught:
        require("absent_library", "potluck[server]")
    assert missing_extra(caught.value) == "server"
