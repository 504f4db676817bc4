"""Coordinator noise on low-rank adapters: only the adapters are sent, and only they get noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.federation import set_values
from support.profile_federation import profile_federation

from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.deploy.operator.model_download import download_model

PLUGINS = Path(__file__).parents[1] / "support" / "lora_plugins"
W, A, B = "0.base_layer.weight", "0.lora_A.default.weight", "0.lora_B.default.weight"
CLIENTS, MULTIPLIER, CLIP = 4, 3.0, 0.5


async def test_coordinator_adds_noise_to_the_sum_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    data = tmp_path / "data"
    data.mkdir()
    write_tensors(data / "base.safetensors", {W: np.ones((50, 40), np.float32)})
    async with profile_federation(
        tmp_path / "run",
        task="mixed-ranks",
        selector="uniform",
        clients=6,
        count=CLIENTS,
        rounds=2,
        assignments=[
            "retention.keep_every=1",
            'model.trainable=["*.lora_?.*", "1.*"]',
            'model.base="base.safetensors"',
            "privacy.unit=client",
            "privacy.noise=coordinator",
            f"privacy.noise_multiplier={MULTIPLIER}",
            f"privacy.clip={CLIP}",
        ],
        coordinator={"data_directory": str(data)},
        start_hosts=False,
    ) as federation:
        for path in federation.files.hosts:
            set_values(path, {"data_directory": str(data)})
        await federation.start_hosts()
        await federation.until_attending()
        run_id = await federation.start_run()
        await federation.finished(run_id)
        models = []
        for number in (1, 2):
            path = tmp_path / f"{number}.safetensors"
            await download_model(federation.operator, run_id, path, round_number=number)
            with open_tensors(path) as file:
                assert set(file.layout.by_name) == {A, B, "1.weight", "1.bias"}
                arrays = [np.array(file.arrays[name]).reshape(-1) for name in (A, B)]
                models.append(np.concatenate(arrays))
        history = await federation.history(run_id)
    # The mean of the clipped updates has a norm of at most 0.5; the noise has a norm of about 7.
    deviation = MULTIPLIER * CLIP / CLIENTS
    assert np.std(models[1] - models[0]) == pytest.approx(deviation, rel=0.3)
    assert all(entry.privacy.largest > 0 for entry in history)
