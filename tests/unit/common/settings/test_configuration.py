"""Errors on wrong configuration files, from the programs that read them."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.pki import make_federation
from support.programs import run_program
from support.repository import ROOT

from potluck.client.config import ClientConfig
from potluck.client.config import example_config as host_example
from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import RunFile, example_run_file, parse_run_file
from potluck.common.settings.configuration import Settings, parse
from potluck.common.settings.configuration_errors import (
    COORDINATOR,
    EXPERIMENT,
    HOST,
    INVENTORY,
    OPERATOR,
    RELAY,
    RUN,
    nested,
)
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import create
from potluck.common.task import Task
from potluck.deploy.machines.inventory import Inventory, example_inventory
from potluck.deploy.operator.operator_config import OperatorConfig, example_operator_config
from potluck.experiments.grid.definition import ExperimentFile
from potluck.relay.config import RelayConfig
from potluck.relay.config import example_config as relay_example
from potluck.server.config import CoordinatorConfig
from potluck.server.config import example_config as coordinator_example
from potluck.server.plan.plan import draw_up

LONGEST = 500

FILES = {
    RUN: example_run_file(),
    COORDINATOR: coordinator_example(),
    HOST: host_example(),
    RELAY: relay_example(),
    OPERATOR: example_operator_config(),
    EXPERIMENT: (ROOT / "experiments" / "dc-mnist.toml").read_text(),
    INVENTORY: example_inventory(),
}


@pytest.mark.parametrize("kind", [COORDINATOR, HOST, OPERATOR, EXPERIMENT, INVENTORY])
def test_error_names_the_program_that_a_wrong_file_belongs_to(kind: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_run_file(FILES[kind], source="my.toml")
    assert caught.value.message.startswith(f"my.toml: this looks like {kind}, not a run file: ")
    assert len(caught.value.message) < LONGEST


@pytest.mark.parametrize("program", ["potluck-server", "potluck-client"])
def test_error_of_a_program_given_a_run_file_names_it_as_a_run_file(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(FILES[RUN])
    ended = run_program(program, "--config", "run.toml", folder=tmp_path)
    said = ended.stderr.decode()
    assert (ended.returncode, said.count("\n")) == (1, 1)
    assert said.startswith(f"{program}: run.toml: this looks like a run file, not the config")
    assert len(said) < LONGEST


def test_experiment_file_declares_its_kind() -> None:
    assert ExperimentFile.kind == EXPERIMENT


def test_file_with_hundreds_of_unknown_keys_is_refused_in_one_line() -> None:
    text = (ROOT / "pyproject.toml").read_text() + "".join(f"[t{n}]\n" for n in range(500))
    with pytest.raises(ConfigurationError) as caught:
        parse_run_file(text, source="pyproject.toml")
    assert "unknown keys 'build-system', 'project', 'tool' and 500 more; known" in str(caught.value)
    assert len(caught.value.message) < LONGEST


def test_error_about_many_problems_counts_the_remaining_ones() -> None:
    wrong = "rounds = 0\nclients_per_round = 0\nexpected_clients = -1\nseed = -1\n"
    with pytest.raises(ConfigurationError, match=r"'expected_clients': .*; and 1 more$"):
        parse_run_file(f"{wrong}[task]\nname = 'digits'\n", source="run.toml")


def test_error_about_a_misspelt_key_suggests_the_correct_one() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown key 'round\.quorm' \(did you mean 'q"):
        parse_run_file("[task]\nname = 'digits'\n[round]\nquorm = 1\n", source="run.toml")


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("eligible = {site = ['a']}", r"below \[selector_limits\]"),
        ("epochs = 3", r"below \[(training|personal)\] or below \[(training|personal)\]"),
        ("[round]\nexpected_clients = 3", "at the top of the file"),
    ],
)
def test_error_about_a_key_in_the_wrong_table_names_the_correct_table(
    line: str, where: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"unknown key '[a-z._]+' \(it belongs {where}\)"):
        parse_run_file(f"task.name = 'digits'\n{line}\n", source="run.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "task = 'digits'",
            r"""'task' must be a table \(got 'digits'\); write task\.name = "digits"$""",
        ),
        (
            "task = {name = 'x'}\nround = 3",
            r"'round' must be a table \(got 3\); write its keys below \[",
        ),
        (
            "task = {name = 'x'}\nobjective = ['focal']",
            r"""^run\.toml: 'objective\.0' must be a table \(got 'focal'\); write \S+ = "focal"$""",
        ),
        (
            "task = {name = 'x'}\ntraining = 3",
            r"'training' must be a table \(got 3\); write its keys",
        ),
    ],
)
def test_error_about_a_value_in_place_of_a_table_shows_the_correct_form(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_run_file(text, source="run.toml")


MODELS: dict[str, type[Settings]] = {
    RUN: RunFile,
    COORDINATOR: CoordinatorConfig,
    HOST: ClientConfig,
    RELAY: RelayConfig,
    OPERATOR: OperatorConfig,
    EXPERIMENT: ExperimentFile,
    INVENTORY: Inventory,
}


def said_of(kind: str, key: str, value: object) -> str:
    """Return the error for a file of this kind with `value` for a key; empty if there is none."""
    try:
        parse(MODELS[kind], FILES[kind], source="my.toml", overrides={key: value})
    except ConfigurationError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        (HOST, "workers", "many", "must be auto, or a whole number from 1 to 256 (got 'many')"),
        (HOST, "workers", 257, "must be auto, or a whole number from 1 to 256 (got 257)"),
        (HOST, "clients", 3, "must be a list (got 3)"),
        (EXPERIMENT, "axes", {"x": 3}, "must be a list or a table (got 3)"),
        (RUN, "rounds", "many", "must be a whole number (got 'many')"),
        (RUN, "rounds", 2.5, "must be a whole number (got 2.5)"),
        (RUN, "rounds", float("nan"), "must be a finite number (got nan)"),
        (RUN, "name", 3, "must be a text (got 3)"),
        (RUN, "objective", [], "must have 1 entry at least (got [])"),
        (RUN, "name", "x" * 500, f"must have 80 characters at most (got '{'x' * 79}…)"),
        (RUN, "stop", {"measure": "", "patience": 1}, "must not be empty (got '')"),
    ],
)
def test_error_about_a_value_of_a_wrong_type_names_the_expected_type(
    kind: str, key: str, value: object, message: str
) -> None:
    said = said_of(kind, key, value)
    assert re.search(rf"[:;] '{key}(\.\w+)?': {re.escape(message)}$", said), said


def keys_in_seconds(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting in seconds, also of nested tables."""
    for name, field in model.model_fields.items():
        if name.endswith("_seconds"):
            yield (name,)
        elif (table := nested(field)) is not None:
            yield from ((name, *path) for path in keys_in_seconds(table))


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind in MODELS for path in keys_in_seconds(MODELS[kind])]
)
@pytest.mark.parametrize("value", [1e12, 1e20, float("inf")])
def test_settings_in_seconds_have_a_maximum(kind: str, path: tuple[str, ...], value: float) -> None:
    first, *rest = path
    table: object = value
    for name in reversed(rest):
        table = {name: table}
    assert f"'{'.'.join(path)}': must be " in said_of(kind, first, table)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("value", ["many", 3.5, {"a": 1}, [1], -1, float("nan"), ""])
def test_type_errors_do_not_name_python_types(kind: str, value: object) -> None:
    for key in MODELS[kind].model_fields:
        said = said_of(kind, key, value).partition("; known keys")[0]
        assert re.search(r"Input|<class|should|literal\[|\b(dict|tuple|int)\b", said) is None, said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 1\nrounds = 2\n", r"not valid TOML: a key is set twice \(at line 2"),
        ("[task]\n[task]\n", r"not valid TOML: table \[task\] is defined twice \(at line 2"),
        ("[a.b]\n[a.b]\n", r"not valid TOML: table \[a\.b\] is defined twice \(at line 2"),
    ],
)
def test_error_about_a_duplicate_key_or_table_is_in_plain_words(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_run_file(text, source="run.toml")


DEEP = "[" * 3_000 + "]" * 3_000
NESTED = "lists and tables have more than 50 levels; use fewer levels"
DIGITS = "an integer has thousands of digits; write a smaller number"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"z = {DEEP}", NESTED),
        ("z = " + "{a = " * 3_000, NESTED),
        ("a." * 3_000 + "b = 1", NESTED),
        ("task.name = 'x'\ntask." + "a." * 900 + "b = 1", NESTED),
        (f"rounds = {'9' * 5_000}", DIGITS),
        (f"rounds = 0x{'f' * 5_000}", DIGITS),
    ],
)
def test_text_that_python_can_not_read_is_refused_naming_the_file(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_run_file(text, source="run.toml")
    assert caught.value.message == f"run.toml: not valid TOML: {message}"


def test_error_about_an_option_assigned_to_a_table_shows_the_correct_form(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILES[RUN])
    ended = _run(tmp_path, "run.toml", "-o", 'task="digits"')
    told = (
        "potluck: run.toml: 'task' must be a table (got 'digits'); write task.name = \"digits\"\n"
    )
    assert (ended[0], ended[1]) == (1, told)


@pytest.mark.parametrize("file", ["run.toml", "-"])
def test_run_file_with_a_byte_order_mark_is_accepted(file: str, tmp_path: Path) -> None:
    data = codecs.BOM_UTF8 + b'[task]\nname = "digits"\n'
    (tmp_path / "run.toml").write_bytes(data)
    code, said = _run(tmp_path, file, "-o", "rounds=3", stdin=data)
    assert code == 1
    assert said.startswith("potluck: nothing listens at 127.0.0.1:1 ")


def test_run_file_in_utf_16_is_refused_naming_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes("rounds = 3\n".encode("utf-16"))
    code, said = _run(tmp_path, "run.toml")
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith(
        "potluck: run.toml: the file is UTF-16 text, or not text at all; save it as UTF-8"
    )


def test_example_run_file_shows_every_training_setting_as_a_comment() -> None:
    text = example_run_file()
    table = text.partition("[training]\n")[2].partition("\n[round]")[0]
    for name, field in LocalTraining.model_fields.items():
        assert f"\n# {name} =" in f"\n{table}"
        assert (field.description or "").splitlines()[0] in table
    assert parse_run_file(text, source="run.toml").training == {}


def test_example_run_file_trains_a_task_that_needs_no_files() -> None:
    run_file = parse_run_file(example_run_file(), source="run.toml")
    task = create(Task, run_file.task.name, run_file.task.options)
    assert not task.needs_data
    assert not task.data_files()
    assert not task.groups  # groups would be one more thing to explain


def _run(folder: Path, *arguments: str, stdin: bytes = b"") -> tuple[int, str]:
    """Run `potluck run ARGUMENTS…` with a coordinator that can't be reached; return exit code and
    output."""
    files = make_federation(folder / "pki").operator
    environment = {
        "POTLUCK_COORDINATOR": "127.0.0.1:1",
        "POTLUCK_CERTIFICATE": str(files.certificate),
        "POTLUCK_KEY": str(files.key),
        "POTLUCK_AUTHORITY": str(files.authority),
    }
    ended = run_program(
        "potluck", "run", *arguments, folder=folder, environment=environment, stdin=stdin
    )
    return ended.returncode, ended.stderr.decode()


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "[::1]:65536", "localhost", ":80", "h:-1"])
def test_invalid_listening_port_is_refused(listen: str, tmp_path: Path) -> None:
    (tmp_path / "coordinator.toml").write_text(FILES[COORDINATOR])
    arguments = ("--config", "coordinator.toml", f"--listen={listen}")
    ended = run_program("potluck-server", *arguments, folder=tmp_path)
    told = f"'listen': must be HOST:PORT, with a port from 0 to 65535 (got '{listen}')\n"
    assert (ended.returncode, ended.stderr.decode()) == (
        1,
        f"potluck-server: coordinator.toml: {told}",
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("clients_per_round = true", "'clients_per_round': must be a number, not true or false"),
        ("round.quorum = true", "'round.quorum': must be a number, not true or false"),
        ("profiles.epsilon = true", "'profiles.epsilon': must be a number, not true or false"),
        ("secure_aggregation = 1", "'secure_aggregation': must be true or false"),
        ("transport.up.delta = 0", "'transport.up.delta': must be true or false"),
    ],
)
def test_boolean_for_a_number_or_number_for_a_boolean_is_refused(line: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse_run_file(f'{line}\n[task]\nname = "digits"\n', source="run.toml")


def test_boolean_for_a_number_in_tables_read_later_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'epochs': must be a number"):
        draw_up('training.epochs = true\n[task]\nname = "digits"\n', source="run.toml")
    with pytest.raises(
        ConfigurationError, match="fedavgm: option 'momentum' is True; it must be a number"
    ):
        draw_up(
            '[task]\nname = "digits"\n[strategy]\nname = "fedavgm"\nmomentum = true\n',
            source="run.toml",
        )


@pytest.mark.parametrize("kind", [RUN, COORDINATOR, HOST, OPERATOR, INVENTORY])
def test_comments_of_example_files_are_wrapped_evenly(kind: str) -> None:
    prose = re.compile(r"# (?!\[|[\w-]+ =).+")
    for line, following in itertools.pairwise(FILES[kind].splitlines()):
        if prose.fullmatch(line) and prose.fullmatch(following):
            word = following.removeprefix("# ").split()[0]
            assert len(line) <= 88 < len(f"{line} {word}"), line
