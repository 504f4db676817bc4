"""Rounds, clients and selections as tables."""

import pandas as pd

from potluck.common.records.round_message import round_of as record_of
from potluck.federation import Coverage
from potluck.federation.frames import (
    attendance_frame,
    clients_frame,
    rounds_frame,
    runs_frame,
    selections_frame,
)
from potluck.federation.rounds import Round, round_of
from potluck.rpc.v1 import operator_pb2 as rpc


def member(client: str, state: rpc.MemberState.ValueType, seconds: float) -> rpc.Member:
    return rpc.Member(
        client_id=client, host_id="host", state=state, reason="<why>", samples=7, seconds=seconds
    )


def two_rounds() -> list[Round]:
    included, late = rpc.MEMBER_STATE_INCLUDED, rpc.MEMBER_STATE_LATE
    first = rpc.CommittedRound(
        round=1,
        members=[member("client-10", included, 2.0), member("client-9", late, 5.0)],
        metrics=rpc.Metrics(accuracy=0.5, others={"dice": 0.25}),
        seconds=3.0,
        bytes_up=10,
        model_blake3="ab",
        spreads={
            "accuracy": rpc.Spread(
                clients=10,
                asked=12,
                samples=90,
                partial=True,
                mean=0.5,
                worst_tenth=0.125,
                quantiles=[0.1, 0.2, 0.3, 0.4, 0.5],
            )
        },
        coverage={"dice": rpc.Coverage(clients=3, asked=3, samples=40)},
    )
    second = rpc.CommittedRound(round=2, members=[member("client-10", included, 4.0)])
    return [round_of(record_of(each)) for each in (first, second)]


def test_rounds_table_has_a_row_per_round() -> None:
    frame = rounds_frame(two_rounds())
    assert frame.index.tolist() == [1, 2]
    measured = frame[["accuracy", "dice", "accuracy_worst_tenth"]].to_numpy().tolist()
    assert measured[0] == [0.5, 0.25, 0.125]
    assert frame[["selected", "included"]].to_numpy().tolist() == [[2, 1], [1, 1]]
    assert bool(pd.isna(frame["accuracy"].loc[2]))
    behind = [f"dice_{name}" for name in ("clients", "asked", "partial", "samples")]
    assert frame[behind].to_numpy().tolist()[0] == [3, 3, 0, 40]
    behind = [f"accuracy_worst_tenth_{name}" for name in ("clients", "asked", "partial", "samples")]
    assert frame[behind].to_numpy().tolist()[0] == [10, 12, 1, 90]


def test_rounds_contain_the_coverage_of_their_metrics() -> None:
    first, second = two_rounds()
    assert first.coverage == {"dice": Coverage(clients=3, asked=3, samples=40)}
    assert first.spreads["accuracy"].coverage.partial
    assert second.coverage == {}
    assert "<td>0.25</td><td>3 clients, 40 samples</td>" in first._repr_html_()


def test_clients_table_counts_selections_in_natural_client_order() -> None:
    frame = clients_frame(two_rounds())
    assert frame.index.tolist() == ["client-9", "client-10"]
    assert frame["selected"].tolist() == [1, 2]
    assert frame["included"].tolist() == [0, 2]
    assert frame["last_round"].tolist() == [1, 2]
    assert frame["seconds"].loc["client-10"] == 3.0


def test_selections_table_has_the_state_of_each_selected_client() -> None:
    frame = selections_frame(two_rounds())
    assert frame[["round", "client", "state"]].to_numpy().tolist() == [
        [1, "client-10", "included"],
        [1, "client-9", "late"],
        [2, "client-10", "included"],
    ]


def test_tables_without_rounds_are_empty() -> None:
    assert rounds_frame([]).empty
    assert clients_frame([]).empty
    assert selections_frame([]).empty
    assert runs_frame([]).empty
    assert attendance_frame([]).empty


def test_html_of_a_round_escapes_texts() -> None:
    first, _ = two_rounds()
    html = first._repr_html_()
    assert "<td>&lt;why&gt;</td>" in html
    assert (first.accuracy, first.loss, first.cohort, first.included) == (
        0.5,
        None,
        ("client-10", "client-9"),
        ("client-10",),
    )
    assert first.spreads["accuracy"].quantiles[0.5] == 0.3
