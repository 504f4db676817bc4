"""Contents of a model card, and its files."""

from __future__ import annotations

import json
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from support.operator_service import RUN_ID, member, status

from potluck.common.records.round_message import round_of
from potluck.deploy.cards.card_source import make_card
from potluck.deploy.cards.model_card import ModelCard, write_card
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState, RunState

COMMONMARK = MarkdownIt("commonmark").enable("table")
AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
RUN_FILE = """
rounds = 9
secure_aggregation = false
[task]
name = "digits"
[model]
keep = ["3.*"]
[selector]
name = "uniform|<b>"
"""


def committed(number: int, *members: operator_pb2.Member) -> operator_pb2.CommittedRound:
    round_ = operator_pb2.CommittedRound(
        round=number,
        members=members,
        metrics=operator_pb2.Metrics(accuracy=number / 10, others={"tuned_loss": 0.5}),
        model_blake3=f"{number}" * 64,
        software={"potluck": "0.1.0" if number < 2 else "0.2.0", "torch": "2.6"},
    )
    round_.committed_at.FromDatetime(AT)
    return round_


def selected(
    number: int, *, epoch: int | None, samples: int, state: MemberState.ValueType
) -> operator_pb2.Member:
    made = member(number, state)
    made.samples, made.software_version = samples, "0.1.0"
    if epoch is not None:
        made.data_epoch = epoch
    return made


def card(best_of: str | None = None, rounds: int = 2) -> ModelCard:
    stands = status(
        RunState.RUN_STATE_FINISHED, committed=2, rounds=9, reason="stopped early"
    ).status
    stands.initial_model_blake3 = "0" * 64
    included, late = MemberState.MEMBER_STATE_INCLUDED, MemberState.MEMBER_STATE_LATE
    history = [
        committed(
            1,
            selected(1, epoch=0, samples=10, state=included),
            selected(2, epoch=3, samples=20, state=late),
        ),
        committed(2, selected(1, epoch=1, samples=12, state=included)),
    ]
    hosts = {f"client-{number}": f"host-{number}" for number in range(3)}
    disclosures = [
        operator_pb2.AuditDisclosuresResponse(
            sums=[operator_pb2.AuditedSum(released=True, hosts=hosts, epsilon=0.5)],
            profiles=[
                operator_pb2.AuditedProfile(client_id="client-1", signal="triplet", epsilon=1.25),
                operator_pb2.AuditedProfile(client_id="client-2", signal="triplet"),
            ],
        )
    ]
    return make_card(
        stands,
        [round_of(each) for each in history[:rounds]],
        RUN_FILE,
        disclosures,
        best_of=best_of,
    )


def test_model_card_contains_model_cohorts_data_and_privacy() -> None:
    found = card(best_of="accuracy")
    assert (found.run, found.round, found.blake3) == (RUN_ID, 2, "2" * 64)
    assert (found.best_of, found.state) == ("accuracy", "finished: stopped early")
    assert found.measures == {"accuracy": 0.2, "tuned_loss": 0.5}
    assert found.kept_by_clients == ["3.*"]
    assert found.tables["selector"] == {"name": "uniform|<b>"}
    # The default: the run file has no strategy.
    assert found.tables["strategy"] == {"name": "fedavg"}
    first, second = found.clients
    assert (first.selected, first.included, first.samples) == (2, 2, 12)
    assert (first.data_epochs, first.software) == ([0, 1], ["0.1.0"])
    assert (second.selected, second.included, second.data_epochs) == (1, 0, [3])
    assert (first.epsilon, second.epsilon) == (1.75, 0.5)
    assert found.privacy.largest_epsilon == 1.75
    assert not found.privacy.masked_updates
    assert found.software.coordinator == {"potluck": ["0.1.0", "0.2.0"], "torch": ["2.6"]}
    assert found.software.hosts == {"0.1.0": 1}
    assert [each.included for each in found.rounds] == [["client-1"], ["client-1"]]
    assert tomllib.loads(found.run_file)["rounds"] == 9


@pytest.mark.parametrize(
    ("strategy", "trains"),
    [("feddf", True), ("fedavg", False), ("of-another-machine", None)],
)
def test_model_card_states_whether_the_coordinator_trained_the_model(
    strategy: str, trains: bool | None
) -> None:
    stands = status(RunState.RUN_STATE_FINISHED, committed=1, rounds=1).status
    run_file = f'{RUN_FILE}[strategy]\nname = "{strategy}"\n'
    found = make_card(stands, [round_of(committed(1))], run_file, [])
    assert found.coordinator_trains is trains
    assert ("The coordinator trained the model further" in found.markdown()) is (trains is True)


def test_model_card_counts_late_updates_that_joined() -> None:
    of_round = operator_pb2.CommittedRound
    late = selected(2, epoch=None, samples=0, state=MemberState.MEMBER_STATE_LATE)
    joined = operator_pb2.LateUpdate(client_id=late.client_id, round=1, weight=0.5)
    rounds = [
        round_of(of_round(round=1, members=[late])),
        round_of(of_round(round=2, late=[joined])),
    ]
    stands = status(RunState.RUN_STATE_FINISHED, committed=2, rounds=2).status
    [found] = make_card(stands, rounds, RUN_FILE, []).clients
    assert (found.selected, found.included) == (1, 1)
    [before] = make_card(stands, rounds[:1], RUN_FILE, []).clients
    assert (before.selected, before.included) == (1, 0)


def test_model_card_of_an_earlier_round_excludes_later_rounds() -> None:
    assert [each.round for each in card(rounds=1).rounds] == [1]
    assert card(rounds=1).clients[0].data_epochs == [0]
    before = card(rounds=0)
    assert (before.round, before.blake3, before.clients) == (0, "0" * 64, [])


def test_model_card_is_written_as_json_and_markdown_beside_the_model(tmp_path: Path) -> None:
    found = card(best_of="accuracy")
    as_json, as_markdown = write_card(found, tmp_path / "best.safetensors")
    assert (as_json.name, as_markdown.name) == ("best.card.json", "best.card.md")
    assert ModelCard.model_validate(json.loads(as_json.read_text())) == found
    text = as_markdown.read_text()
    assert "| accuracy | 20.0 % |" in text
    assert "| client-1 | host-0 | 2 of 2 | 1 to 2 | 12 | 0, 1 | 1.75 |" in text
    assert "the run's best by accuracy" in text
    assert "| coordinator: potluck | 0.1.0, then 0.2.0 |" in text
    assert 'name = "digits"' in text
    # Names from other parties don't become markup.
    assert "<b>" not in COMMONMARK.render(text)
    shards = tmp_path / "shards"
    shards.mkdir()
    assert {path.parent for path in write_card(found, shards)} == {shards}


def test_model_card_marks_partial_metrics() -> None:
    one, two = committed(1), committed(2)
    two.coverage["accuracy"].CopyFrom(
        operator_pb2.Coverage(clients=3, asked=6, samples=120, partial=True)
    )
    two.coverage["dice"].CopyFrom(operator_pb2.Coverage(asked=6, partial=True))
    found = make_card(
        status(RunState.RUN_STATE_FINISHED).status, [round_of(one), round_of(two)], RUN_FILE, []
    )
    text = str(found)
    assert "| accuracy | 20.0 % | 3 of 6 clients, 120 samples, partial |" in text
    assert "| dice | – | 0 of 6 clients, partial |" in text
    assert "| tuned\\_loss | 0.5000 | – |" in text or "| tuned_loss | 0.5000 | – |" in text
    assert "| 20.0 % (partial) |" in text
    assert found.values()["rounds"][1]["coverage"]["accuracy"]["asked"] == 6
    assert found.values()["coverage"]["accuracy"]["samples"] == 120


def test_model_card_text_uses_plain_words() -> None:
    text = str(card())
    assert f"| model | after round 2 of run `{RUN_ID}` |" in text
    assert "| rounds in this model | 2 of the 9 planned |" in text
    assert "| run now | finished: stopped early |" in text
    assert "| client-2 | host-0 | 0 of 1 | 1 | 20 | 3 | 0.5 |" in text
    assert "The coordinator saw each client's update." in text
    assert (
        "no client had spent more than ε = 1.75 on noisy disclosures. Each disclosure counts"
        in text
    )
    assert (
        "The run's clients took part in 1 secure sum.\nThe sums hide the input of each client from"
        in text
    )
    assert "| this card was written by | potluck" in text
    assert repr(card()).startswith(f"<ModelCard: round 2 of run {RUN_ID}; print it")
    unspent = make_card(status(RunState.RUN_STATE_FINISHED).status, [], RUN_FILE, []).markdown()
    assert "no client had made a noisy disclosure (ε = 0)" in unspent


@pytest.mark.parametrize(
    "name",
    [
        "[report](https://evil.example)",
        "![](https://evil.example/pixel.png)",
        "`` `code` ``",
        "https://evil.example and www.evil.example or me@evil.example",
        "<a href='https://evil.example'>x</a> &lt; a | b \\",
    ],
)
def test_run_name_with_markup_is_shown_as_plain_text(name: str) -> None:
    found = card().model_copy(update={"name": name})
    html = COMMONMARK.render(found.markdown().split("\n\n")[0])
    assert html == f"<h1>Model of run {escapeHtml(' '.join(name.split()))}</h1>\n"


def test_web_address_in_a_run_name_is_not_linked() -> None:
    # Some Markdown programs make links of "https://", "www." and "@" anywhere in a text.
    text = (
        card().model_copy(update={"name": "https://a.example www.b.example c@d.example"}).markdown()
    )
    assert "run https\\://a.example www\\.b.example c\\@d.example\n" in text


def test_option_value_with_backticks_and_bars_stays_in_one_table_cell() -> None:
    tables = {"model": {"name": "a` | [x](https://evil.example) `b"}}
    text = card().model_copy(update={"tables": tables}).markdown()
    section = text.split("## How it was made\n\n")[1].split("\n\n")[0]
    html = COMMONMARK.render(section)
    assert html.count("<td") == 2
    assert "<a " not in html
    assert "a` | [x](https://evil.example) `b" in html
