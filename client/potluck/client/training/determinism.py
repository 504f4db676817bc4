"""Makes computations reproducible bit by bit, also on a GPU, at the cost of some speed."""

from __future__ import annotations

import os

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compute_deterministically() -> None:
    """Have torch use deterministic kernels only, and fail if an operation has none.

    Applies to the whole process. Call it before the first work on a GPU, since cuBLAS reads its
    workspace's size then. Otherwise the last digits of sums over many GPU threads may differ from
    run to run.
    """
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would choose kernels by measured speed
