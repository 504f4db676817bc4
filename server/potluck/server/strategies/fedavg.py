"""FedAvg: the mean of the updates, weighted by their samples (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

from potluck.server.strategies.averaging import Averaging


class FedAvg(Averaging):
    """Averages the updates, weighted by their numbers of samples; has no state.

    w ← Σ p_k w_k with p_k = n_k / Σ n_j over the updates that arrived.

    The paper's Algorithm 1 prints n_k / n with n over all clients, which would shrink the model if
    not all clients are selected. The paper's text defines n over the selected clients.
    """
