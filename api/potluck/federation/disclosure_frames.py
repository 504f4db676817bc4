"""Pandas tables of the data that a run's clients have disclosed."""

from __future__ import annotations

from collections.abc import Iterable

from potluck.common.settings.extras import extra_named
from potluck.deploy.view.readable import natural_order
from potluck.rpc.v1 import operator_pb2

with extra_named():
    import pandas as pd

TRIPLET = ("class_imbalance", "attribute_imbalance", "spurious_correlation")
_DISCLOSED = ("client", "kind", "subject", "clients", "hosts", "epsilon", "round", "at")


def profiles_frame(clients: Iterable[operator_pb2.ClientProfile]) -> pd.DataFrame:
    """Return one row per client, indexed by its id; NaN marks what a client has not disclosed.

    Columns: `samples`: as reported with the client's updates. `label_0`, `label_1` and so on:
    samples of each class; with noise, a count may be negative. `class_imbalance`,
    `attribute_imbalance` and `spurious_correlation`: each in [0, 1]. `matrix_CLASS_ATTRIBUTE`:
    samples of that class and attribute. A column exists only if at least one client has disclosed
    its value.
    """
    rows = [
        {
            "client": each.client_id,
            **({"samples": each.samples} if each.samples else {}),
            **{f"label_{label}": count for label, count in enumerate(each.label_counts)},
            **dict(zip(TRIPLET, each.triplet, strict=False)),
            **{
                f"matrix_{place // 2}_{place % 2}": count
                for place, count in enumerate(each.interaction_matrix)
            },
        }
        for each in sorted(clients, key=lambda client: natural_order(client.client_id))
    ]
    return pd.DataFrame(rows, columns=None if rows else ["client"]).set_index("client")


def disclosures_frame(parts: Iterable[operator_pb2.AuditDisclosuresResponse]) -> pd.DataFrame:
    """Return one row per client and disclosure, oldest first.

    kind: `profile` for a value of this client alone, or `sum` for a sum that hides the client's
    own part. subject: the value that was disclosed or summed. clients, hosts: number of clients and
    hosts in the disclosed value. epsilon: the privacy loss; NaN if no noise was added. round: the
    round of a masked update, else 0. at: ISO 8601. Updates without masks are not listed; each
    client that is included in a round has sent one.
    """
    rows: list[tuple[object, ...]] = []
    for part in parts:
        rows += [
            (each.client_id, "profile", each.signal, 1, 1, each.epsilon or None, 0, each.at)
            for each in part.profiles
        ]
        for total in part.sums:
            hosts = len(set(total.hosts.values()))
            size = (len(total.hosts), hosts, total.epsilon or None, total.round, total.at)
            released = total.hosts if total.released else ()
            rows += [(client, "sum", total.subject, *size) for client in released]
    rows.sort(key=lambda row: (str(row[-1]), natural_order(str(row[0]))))
    return pd.DataFrame(rows, columns=list(_DISCLOSED)).astype({"epsilon": "float64"})
