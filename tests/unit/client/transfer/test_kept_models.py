"""A client's whole model consists of the run's model and the tensors the client keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from potluck.client.base.state_directory import KEPT
from potluck.client.transfer.saved_states import KeptStates, chosen_states, described, write_whole
from potluck.common.errors import ConfigurationError, LayoutError
from potluck.common.tensors.tensor_files import open_tensors, write_tensors


@pytest.fixture
def state_directory(tmp_path: Path) -> Path:
    """Return a state directory in which two clients keep a head, and one of them also a
    correction."""
    folder = tmp_path / "state"
    (folder / KEPT).mkdir(parents=True)
    states = KeptStates(folder / KEPT)
    for number in range(2):
        update_id = f"run-1/1.1/client-{number}"
        write_tensors(states.path(update_id, "model"), {"head": np.full(3, number, np.float32)})
        if number:
            write_tensors(states.path(update_id, "correction"), {"c": np.zeros(1, np.float32)})
        states.pend("run-1", f"client-{number}", update_id)
    assert chosen_states(folder) == [], "nothing of it is part of a model yet"
    states.settle("run-1", "client-0", "run-1/1.1/client-0", included=True)
    states.settle("run-1", "client-1", "run-1/1.1/client-1", included=True)
    states.pend("run-1", "client-1", "run-1/2.1/client-1")
    return folder


def test_stored_client_states_are_listed(state_directory: Path) -> None:
    found = chosen_states(state_directory)
    assert [(each.client_id, each.purpose, each.pending) for each in found] == [
        ("client-0", "model", False),
        ("client-1", "correction", True),
        ("client-1", "model", True),
    ]
    lines = [described(each) for each in found]
    assert lines[0].startswith("client-0: model, of update run-1/1.1/client-0, ")
    assert lines[2].endswith("; the state of a later update is pending")
    assert chosen_states(state_directory, run="run-2") == []
    assert len(chosen_states(state_directory, run="run", client="client-1")) == 2
    assert len(chosen_states(state_directory, purpose="model")) == 2


def test_whole_model_is_written_from_the_run_model_and_kept_tensors(
    state_directory: Path, tmp_path: Path
) -> None:
    model, output = tmp_path / "model", tmp_path / "whole"
    write_tensors(model, {"body": np.ones(2, np.float32), "head": np.full(3, 9, np.float32)})
    states = chosen_states(state_directory, client="client-1", purpose="model")
    line = write_whole(states, model, output)
    assert line == f"{output}: 2 tensors, 1 of them client-1's own, of update run-1/1.1/client-1"
    with open_tensors(output) as whole:
        found = {name: array.tolist() for name, array in whole.arrays.items()}
    assert found == {"body": [1, 1], "head": [1, 1, 1]}
    with pytest.raises(ConfigurationError, match="exists already"):
        write_whole(states, None, output)
    write_whole(states, None, tmp_path / "own")
    with open_tensors(tmp_path / "own") as own:
        assert list(own.layout.by_name) == ["head"]


def test_incompatible_model_or_ambiguous_state_is_refused(
    state_directory: Path, tmp_path: Path
) -> None:
    model, output = tmp_path / "model", tmp_path / "whole"
    write_tensors(model, {"head": np.zeros(4, np.float32)})
    states = chosen_states(state_directory, client="client-0")
    with pytest.raises(LayoutError, match=r"is another model: its tensor 'head' has shape \(4,\)"):
        write_whole(states, model, output)
    with pytest.raises(ConfigurationError, match=r"3 states match: client-0 in run-1 \(model\), c"):
        write_whole(chosen_states(state_directory), model, output)
    with pytest.raises(ConfigurationError, match="0 states match; select a single state"):
        write_whole([], model, output)
    assert not output.exists()
