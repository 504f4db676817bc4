"""Same input, same output, bit for bit, also on a GPU: at the price of some speed."""

from __future__ import annotations

import os

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compute_deterministically() -> None:
    """Have torch use deterministic kernels only, and fail if an operation has none.

    Applies to the whole process. Call it before the first work on a GPU, when cuBLAS reads its
    workspace's size. Without it, sums over many threads of a GPU may differ in their last digits
    each time.
    """
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would choose kernels by their speed just now
