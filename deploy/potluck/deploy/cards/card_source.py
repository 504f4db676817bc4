"""Collects the contents of a model card from the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import UTC
from typing import Any

from potluck.common.errors import NotFoundError, PluginError
from potluck.common.net.build_version import software_version
from potluck.common.records.round import INCLUDED, Round, RoundMember
from potluck.common.run_file.claims import privacy_claim
from potluck.common.run_file.runfile import stored_values
from potluck.common.settings import plugins
from potluck.deploy.cards.card_parts import (
    CardClient,
    CardCoverage,
    CardNoise,
    CardPrivacy,
    CardRound,
    CardSoftware,
)
from potluck.deploy.cards.model_card import ModelCard
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import (
    RunView,
    observe,
    run_state_name,
    shown_measures,
)
from potluck.deploy.view.client_disclosures import (
    client_disclosures,
    holds_against,
    profile_values,
    spent_on_updates,
)
from potluck.deploy.view.readable import natural_order
from potluck.rpc.v1 import operator_pb2
from potluck.server.strategy import Strategy

_TABLES = ("task", "model", "selector", "strategy", "objective", "training")


async def card_of_run(
    client: OperatorClient, run_id: str, *, round_number: int = 0, best_of: str | None = None
) -> ModelCard:
    """Return the card of a run's model after a round; 0 stands for the model before round 1.

    best_of: the metric by which the model is the run's best; None if it is not the best. Raises
    NotFoundError if the round isn't committed, and the errors of `OperatorClient`.
    """
    view = await _so_far(client, run_id)
    status = view.status
    assert status is not None  # noqa: S101  # the view's first event has it
    if round_number and round_number not in view.committed:
        raise NotFoundError(
            f"run {status.run_id} has not committed round {round_number} yet", run=status.run_id
        )
    run_file = await client.fetch_run_file(status.run_id)
    disclosures = await client.audit_disclosures(status.run_id)
    rounds = [view.committed[each] for each in range(1, round_number + 1)]
    return make_card(status, rounds, run_file, disclosures, best_of=best_of)


def make_card(
    status: operator_pb2.RunStatus,
    rounds: Sequence[Round],
    run_file: str,
    disclosures: Sequence[operator_pb2.AuditDisclosuresResponse],
    *,
    best_of: str | None = None,
) -> ModelCard:
    """Return the card of the model after the last of `rounds`.

    rounds: all rounds from round 1 on. If it is empty, the card is of the model before round 1.
    """
    values = stored_values(run_file)
    named = {
        "selector": {"name": status.selector},
        "strategy": {"name": status.strategy},
        **values,
    }
    last = rounds[-1] if rounds else None
    measures = {} if last is None else last.measures
    units = {name: each.unit for name, each in shown_measures(status).items() if each.unit}
    sums = [each for part in disclosures for each in part.sums]
    profiles = [each for part in disclosures for each in part.profiles]
    spent = {each.client: each.epsilon for each in client_disclosures(sums, profiles)}
    reason = f": {status.reason}" if status.reason else ""
    return ModelCard(
        run=status.run_id,
        name=status.name,
        round=0 if last is None else last.number,
        blake3=status.initial_model_blake3 if last is None else last.model,
        best_of=best_of,
        created_at=status.created_at.ToDatetime(tzinfo=UTC).isoformat(),
        state=f"{run_state_name(status.state)}{reason}",
        planned_rounds=status.rounds,
        seed=status.seed,
        tables={name: named[name] for name in _TABLES if name in named},
        measures=dict(sorted(measures.items())),
        coverage={} if last is None else _coverage(last),
        units={name: units[name] for name in sorted(measures) if name in units},
        initial_model_blake3=status.initial_model_blake3,
        coordinator_trains=_coordinator_trains(named["strategy"]),
        kept_by_clients=[str(pattern) for pattern in values.get("model", {}).get("keep", ())],
        rounds=[_round(each) for each in rounds],
        clients=_clients(rounds, spent, spent_on_updates(rounds)),
        privacy=CardPrivacy(
            masked_updates=bool(values.get("secure_aggregation", False)),
            largest_epsilon=max(spent.values(), default=0.0),
            profiles=[profile_values(each) for each in profiles],
            sums=[_sum_values(each) for each in sums],
            sums_hold_against=holds_against(
                independent=any(part.independent_root for part in disclosures)
            ),
            claim=privacy_claim(values).partition(": ")[2],
            noise=None if last is None else _noise(last, values),
        ),
        software=_software(rounds),
        run_file=run_file,
    )


def _coordinator_trains(table: Mapping[str, object]) -> bool | None:
    """Return True if the strategy trains on the coordinator; None if it is not installed here."""
    options = {name: value for name, value in table.items() if name != "name"}
    try:
        return bool(plugins.create(Strategy, str(table["name"]), options).trains)
    except PluginError:
        return None


async def _so_far(client: OperatorClient, run_id: str) -> RunView:
    """Return the view of a run, with the rounds committed so far."""
    view = RunView()
    async with aclosing(client.watch_run(run_id)) as events:
        async for event in events:
            view = observe(view, event)
            if view.status and len(view.committed) >= view.status.committed_rounds:
                break
    return view


def _round(committed: Round) -> CardRound:
    at = committed.committed_at
    return CardRound(
        round=committed.number,
        model_blake3=committed.model,
        committed_at="" if at is None else at.isoformat(),
        selected=list(committed.cohort),
        included=list(committed.included),
        late=[each.client for each in committed.late],
        measures=dict(sorted(committed.measures.items())),
        coverage=_coverage(committed),
    )


def _coverage(committed: Round) -> dict[str, CardCoverage]:
    return {name: CardCoverage(**vars(each)) for name, each in committed.coverage.items()}


def _noise(last: Round, run_file: Mapping[str, Any]) -> CardNoise | None:
    """Return the privacy loss after a round; None if the run has no `[privacy]`."""
    found = last.privacy
    if found is None:
        return None
    values = {name: each for name, each in vars(found).items() if name in CardNoise.model_fields}
    return CardNoise(unit=run_file.get("privacy", {}).get("unit", "record"), **values)


def _clients(
    rounds: Sequence[Round], spent: dict[str, float], on_updates: dict[str, float]
) -> list[CardClient]:
    """Return the clients of these rounds' cohorts, in natural order of their names.

    spent, on_updates: privacy loss ε of each client's disclosures, and of its updates."""
    seen: dict[str, list[tuple[int, RoundMember]]] = {}
    late = Counter(update.client for each in rounds for update in each.late)
    for each in rounds:
        for member in each.members:
            seen.setdefault(member.client, []).append((each.number, member))
    return [
        _client(client, seen[client], late[client], spent.get(client, 0.0)).model_copy(
            update={"update_epsilon": on_updates.get(client)}
        )
        for client in sorted(seen, key=natural_order)
    ]


def _client(
    client: str, parts: Sequence[tuple[int, RoundMember]], late: int, epsilon: float
) -> CardClient:
    """Return the card's record of a client.

    parts: (round, the client's record) of each round that selected the client. late: number of its
    updates that missed their round and are part of a later one.
    """
    members = [member for _, member in parts]
    samples = [member.samples for member in members if member.samples]
    return CardClient(
        client=client,
        hosts=sorted({member.host for member in members}),
        selected=len(parts),
        included=sum(member.state == INCLUDED for member in members) + late,
        first_round=parts[0][0],
        last_round=parts[-1][0],
        samples=samples[-1] if samples else None,
        data_epochs=sorted({m.data_epoch for m in members if m.data_epoch is not None}),
        software=sorted({m.software for m in members if m.software}),
        epsilon=epsilon,
    )


def _sum_values(each: operator_pb2.AuditedSum) -> dict[str, Any]:
    """Return a secure sum's values without its clients' names; `potluck audit` shows the names."""
    return {
        "session": each.session_id,
        "run": each.run_id,
        "round": each.round or None,
        "disclosure": each.disclosure,
        "subject": each.subject,
        "released": each.released,
        "clients": len(each.hosts),
        "hosts": len(set(each.hosts.values())),
        "epsilon": each.epsilon or None,
        "at": each.at,
    }


def _software(rounds: Sequence[Round]) -> CardSoftware:
    coordinator: dict[str, dict[str, None]] = {}
    hosts: dict[str, str] = {}
    for each in rounds:
        for name, version in sorted(each.software.items()):
            coordinator.setdefault(name, {})[version] = None
        hosts |= {m.host: m.software for m in each.members if m.software}
    releases = Counter(hosts[host] for host in sorted(hosts))
    return CardSoftware(
        coordinator={name: list(versions) for name, versions in coordinator.items()},
        hosts=dict(sorted(releases.items())),
        card=software_version(),
    )
