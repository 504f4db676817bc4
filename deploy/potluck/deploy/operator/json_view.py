"""Values that `--json` prints, named like the protocol's fields; null for unknown values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from potluck.common.learning.spread import Spread
from potluck.common.records.round import Round, RoundMember
from potluck.common.records.round_message import OWN_FIELDS, member_of, round_of
from potluck.deploy.operator.run_view import best_coverage, run_state_name
from potluck.rpc.v1 import operator_pb2


def to_line(value: Mapping[str, Any]) -> str:
    """Return one line of JSON in ASCII. NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), allow_nan=False)


def status_values(status: operator_pb2.RunStatus) -> dict[str, Any]:
    """Return the values of a run's status."""
    return {
        "run": status.run_id,
        "name": status.name,
        "state": run_state_name(status.state),
        "reason": status.reason,
        "committed_rounds": status.committed_rounds,
        "rounds": status.rounds,
        "task": status.task,
        "selector": status.selector,
        "strategy": status.strategy,
        "count": status.count,
        "seed": status.seed,
        "created_at": _moment(status, "created_at"),
        "model_blake3": status.model_blake3 or None,
        "waiting": _waiting_values(status.waiting) if status.HasField("waiting") else None,
        "left_out": status.left_out or None,
        "best": best_values(status.best) if status.HasField("best") else None,
        "measures": [
            {
                "name": each.name,
                "label": each.label,
                "unit": each.unit,
                "higher_is_better": each.higher_is_better,
            }
            for each in status.measures
        ],
    }


def best_values(best: operator_pb2.BestModel) -> dict[str, Any]:
    """Return the values of a run's best model."""
    behind = best_coverage(best)
    return {
        "measure": best.measure,
        "round": best.round,
        "value": best.value,
        "model_blake3": best.model_blake3,
        "stalled": best.stalled,
        "coverage": None if behind is None else vars(behind),
    }


def _waiting_values(waiting: operator_pb2.Waiting) -> dict[str, Any]:
    return {
        "what": waiting.what,
        "until": _moment(waiting, "until"),
        "clients": waiting.clients,
        "clients_needed": waiting.clients_needed,
        "hosts": waiting.hosts,
        "hosts_needed": waiting.hosts_needed,
        "away": list(waiting.away),
        "away_count": waiting.away_count,
    }


def client_values(client: operator_pb2.ClientStatus) -> dict[str, Any]:
    """Return the values of a client, as the coordinator knows it."""
    return {
        "client": client.client_id,
        "host": client.host_id,
        "attending": client.attending,
        "last_seen": _moment(client, "last_seen"),
        "device": client.device,
        "selected": client.selected,
        "included": client.included,
        "quarantine": client.quarantine_reason if client.quarantined else None,
        "left_out": dict(client.left_out),
    }


def round_values(record: Round) -> dict[str, Any]:
    """Return the values of a committed round."""
    measures = record.measures
    return {
        "round": record.number,
        "members": [_member_values(member) for member in record.members],
        **{name: measures.get(name) for name in OWN_FIELDS},
        "measures": other_measures(record),
        "spreads": {name: spread_values(each) for name, each in record.spreads.items()},
        "coverage": {name: vars(each) for name, each in record.coverage.items()},
        "late": [vars(each) for each in record.late],
        "seconds": record.seconds,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "model_blake3": record.model,
        **({} if record.privacy is None else {"privacy": vars(record.privacy)}),
    }


def other_measures(record: Round) -> dict[str, float]:
    """Return a round's metrics by name, except those with their own keys in `round_values`."""
    found = record.measures.items()
    return {name: value for name, value in sorted(found) if name not in OWN_FIELDS}


def spread_values(spread: Spread) -> dict[str, Any]:
    """Return a metric's distribution over clients; a quantile's key is the share below it."""
    return {
        **vars(spread.coverage),
        "mean": spread.mean,
        "worst_tenth": spread.worst_tenth,
        "quantiles": {f"{share:g}": value for share, value in spread.quantiles.items()},
    }


def event_values(event: operator_pb2.WatchRunResponse) -> dict[str, Any]:
    """Return the values of a watched run's event; the key `event` names its kind."""
    match event.WhichOneof("event"):
        case "status":
            return {"event": "status", **status_values(event.status)}
        case "committed":
            return {"event": "committed", **round_values(round_of(event.committed))}
        case "progress":
            return {"event": "progress", **_progress_values(event.progress)}
        case "notice":
            return {
                "event": "notice",
                "at": _moment(event.notice, "at"),
                "warning": event.notice.warning,
                "text": event.notice.text,
            }
        case _:
            return {"event": "unknown"}


def _progress_values(progress: operator_pb2.RoundProgress) -> dict[str, Any]:
    return {
        "round": progress.round,
        "attempt": progress.attempt,
        "phase": progress.phase,
        "members": [_member_values(member_of(member)) for member in progress.members],
        "seconds": progress.seconds,
        "trained": progress.trained if progress.HasField("trained") else None,
    }


def _member_values(member: RoundMember) -> dict[str, Any]:
    return {
        "client": member.client,
        "host": member.host,
        "state": member.state,
        "reason": member.reason,
        "trouble": member.trouble,
        "fraction": member.fraction,
        "samples": member.samples,
        "seconds": member.seconds,
    }


def _moment(
    message: operator_pb2.RunStatus
    | operator_pb2.ClientStatus
    | operator_pb2.Notice
    | operator_pb2.Waiting,
    name: str,
) -> str | None:
    if name not in {descriptor.name for descriptor, _ in message.ListFields()}:
        return None
    stamp: Timestamp = getattr(message, name)
    return stamp.ToDatetime(tzinfo=UTC).isoformat()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
