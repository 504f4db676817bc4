"""The seam for traces: what makes spans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]


class Span(Protocol):
    """A stretch of time with a name."""

    def end(self) -> None:
        """It is over now."""


class Tracer(ABC):
    """Makes spans. Thread-safe; never blocks and never fails: spans are dropped instead.

    share: of the rounds that are traced.
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
        """A span that begins now. parent: without one it begins a trace. linked: another span that
        it belongs to, of another trace."""

    @abstractmethod
    def written(self, span: Span) -> str:
        """A span as text, in the format of W3C's `traceparent`, for those who go on with it."""

    @abstractmethod
    def read(self, parent: str) -> Span | None:
        """The span of another process; None where the text is none."""

    @abstractmethod
    def fail(self, span: Span, reason: str) -> None:
        """Mark a span as that of something that went wrong."""

    @abstractmethod
    def close(self) -> None:
        """Send what is left, for a moment."""
