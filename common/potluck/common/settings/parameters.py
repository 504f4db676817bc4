"""Parameters of functions and classes, including those from other packages."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from typing_extensions import Format


def signature_of(make: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `make`, even if its annotations name undefined types.

    From Python 3.14 on, annotations are evaluated on access. They may name types that are imported
    only for type checkers.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(make, annotation_format=Format.FORWARDREF)
    return inspect.signature(make)
