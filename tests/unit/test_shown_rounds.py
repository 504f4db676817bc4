"""Committed rounds of one database, as each program shows them, compared with what is kept here.

`pytest tests/unit/test_shown_rounds.py --rewrite` writes `shown_rounds.json` again.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from support.stored import AT, COHORT, RUN, UPDATE, commit, digest

from potluck.common.learning.spread import Coverage, spread
from potluck.common.net.build_version import software_version
from potluck.common.records import round_message
from potluck.common.records.round import RoundFacts
from potluck.common.trainer import Measure
from potluck.deploy.cards.card_source import make_card
from potluck.deploy.operator.json_view import event_values
from potluck.deploy.operator.model_download import DownloadedModel
from potluck.deploy.operator.run_view import RunView, observe
from potluck.deploy.view.run_report import report_values, run_report
from potluck.deploy.view.run_summary import summarise
from potluck.deploy.view.watch_lines import event_line
from potluck.deploy.view.watch_table import rounds_table
from potluck.federation.frames import clients_frame, rounds_frame, selections_frame
from potluck.federation.rounds import round_of
from potluck.page.disclosed_shown import shown_disclosures
from potluck.page.run_shown import ClientList, shown_details, shown_run
from potluck.rpc.v1 import operator_pb2
from potluck.server.live.feed import committed_round_message, run_status
from potluck.server.sinks.record_reader import RecordReader
from potluck.server.store import AttemptKey, BestSoFar, MemberState, Store
from potluck.server.store.records import LateRow, LateState, Provenance
from potluck.server.store.round_record import round_record
from potluck.server.store.sql import schema

KEPT = Path(__file__).parent / "shown_rounds.json"
FILE = 'rounds = 3\nclients_per_round = 3\nseed = 7\n[task]\nname = "digits"\n'
OWN = {"near": Measure(label="near share", unit="share", higher_is_better=True)}
COMPARED = (
    "wire",
    "programs",
    "lines",
    "table",
    "summary",
    "report",
    "page",
    "card",
    "metadata",
    "frames",
    "sinks",
)


def fill(store: Store, run_id: str, measures: dict[str, Measure]) -> None:
    """Store two rounds; the second has a late update and every value that a round can have."""
    store.add_run(replace(RUN, run_id=run_id, measures=measures))
    store.append_to_roster(run_id, ["a", "b", "c"])
    store.set_initial_model(run_id, digest(0), AT)
    first, second = AttemptKey(run_id, 1, 1), AttemptKey(run_id, 2, 1)

    def begin(key: AttemptKey, troubles: dict[str, str]) -> None:
        store.begin_attempt(key, [0, 1, 2], AT)
        store.set_cohort(key, COHORT, provenance={"a": Provenance(data_epoch=4, software="0.0.9")})
        for client in "abc":
            if client in troubles:
                store.set_member(key, client, MemberState.LOST, trouble=troubles[client])
            elif client != "c" or key is second:
                store.set_member(key, client, MemberState.RECEIVED, update=UPDATE)

    begin(first, {"b": "host h1 went away"})
    late = LateRow(
        run_id=run_id, round=1, attempt=1, client_id="c", state=LateState.AWAITED,
        model_blake3=digest(0), seconds_left=3.0,
    )  # fmt: skip
    unmeasured = {"loss": Coverage(clients=0, asked=3, samples=0, partial=True)}
    store.commit_round(
        replace(
            commit(first, ["a"]), late=[late], metrics={"training_loss": 1.5}, spreads={},
            coverage={"training_loss": Coverage(clients=1, asked=1, samples=57)} | unmeasured,
        )
    )  # fmt: skip
    begin(second, {})
    behind = Coverage(clients=3, asked=3, samples=171)
    over = replace(
        spread([0.5, 0.75, 0.875, 0.25, 0.625], higher_is_better=True), asked=6, samples=60
    )
    values = dict.fromkeys(measures, 0.5) or {
        "accuracy": 0.75, "loss": 0.5, "worst_group_accuracy": 0.25, "weighted_f1": 0.625,
    }  # fmt: skip
    values |= {f"personal_{name}": value / 2 for name, value in values.items()}
    spreads = {name: over for name in values if name.endswith(("accuracy", "near"))}
    store.commit_round(
        replace(
            commit(second, ["a", "b"]), metrics=values, spreads=spreads,
            coverage=dict.fromkeys(values, behind), set_aside={"c": "no new labels"},
            late=[replace(late, state=LateState.JOINED, joined_round=2, weight=0.5, update=UPDATE)],
            best=BestSoFar(measure=next(iter(values)), round=2, value=0.75, mark=0.75),
            software={"torch": "2.5.1"},
        )
    )  # fmt: skip


def shown(store: Store, reader: RecordReader, run_id: str) -> dict[str, Any]:
    """Return everything that the programs show of a run's rounds."""
    status = run_status(store.run(run_id))
    rows = store.rounds(run_id)
    committed = [committed_round_message(row) for row in rows]
    profiles = [
        operator_pb2.ClientProfile(client_id=each, samples=57, label_counts=[3.0, 4.0])
        for each in "abc"
    ]
    view, events = RunView(), [operator_pb2.WatchRunResponse(status=status)]
    events += [operator_pb2.WatchRunResponse(committed=each) for each in committed]
    lines = []
    for event in events:
        view = observe(view, event)
        lines.append(event_line(view, event))
    console = Console(file=io.StringIO(), width=160, color_system=None)
    with console.capture() as capture:
        console.print(rounds_table(view, 5))
    page = shown_run(view, ClientList(), AT)
    assert page is not None
    origin = operator_pb2.ModelOrigin(
        run_id=run_id, round=2, run_file=FILE, committed=committed[-1], best=status.best
    )
    model = DownloadedModel(path=Path(), blake3=digest(2), size=0, origin=origin)
    kept, rounds = view.rounds, [round_of(each) for each in view.rounds]
    card = make_card(status, kept, FILE, [])
    frames = (rounds_frame(rounds), selections_frame(rounds), clients_frame(rounds))
    tracked = reader.rounds(run_id, after=0, limit=9)
    return {
        "wire": [MessageToDict(each) for each in committed],
        "programs": [event_values(event) for event in events],
        "lines": lines,
        "table": [line.rstrip() for line in capture.get().splitlines()],
        "summary": summarise(view, clients=3).model_dump(mode="json"),
        "report": report_values(run_report(view.rounds, 2, profiles)),
        "page": {
            "run": page.model_dump(mode="json"),
            "details": [shown_details(each).model_dump(mode="json") for each in kept],
            "disclosed": shown_disclosures(view.rounds, 2, profiles, [], FILE).model_dump(
                mode="json"
            ),
        },
        "card": {"json": card.values(), "markdown": card.markdown()},
        "metadata": model.metadata(),
        "frames": [json.loads(each.to_json(orient="split")) for each in frames],
        "sinks": [{"row": each.row, "numbers": each.numbers} for each in tracked],
    }


@pytest.mark.parametrize("kind", ["classification", "own-measures"])
def test_committed_rounds_are_shown_as_in_the_stored_reference(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'potluck.sqlite3'}"
    with Store.open(url) as store:
        fill(store, kind, OWN if kind == "own-measures" else {})
        reader = RecordReader(url)
        try:
            text = json.dumps(shown(store, reader, kind))
        finally:
            reader.close()
    found = json.loads(text.replace(software_version(), "VERSION"))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if request.config.getoption("--rewrite"):
        KEPT.write_text(json.dumps(kept | {kind: found}, indent=1, sort_keys=True) + "\n")
        return
    assert tuple(found) == COMPARED
    for name in COMPARED:
        assert found[name] == kept[kind][name], name


def test_every_fact_of_a_round_has_a_column_and_a_field_of_the_message() -> None:
    names = set(RoundFacts.names())
    assert names <= set(schema.rounds.columns.keys())
    assert names <= set(operator_pb2.CommittedRound.DESCRIPTOR.fields_by_name)


def test_round_is_the_same_after_its_message(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'potluck.sqlite3'}") as store:
        fill(store, "run", {})
        records = [round_record(row) for row in store.rounds("run")]
    messages = [round_message.round_message(each) for each in records]
    assert [round_message.round_of(each) for each in messages] == records
