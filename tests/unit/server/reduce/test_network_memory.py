"""Networks whose tensors are stored in files have the same values as those in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from potluck.common.errors import StorageError
from potluck.server.reduce.network_memory import NetworksInFiles


class Network(nn.Module):
    """Network whose tensors are created in the various ways that authors of models use."""

    def __init__(self, width: int = 520) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.embedding = nn.Embedding(width, width, padding_idx=2)
        self.scaled = nn.Parameter(torch.rand(width, width) * 0.1)
        self.tied = self.embedding.weight
        self.halves = nn.ParameterList(torch.randn(2 * width, width).chunk(2))
        self.transposed = nn.Parameter(torch.ones(width, width).mul_(3).t())
        orthogonal = nn.init.orthogonal_(torch.empty(width, width))
        self.register_buffer("mask", torch.zeros(width, width).fill_diagonal_(1))
        self.register_buffer("wide", torch.full((width, width), 2.0).double() + orthogonal)
        self.small = nn.Linear(3, 3)
        self.small_embedding = nn.Embedding(3, 3, padding_idx=0)


def made() -> Network:
    torch.manual_seed(3)
    return Network()


def in_file(tensor: Tensor) -> bool:
    return tensor.untyped_storage().filename is not None


def test_large_tensors_stored_in_files_have_the_same_values(tmp_path: Path) -> None:
    usual = made()
    with NetworksInFiles(tmp_path):
        network = made()
    assert list(tmp_path.iterdir()) == []
    state = network.state_dict()
    for name, tensor in usual.state_dict().items():
        assert torch.equal(state[name], tensor)
        assert state[name].stride() == tensor.stride()
        assert in_file(state[name]) == (not name.startswith("small") and tensor.ndim > 1), name
    assert network.tied is network.embedding.weight
    network.dense(torch.ones(1, 520)).sum().backward()
    assert network.dense.weight.grad is not None


def test_folder_that_can_not_hold_tensors_is_named_in_the_error(tmp_path: Path) -> None:
    with NetworksInFiles(tmp_path / "gone"), pytest.raises(StorageError, match="can't allocate"):
        made()
