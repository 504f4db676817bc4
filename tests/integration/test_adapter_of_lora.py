"""Adapters of `peft` around a model, of any rank up to the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck.client.private_training import GrantedTraining
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext
from potluck.common.errors import ConfigurationError
from potluck.common.learning.task_loading import model_maker
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.model_table import ModelTable
from potluck.common.task import Examples
from potluck.common.tensors.model_parts import divided
from potluck.integrations.adapters.lora import keep_rank, with_lora
from potluck.privacy.host.record_training import RecordTraining
from potluck.server.strategies.lora_stacking import LoraStacking, adapters

RANK = 4


def network(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("rank", [1, 3, RANK])
def test_training_at_a_lower_rank_leaves_the_other_adapter_rows_zero(rank: int) -> None:
    model = with_lora(network(), rank=RANK, targets=["0", "2"])
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(2))
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == 4
    keep_rank(model, rank)
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()
    state = model.state_dict()
    for each in adapters(list(state)):
        down, up = state[each.down], state[each.up]
        assert down[:rank].any(dim=1).all()
        assert up[:, :rank].any(dim=0).all()
        assert not down[rank:].any()
        assert not up[:, rank:].any()


def test_private_training_changes_only_adapters() -> None:
    model = with_lora(network(), rank=RANK, targets=["0", "2"])
    before = {name: each.clone() for name, each in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    data = Examples(inputs=torch.randn(20, 6, generator=generator), labels=torch.arange(20) % 2)
    context = TrainingContext(classes=2, seed=1, round=1, device=torch.device("cpu"))
    granted = GrantedTraining(
        sampling_rate=0.5, noise_multiplier=1.0, steps=3, clip=1.0, expected_batch=10.0
    )
    loop, settings, loss = RecordTraining(), LocalTraining(batch_size=10), CrossEntropy()
    loop.check(model, loss, settings)
    loop.train(model, data, loss, settings, context, granted)
    moved = {n for n, each in model.named_parameters() if not torch.equal(each, before[n])}
    assert moved == {name for name in before if ".lora_" in name}


def test_lora_adds_the_scaled_product_to_the_weight() -> None:
    plain, model = network(), with_lora(network(), rank=RANK, targets=["0"], scaling=2.5)
    state = model.state_dict()
    [each] = adapters(list(state))
    with torch.no_grad():
        state[each.up].fill_(0.3)
        plain[0].weight += 2.5 * state[each.up] @ state[each.down]  # type: ignore[index]
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
        assert torch.allclose(model(inputs), plain(inputs), atol=1e-6)


def test_rank_of_zero_or_above_the_models_rank_is_refused() -> None:
    model = with_lora(network(), rank=RANK, targets=["0"])
    for rank in (0, RANK + 1):
        with pytest.raises(
            ValueError, match=f"of rank {RANK} can't be trained with the larger rank"
        ):
            keep_rank(model, rank)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_model_loads_its_base_from_a_saved_folder(tmp_path: Path) -> None:
    """The base is in shards, under its own names, with one of two tied tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    configuration = LlamaConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    pretrained = LlamaForCausalLM(configuration)
    pretrained.save_pretrained(tmp_path / "base", max_shard_size="3KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    table = ModelTable(trainable=("*.lora_?.*", "*.base_layer.weight"), base="base")
    made = with_lora(LlamaForCausalLM(configuration), rank=RANK, targets="all-linear")
    parts = divided(made, table, tmp_path)
    tokens = torch.arange(8).reshape(1, -1)
    with torch.no_grad():
        assert torch.allclose(made(tokens).logits, pretrained(tokens).logits, atol=1e-6)
    LoraStacking().check_model(parts.layout)
    assert len(adapters(list(parts.layout.by_name))) == 7


PERCEPTRON = {"name": "perceptron", "inputs": 6, "hidden": [5], "classes": 2, "dropout": 0.0}


def test_low_rank_model_adapts_every_linear_layer() -> None:
    model = model_maker("low-rank", {"of": PERCEPTRON, "rank": RANK, "scaling": 2.0})()
    table = ModelTable(trainable=("*.lora_?.*", "*.base_layer.weight"))
    parts = divided(model, table, None)
    LoraStacking(scaling=2.0).check_model(parts.layout)
    shapes = {each.name: each.shape for each in parts.layout.tensors}
    found = adapters(list(shapes))
    assert [shapes[each.weight] for each in found] == [(5, 6), (2, 5)]
    assert [shapes[each.down] for each in found] == [(RANK, 6), (RANK, 5)]
    state = model.state_dict()
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model(inputs)
        for each in found:
            state[each.up].fill_(0.3)
            state[each.weight] -= 2.0 * state[each.up] @ state[each.down]
        assert torch.allclose(model(inputs), before, atol=1e-6)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ({"name": "low-rank", "of": PERCEPTRON}, "must be a table with the name of another model"),
        ({"name": "unknown"}, "'unknown' is not installed"),
    ],
)
def test_model_without_a_low_rank_form_is_refused(of: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        model_maker("low-rank", {"of": of})()
