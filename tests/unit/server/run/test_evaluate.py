"""The evaluation of a round's model on the coordinator's data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from support.small_runs import small_run

from potluck.common.learning.spread import Coverage
from potluck.server.run.commit import evaluate
from potluck.server.store import Store


async def test_infinite_loss_is_reported_beside_the_other_metrics(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        run = (await small_run(tmp_path, store)).run
        with run.services.files.opened(run.models.current.blake3) as file:
            huge = {n: np.full_like(each, 3e38) for n, each in file.arrays.items()}
        written = run.services.files.write(huge)
        model = run.models.whole(written.blake3)
        run.models.result = replace(run.models.result, model=model)
        await evaluate(run)
    found = run.models.result
    assert set(found.metrics) == {"accuracy", "weighted_f1"}
    assert found.coverage["loss"] == Coverage(samples=found.coverage["accuracy"].samples)
    notice = run.record.feed.watch().get_nowait()
    assert notice is not None
    assert "infinite, so not shown: loss; the model may have" in notice.notice.text
