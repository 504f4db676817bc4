"""A run's rounds, clients and disclosed data as pandas tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC

from potluck.common.records.round import INCLUDED
from potluck.common.settings.extras import extra_named
from potluck.common.tables.round_columns import ROUND, round_row
from potluck.deploy.operator.run_view import run_state_name
from potluck.deploy.view.readable import natural_order
from potluck.federation.rounds import Round
from potluck.rpc.v1 import operator_pb2

with extra_named():
    import pandas as pd

# Rounds and clients -------------------------------------------------------------------------------


def rounds_frame(rounds: Iterable[Round]) -> pd.DataFrame:
    """Return one row per round, indexed by its number.

    Columns: one for each metric of the model; `NAME_worst_tenth` for each spread over clients;
    numbers of clients `selected` and `included`; `seconds`, `bytes_down`, `bytes_up`; the `model`'s
    digest. The last columns are each metric's coverage: `NAME_clients`, `NAME_asked`,
    `NAME_partial` and `NAME_samples`.
    """
    rows = [round_row(each) for each in rounds]
    return _indexed(rows, ROUND, ("selected", "included", "seconds", "model"))


def selections_frame(rounds: Iterable[Round]) -> pd.DataFrame:
    """Return one row per client of each cohort, in selection order, with the reason for it."""
    columns = ("round", "client", "host", "state", "reason", "trouble", "samples", "seconds")
    rows = [
        {"round": each.number, **{name: getattr(member, name) for name in columns[1:]}}
        for each in rounds
        for member in each.members
    ]
    return pd.DataFrame(rows, columns=list(columns))


def clients_frame(rounds: Iterable[Round]) -> pd.DataFrame:
    """Return one row per client that a run ever selected, indexed by its id.

    Columns: how often it was `selected` and `included`, its `last_round`, its last known `host` and
    `samples`, and its mean `seconds` in rounds that included it.
    """
    seen: dict[str, dict[str, object]] = {}
    durations: dict[str, list[float]] = {}
    for each in rounds:
        for member in each.members:
            row = seen.setdefault(member.client, {"client": member.client})
            included = member.state == INCLUDED
            row["selected"] = _count(row, "selected") + 1
            row["included"] = _count(row, "included") + included
            row |= {"last_round": each.number, "host": member.host}
            if included:
                row["samples"] = member.samples
                durations.setdefault(member.client, []).append(member.seconds)
    for client, of_client in durations.items():
        seen[client]["seconds"] = sum(of_client) / len(of_client)
    rows = sorted(seen.values(), key=lambda row: natural_order(str(row["client"])))
    names = ("selected", "included", "last_round", "host", "samples", "seconds")
    return _indexed(rows, "client", names)


def runs_frame(runs: Iterable[operator_pb2.RunStatus]) -> pd.DataFrame:
    """Return one row per run, newest first, indexed by its id."""
    rows = [
        {
            "run": each.run_id,
            "name": each.name,
            "state": run_state_name(each.state),
            "rounds": each.committed_rounds,
            "of_rounds": each.rounds,
            "task": each.task,
            "selector": each.selector,
            "strategy": each.strategy,
            "seed": each.seed,
            "created_at": each.created_at.ToDatetime(tzinfo=UTC),
        }
        for each in runs
    ]
    return _indexed(rows, "run", ("name", "state", "rounds", "task", "selector", "strategy"))


def attendance_frame(clients: Iterable[operator_pb2.ClientStatus]) -> pd.DataFrame:
    """Return one row per client that has ever connected, indexed by its id."""
    rows = [
        {
            "client": each.client_id,
            "host": each.host_id,
            "attending": each.attending,
            "device": each.device,
            "selected": each.selected,
            "included": each.included,
            "quarantined": each.quarantined,
        }
        for each in sorted(clients, key=lambda client: natural_order(client.client_id))
    ]
    return _indexed(rows, "client", ("host", "attending", "device", "selected", "included"))


def _indexed(
    rows: Sequence[Mapping[str, object]], index: str, columns: Sequence[str]
) -> pd.DataFrame:
    """Return a frame of these rows; if there are none, an empty frame with these columns."""
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[index, *columns])
    return frame.set_index(index)


def _count(row: Mapping[str, object], name: str) -> int:
    found = row.get(name, 0)
    return found if isinstance(found, int) else 0


# Disclosures --------------------------------------------------------------------------------------

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

    kind: `profile` for a value of this client alone, or `sum` for a sum that hides the client's own
    part. subject: the value that was disclosed or summed. clients, hosts: number of clients and
    hosts whose data are in the disclosed value. epsilon: the privacy loss; NaN if no noise was
    added. round: the round of a masked update, else 0. at: ISO 8601. Updates without masks are not
    listed; each client that is included in a round has sent one.
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
