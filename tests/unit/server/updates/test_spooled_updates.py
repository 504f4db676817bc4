"""After a restart, a sum counts only if its file is unchanged and all its members are there."""

from pathlib import Path

import numpy as np
import pytest

from potluck.common.errors import RunError
from potluck.common.monitoring.metric_labels import SUM
from potluck.common.updates.fixed_point import FixedPointTerms, members_digest
from potluck.common.updates.sum_files import BODY, write_sum_file
from potluck.server.live.spool import Spool, still_spooled
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store.records import AttemptKey, MemberRow, MemberState, UpdateRow
from potluck.server.updates.summed_rounds import opened_total

KEY = AttemptKey("run", 1, 1)
TERMS = FixedPointTerms(quantum_bits=10, weight_unit=1, weight_cap=100)


def row(blake3: str, samples: int = 1, **values: float) -> UpdateRow:
    return UpdateRow(
        blake3=blake3,
        size=1,
        encoding=SUM,
        delta=True,
        compressed=False,
        samples=samples,
        **values,  # type: ignore[arg-type]  # values by name
    )


def member(client: str, blake3: str, state: MemberState = MemberState.RECEIVED) -> MemberRow:
    return MemberRow(
        client_id=client, host_id="host", state=state, reason="", trouble=None, update=row(blake3)
    )


def update_id(client: str) -> str:
    return f"run/1.1/{client}"


def spooled_sum(spool: Spool, clients: str, value: int = 0) -> str:
    """Write the clients' sum into the spool as the update of the first; return its digest."""
    words = np.full(5, value, np.int64)
    ids = map(update_id, clients)
    path = spool.path(1, 1, clients[0], "new")
    written = write_sum_file(path, {BODY: lambda a, b: words[a:b]}, {BODY: 5}, members_digest(ids))
    path.replace(spool.path(1, 1, clients[0], written.blake3))
    return written.blake3


def test_host_sums_are_restored_with_all_their_members(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    both, alone = spooled_sum(spool, "ba"), spooled_sum(spool, "c")
    assert both != alone  # digests cover the members, not only the equal words
    members = [member("a", both), member("b", both), member("c", alone)]
    found = still_spooled(spool, KEY, members, update_id)
    assert found.keys() == {"a", "b", "c"}
    assert found["a"].path == found["b"].path != found["c"].path


def test_host_sum_is_discarded_if_one_of_its_members_left(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    both = spooled_sum(spool, "ab")
    members = [member("a", both), member("b", both, MemberState.LATE)]
    assert still_spooled(spool, KEY, members, update_id) == {}


@pytest.mark.parametrize("damage", [b"", b"no tensor file"])
def test_host_sum_with_a_damaged_file_is_discarded(tmp_path: Path, damage: bytes) -> None:
    spool = Spool(tmp_path / "spool")
    alone = spooled_sum(spool, "a")
    spool.path(1, 1, "a", alone).write_bytes(damage)
    assert still_spooled(spool, KEY, [member("a", alone)], update_id) == {}


def test_host_sums_are_added_and_divided_by_the_total_weight(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    paths = {"ab": spooled_sum(spool, "ab", 3 << 10), "c": spooled_sum(spool, "c", 5 << 10)}
    samples = {"a": 2, "b": 1, "c": 200}  # c's 200 samples count as 100
    updates = [
        SpooledUpdate(
            client=client,
            path=spool.path(1, 1, clients[0], paths[clients]),
            row=row(paths[clients], samples[client], loss=float(samples[client]), normalizer=2.0),
        )
        for clients in paths
        for client in clients
    ]
    ids = [update_id(update.client) for update in updates]
    with opened_total(updates, ids, {BODY: 5}, TERMS, normalized=True) as total:
        assert total.weight == 103
        assert total.normalizer == 2
        assert total.loss == pytest.approx((2 * 2 + 1 + 100 * 200) / 103)
        assert total.mean()(0, 5) == pytest.approx(np.full(5, 8 / 103))
    with (
        pytest.raises(RunError, match="other updates"),
        opened_total(updates[1:], ids[1:], {BODY: 5}, TERMS, normalized=False),
    ):
        pass
