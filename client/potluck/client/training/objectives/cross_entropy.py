"""Cross-entropy, the loss of most federated training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Mean cross-entropy: what FedAvg's clients descend on."""

    @property
    def needs_received(self) -> bool:
        """It does not."""
        return False

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """−log softmax(logits)[label], averaged over the batch."""
        return functional.cross_entropy(logits, batch.labels)
