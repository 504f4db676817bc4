"""Updates that missed their round: those that are awaited, come, and join a later one."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.common.interruptible import in_thread
from potluck.common.tensors.encoding import Encoding
from potluck.server.aggregation.late_updates import LateUpdate
from potluck.server.aggregation.spooled_updates import intact
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.hosts.announce import announce_dropped
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.rounds import events as rounds
from potluck.server.rounds.lateness import SELECTED_ANEW, LateRegister
from potluck.server.rounds.plan import RunPlan
from potluck.server.runs.run import Run
from potluck.server.store.model_files import ModelVersion, Rendition
from potluck.server.store.records import LateRow, UpdateRow


def empty_register(plan: RunPlan) -> LateRegister:
    """The register of a run that awaits nobody."""
    most = plan.run_file.round.late_updates.rounds
    return LateRegister.of([], simulated=plan.run_file.virtual_clock.enabled, most_rounds=most)


async def restore(run: Run, cohort: Sequence[str]) -> None:
    """Await those again that were before a restart, but for those in the cohort under way."""
    run_id, late = run.id, run.late
    rows: list[LateRow] = await run.services.in_store(lambda store: store.awaited(run_id))
    run.late = LateRegister.of(rows, simulated=late.simulated, most_rounds=late.most_rounds)
    for row in rows:
        if row.update is None:
            continue
        if not await in_thread(intact, spooled(run, row, row.update).path, row.update.blake3):
            run.late.lose(row.client_id)  # torn by the crash; have it sent again
    for client in cohort:
        await give_up(run, client)


def spooled(run: Run, row: LateRow, update: UpdateRow) -> SpooledUpdate:
    """A late update that is here."""
    path = run.spool.path(row.round, row.attempt, row.client_id, update.blake3)
    return SpooledUpdate(client=row.client_id, path=path, row=update)


def joining(run: Run, round_seconds: float) -> Sequence[LateRow]:
    """The late trainings whose updates go into the round's model, in client order."""
    found = run.late.joining(round_seconds)
    allowed = set(run.machine.gathering.selectable(row.client_id for row in found))
    return [row for row in found if row.client_id in allowed]


def late_updates(run: Run) -> list[LateUpdate]:
    """The updates of those, as they are reduced."""
    return [
        LateUpdate(
            update=spooled(run, row, row.update),
            age=run.machine.round - row.round,
            model_blake3=row.model_blake3,
        )
        for row in run.intake.joining
        if row.update is not None
    ]


def missed(run: Run) -> dict[str, UpdateRow | None]:
    """The clients of the attempt under way whose updates may still join a later round, and those
    of them that are here."""
    updates = {client: each.row for client, each in run.intake.updates.items()}
    return {
        client: updates.get(client)
        for client in run.machine.cohort.missed
        if client in updates or not run.late.simulated
    }


def kept_clients(run: Run) -> dict[tuple[int, int], set[str]]:
    """Of which clients' updates in the spool stay, by round and attempt."""
    found: dict[tuple[int, int], set[str]] = {}
    for row in run.late.awaited:
        found.setdefault((row.round, row.attempt), set()).add(row.client_id)
    return found


async def give_up(run: Run, client: str) -> None:
    """A client is selected anew: its late update is not awaited any more."""
    row = run.late.drop(client, SELECTED_ANEW)
    if row is not None:
        await run.services.in_store(lambda store: store.set_late([row]))
        let_go(run, [row])


def let_go(run: Run, rows: Sequence[LateRow]) -> None:
    """Tell hosts to stop what nobody waits for any more."""
    ids = [train_instruction_id(*row.key, row.client_id) for row in rows]
    run.services.attendance.retire(ids, abandon=True)
    announce_dropped(run.services.attendance, rows)


def tell_machine(run: Run) -> None:
    """Say who is at work for a round that is closed."""
    run.post(rounds.StillTraining(tuple(row.client_id for row in run.late.awaited)))


def began_with(run: Run, row: LateRow) -> ModelVersion:
    """The model that a late training begins with, as its whole file. Raises NotFoundError."""
    size = run.services.files.existing(row.model_blake3).stat().st_size
    whole = Rendition(blake3=row.model_blake3, size=size, encoding=Encoding.FLOAT32)
    return ModelVersion(blake3=row.model_blake3, size=size, renditions=(whole,))
