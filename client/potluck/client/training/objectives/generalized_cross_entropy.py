"""Generalized cross-entropy: a loss that hard, perhaps mislabelled, samples pull less on."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext
from potluck.common.errors import ConfigurationError


class GeneralizedCrossEntropy:
    """(1 − p^q) / q, p the probability of the label: hard samples pull less than easy ones.

    q in (0, 1]: towards 0 it becomes cross-entropy, at 1 the mean absolute error. Zhang and
    Sabuncu, NeurIPS 2018; FedDiverse uses it to learn a bias on purpose. Raises ConfigurationError.
    """

    def __init__(self, *, q: float = 0.3) -> None:
        if isinstance(q, bool) or not isinstance(q, (int, float)) or not 0 < q <= 1:
            raise ConfigurationError(
                f"objective generalized-cross-entropy: q must be in (0, 1], got {q!r}", q=q
            )
        self._q = float(q)

    @property
    def needs_received(self) -> bool:
        """It does not."""
        return False

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """(1 − softmax(logits)[label]^q) / q, averaged over the batch."""
        return generalized_cross_entropy(logits, batch.labels, self._q)


def generalized_cross_entropy(logits: Tensor, labels: Tensor, q: float) -> Tensor:
    """The mean of (1 − p^q) / q over a batch. logits: b × C. labels: b, int64. q in (0, 1]."""
    logarithms = functional.log_softmax(logits, dim=1).gather(1, labels[:, None])
    return -(q * logarithms).expm1().mean() / q
