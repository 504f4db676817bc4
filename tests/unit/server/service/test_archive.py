"""Operators' queries about stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.stored import RUN, begun_run, committed

from potluck.common.errors import NotFoundError
from potluck.server.service.archive import Archive
from potluck.server.store import AttemptKey, Store


@pytest.mark.asyncio
async def test_request_for_a_round_that_is_not_committed_names_the_committed_rounds(
    tmp_path: Path,
) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'potluck.db'}") as store:

        async def in_store(work: Any) -> Any:
            return work(store)

        unused: Any = None
        archive = Archive(unused, in_store, unused, unused, unused)
        store.add_run(RUN)
        with pytest.raises(
            NotFoundError, match="no model of any round; wait until a round is comm"
        ):
            await archive.model_of(RUN.run_id, 0)
        begun_run(store, "cd34")
        committed(store, AttemptKey("cd34", 1, 1))
        committed(store, AttemptKey("cd34", 2, 1))
        with pytest.raises(NotFoundError, match="of round 9; request a round from 1 to 2"):
            await archive.model_of("cd34", 9)
