"""The extension point for traces: the class that creates spans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]


class Span(Protocol):
    """A named period of time in a trace."""

    def end(self) -> None:
        """End the span now."""


class Tracer(ABC):
    """Creates spans. Thread-safe; it never blocks and never fails: instead, spans are dropped.

    share: share of the rounds that are traced, in [0, 1].
    """

    share: float

    @abstractmethod
    def begin(
        self,
        name: str,
        attributes: Attributes,
        *,
        parent: Span | None = None,
        linked: Span | None = None,
    ) -> Span:
        """Start a span. parent: the enclosing span; None to start a new trace. linked: a related
        span of another trace."""

    @abstractmethod
    def written(self, span: Span) -> str:
        """Return a span as text for other processes, in the format of W3C's `traceparent`."""

    @abstractmethod
    def read(self, parent: str) -> Span | None:
        """Return another process's span from its text; None if the text is not a valid span."""

    @abstractmethod
    def fail(self, span: Span, reason: str) -> None:
        """Mark a span as failed."""

    @abstractmethod
    def close(self) -> None:
        """Send the remaining spans; take a short time at most."""
