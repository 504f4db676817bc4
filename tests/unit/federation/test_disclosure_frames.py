"""Clients' disclosures as tables."""

import math

from potluck.federation.frames import TRIPLET, disclosures_frame, profiles_frame
from potluck.rpc.v1 import operator_pb2 as rpc


def test_profiles_table_has_a_column_for_each_disclosed_value() -> None:
    frame = profiles_frame(
        [
            rpc.ClientProfile(client_id="client-10", samples=7, label_counts=[3.0, -1.0]),
            rpc.ClientProfile(client_id="client-9", triplet=[0.25, 0.5, 0.75]),
        ]
    )
    assert frame.index.tolist() == ["client-9", "client-10"]
    assert set(frame.columns) == {"samples", "label_0", "label_1", *TRIPLET}
    assert frame[["samples", "label_0", "label_1"]].to_numpy().tolist()[1] == [7, 3, -1]
    assert frame[list(TRIPLET)].to_numpy().tolist()[0] == [0.25, 0.5, 0.75]
    assert math.isnan(float(frame["label_0"].loc["client-9"]))
    matrix = profiles_frame([rpc.ClientProfile(client_id="a", interaction_matrix=[1, 2, 3, 4])])
    assert matrix.columns.tolist() == ["matrix_0_0", "matrix_0_1", "matrix_1_0", "matrix_1_1"]
    assert profiles_frame([]).empty


def test_disclosures_table_has_a_row_for_each_client_and_time() -> None:
    told = rpc.AuditedProfile(client_id="b", signal="label_counts", epsilon=0.5, at="2030-01-02")
    hosts = {"a": "host-0", "b": "host-0", "c": "host-1"}
    total = rpc.AuditedSum(
        subject="label counts", released=True, hosts=hosts, round=0, at="2030-01-01"
    )
    aborted = rpc.AuditedSum(subject="label counts", hosts=hosts, at="2030-01-01")
    parts = [
        rpc.AuditDisclosuresResponse(profiles=[told]),
        rpc.AuditDisclosuresResponse(sums=[total, aborted]),
    ]
    frame = disclosures_frame(parts)
    assert frame[["client", "kind", "clients", "hosts"]].to_numpy().tolist() == [
        ["a", "sum", 3, 2],
        ["b", "sum", 3, 2],
        ["c", "sum", 3, 2],
        ["b", "profile", 1, 1],
    ]
    assert frame["epsilon"].sum() == 0.5
    assert frame["epsilon"].isna().tolist() == [True, True, True, False]
    assert disclosures_frame([]).empty
