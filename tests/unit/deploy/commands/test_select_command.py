"""`potluck select`, from the command line to what it prints."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from support.populations import table_6

from potluck.common.process.command_line import exit_code_of
from potluck.common.settings.old_spelling import OldSpellingWarning
from potluck.common.settings.plugins import SELECTORS, installed
from potluck.deploy.commands.old_options import CommandWithOldOptions
from potluck.deploy.commands.select_command import select

SIX = [[10, 0, 0], [0, 10, 0], [5, 5, 0], [0, 0, 4], [2, 2, 2], [0, 3, 7]]

Run = Callable[..., tuple[int, str, str]]
Write = Callable[[Any], Path]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command and returns (exit code, standard output, standard
    error)."""
    app = typer.Typer()
    app.command(cls=CommandWithOldOptions)(select)

    def play(*arguments: object) -> tuple[int, str, str]:
        texts = [str(argument) for argument in arguments]
        code = exit_code_of(lambda: app(texts, standalone_mode=False), program="potluck")
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return play


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a value as a profile file."""

    def file(value: Any) -> Path:
        path = tmp_path / "profiles.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return file


def histograms(rows: list[list[int]] = SIX) -> dict[str, Any]:
    clients = [{"id": f"k{row}", "label_counts": counts} for row, counts in enumerate(rows)]
    return {"classes": len(rows[0]), "clients": clients}


def waterbirds() -> dict[str, Any]:
    federation = table_6("waterbirds-dist")
    assert federation.triplets is not None
    assert federation.interaction_matrices is not None
    clients = [
        {"id": each, "samples": int(matrix.sum()), "triplet": row, "interaction_matrix": matrix}
        for each, row, matrix in zip(
            federation.ids,
            federation.triplets.tolist(),
            federation.interaction_matrices.astype(int),
            strict=True,
        )
    ]
    return {
        "classes": 2,
        "clients": [c | {"interaction_matrix": c["interaction_matrix"].tolist()} for c in clients],
    }


def test_select_prints_one_json_object_per_round(run: Run, write: Write) -> None:
    code, out, err = run(
        "--selector", "fedentopt", "--profiles", write(histograms()),
        "--rounds", 3, "--clients-per-round", 2, "--seed", 5, "-o", "buffer=4", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert list(line) == ["round", "cohort", "reasons"]
        assert list(line["reasons"]) == line["cohort"]
        assert line["reasons"][line["cohort"][1]].endswith("bit")
    # with a buffer of 4, no client is selected twice in three rounds
    assert sorted(client for line in lines for client in line["cohort"]) == [
        f"k{k}" for k in range(6)
    ]


def test_select_prints_the_same_cohorts_for_the_same_seed(run: Run, write: Write) -> None:
    path = write(waterbirds())
    command = (
        "--selector",
        "feddiverse",
        "--profiles",
        path,
        "--rounds",
        4,
        "--clients-per-round",
        9,
        "--json",
    )
    assert run(*command, "--seed", 1) == run(*command, "--seed", 1)
    assert run(*command, "--seed", 1) != run(*command, "--seed", 2)


@pytest.mark.parametrize("old", [("--count", 2), ("--count=2",)])
def test_select_accepts_the_old_name_of_an_option_with_a_warning(
    run: Run, write: Write, old: tuple[object, ...]
) -> None:
    command = ("--selector", "fedentopt", "--profiles", write(histograms()), "--json")
    with pytest.warns(OldSpellingWarning) as noticed:
        found = run(*command, *old)
    assert found == run(*command, "--clients-per-round", 2)
    assert [str(each.message) for each in noticed] == [
        "--count is written --clients-per-round now; the old option is accepted before version 0.2"
    ]


def test_select_passes_options_to_the_selector(run: Run, write: Write) -> None:
    code, out, _ = run(
        "--selector", "feddiverse", "--profiles", write(waterbirds()), "--rounds", 1,
        "--clients-per-round", 9, "-o", "rotation=triplet", "-o", "cross_product=signed", "--json",
    )  # fmt: skip
    reasons = list(json.loads(out)["reasons"].values())
    assert (code, reasons[::3]) == (0, ["sc-weighted", "ci-weighted", "ai-weighted"])


@pytest.mark.parametrize(
    "selector",
    ["uniform", "round-robin", "feddiverse", "known-matrix", "fedentopt", "kl", "dc-real",
     "dc-balanced", "dc-random", "dc-exhaustive"],
)  # fmt: skip
def test_every_selector_runs_offline(run: Run, write: Write, selector: str) -> None:
    profiles = waterbirds()
    for client in profiles["clients"]:
        client["label_counts"] = [sum(row) for row in client["interaction_matrix"]]
    code, out, err = run(
        "--selector",
        selector,
        "--profiles",
        write(profiles),
        "--rounds",
        2,
        "--clients-per-round",
        7,
        "--json",
    )
    assert (code, err) == (0, "")
    assert [len(set(json.loads(line)["cohort"])) for line in out.splitlines()] == [7, 7]


def test_select_prints_a_table_without_json(run: Run, write: Write) -> None:
    code, out, _ = run(
        "--selector", "kl", "--profiles", write(histograms()), "--clients-per-round", 2
    )
    assert code == 0
    assert out.split()[:3] == ["round", "client", "why"]
    assert "most samples" in out


RUN_FILE = """
clients_per_round = 2
seed = 5
[task]
name = "digits"
[selector]
name = "{selector}"
{options}
"""
PRIVACY = "[privacy]\nanswer_noise_multiplier = 20.0\nnoise_multiplier = 2.0\nunit = '{unit}'\n"


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run file with a selector and, if given, a privacy unit."""

    def file(selector: str, options: str = "", unit: str = "") -> Path:
        path = tmp_path / "run.toml"
        text = RUN_FILE.format(selector=selector, options=options)
        path.write_text(text + (PRIVACY.format(unit=unit) if unit else ""))
        return path

    return file


def test_select_takes_selector_options_cohort_size_and_seed_from_a_run_file(
    run: Run, write: Write, run_file: Callable[..., Path]
) -> None:
    path = run_file("fedentopt", "buffer = 4")
    common = ("--profiles", write(histograms()), "--rounds", 3, "--json")
    given = ("--clients-per-round", 2, "--seed", 5)
    explicit = run("--selector", "fedentopt", "-o", "buffer=4", *given, *common)
    assert run(path, *common) == explicit
    assert explicit[0] == 0
    assert run(path, *common, "--selector", "kl") == run("--selector", "kl", *given, *common)
    fewer = json.loads(run(path, *common, "--clients-per-round", 1)[1].splitlines()[0])
    assert len(fewer["cohort"]) == 1


@pytest.mark.parametrize("unit", ["record", "client"])
def test_selector_that_a_private_run_refuses_is_refused_with_question_and_remedy(
    run: Run, write: Write, run_file: Callable[..., Path], unit: str
) -> None:
    path = run_file("fedentropy", unit=unit)
    code, out, err = run(path, "--profiles", write(histograms()))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"{path}: selector fedentropy is not compatible with [privacy]: " in err
    assert "soft-label" in err
    assert "; choose a selector" in err
    code, _, err = run(path, "--profiles", write(histograms()), "--selector", "fedentopt")
    assert code == 0
    assert f'note: selector fedentopt with [privacy] and unit = "{unit}": free: uses' in err


def test_selector_that_is_charged_names_its_question_offline(
    run: Run, write: Write, run_file: Callable[..., Path]
) -> None:
    code, _, err = run(run_file("pow-d", unit="record"), "--profiles", write(histograms()))
    assert code == 1
    assert (
        'selector pow-d with [privacy] and unit = "record": charged: asks clients for loss' in err
    )
    assert re.search(r"selector pow-d asks \d clients 'loss' before it chooses, and profiles", err)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [(["--clients-per-round", 2], "--selector"), (["--selector", "kl"], "--clients-per-round")],
)
def test_select_without_a_run_file_names_the_missing_option(
    run: Run, write: Write, arguments: list[object], missing: str
) -> None:
    code, _, err = run("--profiles", write(histograms()), *arguments)
    assert code == 2
    assert f"{missing}: it is missing; give it, or name a run file" in err


def test_select_with_an_unreadable_run_file_is_refused(
    run: Run, write: Write, tmp_path: Path
) -> None:
    code, _, err = run(tmp_path / "none.toml", "--profiles", write(histograms()))
    assert (code, err.count("\n")) == (1, 1)
    assert "can't read the run file" in err


def test_select_writes_a_plot(run: Run, write: Write, tmp_path: Path) -> None:
    picture = tmp_path / "selection.png"
    command = (
        "--selector",
        "feddiverse",
        "--profiles",
        write(waterbirds()),
        "--clients-per-round",
        9,
    )
    code, out, _ = run(*command, "--rounds", 3, "--json", "--plot", picture)
    assert code == 0
    assert len(out.splitlines()) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_select_with_too_many_clients_per_round_selects_all_and_warns(
    run: Run, write: Write
) -> None:
    code, out, err = run(
        "--selector",
        "uniform",
        "--profiles",
        write(histograms()),
        "--clients-per-round",
        9,
        "--json",
    )
    assert code == 0
    assert len(json.loads(out)["cohort"]) == 6
    assert "--clients-per-round is 9" in err
    assert "6 clients" in err


def test_select_requires_only_the_profile_fields_of_its_selector(run: Run, write: Write) -> None:
    path = write({"classes": 2, "clients": [{"id": "a"}, {"id": "b"}]})
    assert run("--selector", "uniform", "--profiles", path, "--clients-per-round", 1)[0] == 0
    code, _, err = run("--selector", "feddiverse", "--profiles", path, "--clients-per-round", 1)
    assert code == 1
    assert "needs the triplet" in err


def test_select_puts_a_client_without_a_profile_last(run: Run, write: Write) -> None:
    profiles = histograms()
    profiles["clients"].append({"id": "late"})
    code, out, _ = run(
        "--selector", "kl", "--profiles", write(profiles), "--clients-per-round", 7, "--json"
    )
    line = json.loads(out)
    assert (code, line["cohort"][-1]) == (0, "late")


@pytest.mark.parametrize("kind", ["zero triplets", "same clients"])
def test_select_accepts_degenerate_profiles(run: Run, write: Write, kind: str) -> None:
    triplet = [0, 0, 0] if kind == "zero triplets" else [0.2, 0.3, 0.1]
    clients = [{"id": f"k{row}", "triplet": triplet, "label_counts": [3, 3]} for row in range(8)]
    path = write({"classes": 2, "clients": clients})
    for selector in ("feddiverse", "fedentopt", "dc-balanced", "kl"):
        code, out, _ = run(
            "--selector",
            selector,
            "--profiles",
            path,
            "--clients-per-round",
            6,
            "--rounds",
            3,
            "--json",
        )
        assert code == 0
        assert [len(json.loads(line)["cohort"]) for line in out.splitlines()] == [6, 6, 6]


def with_client(**fields: Any) -> dict[str, Any]:
    return {"classes": 2, "clients": [{"id": "a", **fields}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "invalid JSON"),
        ("[]", "profiles.json: must be a table"),
        ({"classes": 3}, "clients: is missing"),
        ({"classes": 3, "clients": []}, "clients: must have 1 entry at least"),
        ({**with_client(), "classes": 0}, "classes: must be greater than or equal to 1"),
        ({"classes": 3, "clients": [{"samples": 3}]}, "clients.0.id: is missing"),
        ({"classes": 3, "clients": [{"id": "a"}, {"id": "a"}]}, "'a' occurs twice"),
        (with_client(colour=3), "clients.0.colour: is not known here"),
        (with_client(samples=-1), "samples: must be greater than or equal to 0"),
        (with_client(samples=1.5), "samples: must be a whole number"),
        (with_client(label_counts=[1]), "client 'a' has 1 entries for 2 classes"),
        (with_client(label_counts=[1, -2]), "counts.1: must be greater than or equal to 0"),
        (with_client(label_counts=[1, "2"]), "counts.1: must be a number, not '2'"),
        (with_client(label_counts=[1, float("nan")]), "counts.1: must be a finite number"),
        (with_client(label_counts=[float("inf"), 1]), "counts.0: must be a finite number"),
        (
            with_client(triplet=[0.1, 0.2, 1.5]),
            "triplet.2: must be less than or equal to 1",
        ),
        (
            with_client(triplet=[-0.1, 0, 0]),
            "triplet.0: must be greater than or equal to 0",
        ),
        (with_client(triplet=[0.1, 0.2]), "triplet.2: is missing"),
        (with_client(interaction_matrix=[[1, 2]]), "of client 'a' has 1 entries for 2 classes"),
        (with_client(interaction_matrix=[[1], [2]]), "interaction_matrix.0.1: is missing"),
    ],
)
def test_invalid_profile_file_is_refused_naming_the_place(
    run: Run, write: Write, content: Any, message: str
) -> None:
    code, out, err = run(
        "--selector", "uniform", "--profiles", write(content), "--clients-per-round", 1
    )
    assert (code, out) == (1, "")
    assert message in err
    assert "profiles.json" in err
    assert len(err.splitlines()) == 1


def test_zero_clients_per_round_is_refused(run: Run, write: Write) -> None:
    code, _, err = run(
        "--selector", "uniform", "--profiles", write(histograms()), "--clients-per-round", 0
    )
    assert code == 2
    assert "'--clients-per-round': must be greater than or equal to 1; see `" in err


def test_missing_profile_file_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run(
        "--selector", "uniform", "--profiles", tmp_path / "none", "--clients-per-round", 1
    )
    assert code == 1
    assert "No such file" in err


@pytest.mark.parametrize(
    ("selector", "option", "message"),
    [
        ("fedentopt", "bufer=3", "its options: buffer"),
        ("dc-balanced", "theta=3", "its options: added, stop_early"),
        ("uniform", "theta=3", "its options: none"),
        ("feddiverse", "rotation=daily", "it must be 'round' or 'triplet'"),
        ("fedentopt", "buffer=-1", "it must be greater than or equal to 0"),
        ("fedentopt", "buffer", "not KEY=VALUE"),
        ("powr", "a=1", "installed: "),
    ],
)
def test_error_about_an_invalid_selector_option_lists_the_valid_ones(
    run: Run, write: Write, selector: str, option: str, message: str
) -> None:
    code, out, err = run(
        "--selector",
        selector,
        "--profiles",
        write(histograms()),
        "--clients-per-round",
        1,
        "-o",
        option,
    )
    assert (code, out) == (1, "")
    assert message in err


def test_select_refuses_too_many_subsets(run: Run, write: Write) -> None:
    path = write(histograms(SIX * 20))
    code, _, err = run(
        "--selector",
        "dc-exhaustive",
        "--profiles",
        path,
        "--clients-per-round",
        20,
        "-o",
        "added=10",
    )
    assert code == 1
    assert "46897636623981 ways, more than 10^8" in err


def test_selector_list_contains_every_selector_with_a_description(run: Run) -> None:
    code, printed, _ = run("--list")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert list(lines) == installed(SELECTORS)
    assert lines["uniform"].startswith("Draws the cohort uniformly")


@pytest.mark.parametrize(
    ("unit", "asking"),
    [
        ("record", "charged: asks clients for loss"),
        ("client", "refused: asks clients for loss"),
    ],
)
def test_the_selectors_are_listed_with_what_noise_makes_of_them(
    run: Run, unit: str, asking: str
) -> None:
    code, printed, _ = run("--privacy", unit)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert list(lines) == installed(SELECTORS)
    assert lines["uniform"] == "free"
    assert lines["pow-d"] == asking
    assert lines["oort"] == "refused: wants utility reported with updates"


def test_selector_list_has_one_short_line_per_selector(run: Run) -> None:
    for line in run("--list")[1].splitlines():
        _, text = line.split(maxsplit=1)
        assert len(text) <= 80, line
        assert re.fullmatch(r"[A-Z][A-Za-z ,;:.'`()-]*\.", text), line  # without formulas
