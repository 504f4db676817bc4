"""State kept between rounds does not share memory with other arrays."""

from __future__ import annotations

import numpy as np

from potluck.server.state import State


def test_state_copies_arrays_that_share_memory_with_others() -> None:
    workspace, own = np.ones(6, np.float32), np.ones(2, np.float32)
    state = State(scalars={"t": 1}, arrays={"view": workspace[:3], "own": own}).apart(
        {"w": workspace[3:]}
    )
    workspace.fill(7)
    assert state.arrays["view"].tolist() == [1, 1, 1]
    assert state.arrays["own"] is own
    assert state.scalars == {"t": 1}
