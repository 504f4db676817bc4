"""A causal language model that clients adapt to their texts with low-rank adapters."""

# pyright: reportUnknownMemberType=false
# torch and transformers are typed in part.

import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Task
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)
from potluck.integrations.adapters.lora import keep_rank, with_lora

LENGTH = 64
"""Context length of the model in bytes of text; each byte is a token."""
CLIENTS = 6
RANKS = (2, 4, 8)
"""Adapter ranks of clients 0, 1 and 2; the ranks repeat from client 3 on."""


def texts() -> list[torch.Tensor]:
    """Return the base model's text, then one per client: rows × LENGTH, int64, a token per byte.

    The texts are parts of scikit-learn's descriptions of its data sets.
    """
    folder = files("sklearn") / "datasets" / "descr"
    pages = sorted(page.name for page in folder.iterdir() if page.name.endswith(".rst"))
    text = b"\n".join((folder / page).read_bytes() for page in pages)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    half = len(rows) // 2
    return [rows[:half], *rows[half:].chunk(CLIENTS)]


def network() -> LlamaForCausalLM:
    """Return a tiny, randomly initialised transformer."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def write_base() -> None:
    """Train the base model on the text that no client has, and save it with `save_pretrained`."""
    torch.manual_seed(1)
    model, [rows, *_] = network(), texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(150):
        batch = rows[torch.randint(len(rows), (16,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: {loss.item():.2f} nats a byte")
    model.save_pretrained(Path(sys.argv[1]))


class Adapting(Trainer):
    """Trains only the adapters; their rank depends on the client."""

    measures = {"loss": Measure(label="loss", unit="nats/byte", lowest=0)}

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        number = int(settings.client.rpartition("-")[2])
        keep_rank(model, RANKS[number % len(RANKS)])
        adapters = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=settings.learning_rate, weight_decay=0.0)
        epochs, size = settings.training.epochs, settings.training.batch_size
        total, count, steps = 0.0, 0, 0
        model.train()
        for epoch in range(epochs):
            for batch in data[torch.randperm(len(data))].split(size):
                batch = batch.to(settings.device)
                loss = model(input_ids=batch, labels=batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total, count, steps = (
                    total + loss.item() * len(batch),
                    count + len(batch),
                    steps + 1,
                )
                report(epoch / epochs)
        return Contribution(
            samples=len(data), steps=steps, measures={"loss": Measured(total, count)}
        )

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> dict[str, Measured]:
        total = 0.0
        model.eval()
        with torch.no_grad():
            for batch in data.split(64):
                batch = batch.to(settings.device)
                total += model(input_ids=batch, labels=batch).loss.item() * len(batch)
        return {"loss": Measured(total, len(data))}


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Task):
    """Task with six clients, each with a part of the text. One row in eight is held out."""

    clients = CLIENTS
    training = {"learning_rate": 0.01, "epochs": 3, "batch_size": 8}

    def model(self) -> Any:
        return with_lora(network(), rank=max(RANKS), targets="all-linear")

    def trainer(self) -> Trainer:
        return Adapting()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[torch.Tensor]:
        rows = texts()[1 + int(client.rpartition("-")[2])]
        held_out = torch.arange(len(rows)) % 8 == 7
        return ClientData(train=rows[~held_out], held_out=rows[held_out])

    def evaluation_data(self, data: Path | None) -> None:
        return None  # the clients measure on what they hold out
