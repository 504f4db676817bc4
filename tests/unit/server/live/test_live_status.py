"""The state of a run that an operator sees."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import pytest
from support.small_runs import small_run

from potluck.server.live.live_status import status
from potluck.server.machine import events as rounds
from potluck.server.store import Store


@pytest.mark.parametrize("until", [math.inf, 1e12])
async def test_wait_without_end_is_shown_with_a_valid_date(tmp_path: Path, until: float) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store)
        small.handle(rounds.Started())
        pool = small.run.machine.pool
        assert pool.waiting is not None
        pool.waiting = replace(pool.waiting, until=until)
        shown = status(small.run).waiting
    assert shown.what == pool.waiting.what
    assert shown.until.ToDatetime(UTC) > small.run.epoch
