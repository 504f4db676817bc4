"""Deletes runs from the store."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete, select

from potluck.server.store.part import Part
from potluck.server.store.sql import schema

OF_RUNS = (
    schema.late_updates,
    schema.exchanges,
    schema.members,
    schema.rounds,
    schema.attempts,
    schema.participation,
    schema.left_out,
    schema.roster,
    schema.runs,
)
"""The tables whose rows belong to one run. A table comes before the tables that it references."""


class Deletions(Part):
    """The deletion of runs from the store."""

    def delete_runs(self, run_ids: Collection[str]) -> set[str]:
        """Delete all rows of these runs; ignore unknown ids.

        Profiles and secure sums are kept as records of disclosures. Returns the digests of the
        files that the runs referenced; other runs may reference them too.
        """
        runs, rounds = schema.runs, schema.rounds
        named = [
            select(rounds.c.model_blake3).where(rounds.c.run_id.in_(run_ids)),
            select(rounds.c.state_blake3).where(rounds.c.run_id.in_(run_ids)),
            select(runs.c.initial_model_blake3).where(runs.c.run_id.in_(run_ids)),
        ]
        with self._database.transaction() as connection:
            found = {digest for query in named for digest in connection.execute(query).scalars()}
            for table in OF_RUNS:
                connection.execute(delete(table).where(table.c.run_id.in_(run_ids)))
        return {str(digest) for digest in found if digest is not None}
