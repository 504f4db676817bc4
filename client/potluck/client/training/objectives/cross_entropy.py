"""Cross-entropy, the loss of most federated training."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


class CrossEntropy(Objective):
    """Mean cross-entropy: the local loss of FedAvg."""

    per_sample = True

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the interface requires it
        """Return −log softmax(logits)[label], averaged over the batch."""
        return functional.cross_entropy(logits, batch.labels)
