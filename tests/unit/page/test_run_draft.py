"""Drafts of run files: the form writes into the file, and each problem has a line."""

import pytest

from potluck.common.run_file.runfile import example_run_file, parse_run_file
from potluck.common.settings.old_spelling import OldSpellingWarning
from potluck.page.run_draft import (
    FIRST_DRAFT,
    drafted,
    form_fields,
    line_of,
    problems_of,
    refused,
)
from potluck.page.run_shown import compared

TEXT = """\
# mine
rounds = 5  # few
[task]
name = "digits"
clients = 6
"""


def test_first_draft_of_a_run_file_is_valid() -> None:
    assert problems_of(FIRST_DRAFT) == []
    assert problems_of(example_run_file()) == []
    parse_run_file(FIRST_DRAFT, source="the first draft")


def test_form_fields_have_hints_defaults_and_choices() -> None:
    fields = {field.key: field for field in form_fields()}
    assert fields["rounds"].default == "30"
    assert fields["rounds"].hint == "Number of rounds after which the run ends."
    assert fields["selector.name"].default == "uniform"
    assert fields["selector.name"].hint == "Selector, which chooses the clients of each round."
    assert "fedentopt" in fields["selector.name"].choices
    assert fields["objective.name"].default == "cross-entropy"
    assert fields["training.epochs"].default == "the task's own"


def test_form_fields_are_written_into_the_run_file_keeping_comments() -> None:
    draft = drafted(TEXT, {"rounds": "7", "name": "5", "selector.name": "kl", "seed": ""})
    assert draft.run_file.startswith("# mine\nrounds = 7  # few\n")
    assert draft.values == {
        "name": "5",
        "rounds": "7",
        "task.name": "digits",
        "selector.name": "kl",
    }
    assert draft.problems == []
    again = drafted(draft.run_file, {"selector.name": "", "task.name": "mnist"})
    assert again.values == {"name": "5", "rounds": "7", "task.name": "mnist"}
    assert "[selector]" not in again.run_file


@pytest.mark.parametrize(
    ("text", "key", "line", "said"),
    [
        ("rounds = 0\n[task]\nname = 'digits'", "rounds", 1, "greater than or equal to 1"),
        ("rounds = \n", "", 1, "not valid TOML"),
        (f"z = {'[' * 3_000}", "", None, "not valid TOML: lists and tables have more than"),
        ("[task]\nclients = 3", "task.name", 1, "'task.name' is missing"),
        ("[task]\nname = 'digits'\n[round]\nquorum = 2", "round.quorum", 4, "less than or equal"),
        ("ruonds = 3\n[task]\nname = 'digits'", "ruonds", 1, "did you mean 'rounds'?"),
        ("[task]\nname = 'd'\n[training]\nepochs = 0", "training.epochs", 4, "equal to 1"),
        ("listen = 'x'\nstate_directory = 'y'", "", None, "this looks like the configuration of a"),
    ],
)
def test_each_run_file_problem_has_a_key_and_a_line(
    text: str, key: str, line: int | None, said: str
) -> None:
    [problem] = problems_of(text)
    assert (problem.key, problem.line) == (key, line)
    assert said in problem.text


@pytest.mark.parametrize(
    ("message", "key", "line"),
    [
        ("potluck.selectors: 'powr' is not installed; installed: uniform", "selector.name", None),
        ("potluck.tasks: 'digit' is not installed; installed: digits", "task.name", 4),
        ("'rounds' is more than this coordinator takes", "rounds", 2),
        ("'digits' is not installed on any host", "task.name", 4),
        ("this coordinator takes no more runs", "", None),
    ],
)
def test_refusal_of_the_coordinator_is_shown_at_its_field(
    message: str, key: str, line: int | None
) -> None:
    [problem] = refused(TEXT, message)
    assert (problem.key, problem.line, problem.text) == (key, line, message)


def test_deeply_nested_values_are_refused_in_the_form() -> None:
    for changes in ({"rounds": "3"}, {"rounds": ""}):
        draft = drafted(f"z = {'[' * 3_000}", changes)
        [problem] = draft.problems
        assert "not valid TOML: lists and tables have more than" in problem.text
    assert drafted(TEXT, {"rounds": "[" * 3_000}).problems


def test_line_of_a_key_is_found_in_tables_and_dotted_keys() -> None:
    text = "a.b = 1\n[c]\nd = 2\n[[e]]\nf = 3\n"
    found = {key: line_of(text, key) for key in ("a.b", "c.d", "c", "e.f", "c.x", "z")}
    assert found == {"a.b": 1, "c.d": 3, "c": 2, "e.f": 5, "c.x": 2, "z": None}


def test_runs_are_compared_by_the_settings_in_which_they_differ() -> None:
    other = TEXT.replace("clients = 6", "clients = 8").replace("# mine", "name = 'b'\nseed = 1")
    found = compared([], [TEXT, other])
    assert [(each.key, each.values) for each in found.differences] == [
        ("task.clients", ["6", "8"]),
        ("seed", ["–", "1"]),
    ]


def test_old_key_names_in_a_draft_are_renamed() -> None:
    old = f"count = 3\n{TEXT}"
    with pytest.warns(OldSpellingWarning):
        draft = drafted(old, {"rounds": "7"})
    assert (draft.problems, draft.values["clients_per_round"]) == ([], "3")
    assert compared([], [old, f"clients_per_round = 3\n{TEXT}"]).differences == []
