"""A host's description of its devices."""

import pytest
import torch

from potluck.client.training.device import described_devices


def test_device_description_names_each_gpu_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H100", "NVIDIA H100", "NVIDIA A10"]
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert described_devices("cpu") == "cpu"
    assert described_devices("cuda:1") == "cuda:1 (NVIDIA H100)"
    assert described_devices("cuda:0,cuda:2") == "cuda:0,cuda:2 (NVIDIA H100, NVIDIA A10)"
