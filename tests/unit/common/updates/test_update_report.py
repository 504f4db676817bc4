"""A client's training report on the wire and in the database."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import transfer_pb2
from potluck.server.store.sql import schema

REPORT = UpdateReport(
    samples=57, steps=8, seconds=1.25, loss=0.5, normalizer=13.5, reports={"utility": 6.5}
)
NAMES = [field.name for field in fields(UpdateReport)]


def test_message_and_database_table_have_the_fields_of_the_update_report() -> None:
    assert list(transfer_pb2.TrainingReport.DESCRIPTOR.fields_by_name) == NAMES
    assert [name for name in NAMES if name not in schema.members.columns] == []


@pytest.mark.parametrize("report", [REPORT, UpdateReport(samples=1, loss=0.0), UpdateReport()])
def test_update_report_is_unchanged_by_its_message(report: UpdateReport) -> None:
    sent = transfer_pb2.TrainingReport.FromString(report.message().SerializeToString())
    received = UpdateReport.from_message(sent)
    # In the message, a missing loss equals a loss of 0.
    assert received.values() == report.values() | {"loss": report.loss or 0.0}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["seconds", "loss", "normalizer"])
def test_update_report_lists_its_non_finite_numbers(name: str, number: float) -> None:
    changed: dict[str, Any] = REPORT.values() | {name: number}
    assert list(UpdateReport(**changed).not_finite()) == [name]


def test_missing_number_of_an_update_report_is_not_listed_as_non_finite() -> None:
    assert UpdateReport().not_finite() == {}
