"""Parameters of functions and classes that anybody wrote."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from typing_extensions import Format


def signature_of(make: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `make`, though its annotations may name what is not there.

    From Python 3.14 on annotations are evaluated when they are asked for, and may name what is
    imported for type checkers alone.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(make, annotation_format=Format.FORWARDREF)
    return inspect.signature(make)
