"""Report for a data owner on the messages that clients sent, except profiles and sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from potluck.client.disclosure.outgoing_log import Outgoing

Entry = Mapping[str, Any]

_NUMBERS = ("samples", "steps", "seconds", "loss", "normalizer")
"""Names of a training report's numbers, in the order shown."""


def summary(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield a line for each run and kind of message, in the order of their first entries."""
    groups: dict[tuple[str, ...], _Group] = {}
    for entry in entries:
        key = tuple(
            str(entry.get(name, ""))
            for name in (
                *("federation", "coordinator", "run", "kind"),
                *("question", "reason", "subject"),
            )
        )
        groups.setdefault(key, _Group(entry)).add(entry)
    for group in groups.values():
        yield group.line()


def line(entry: Entry) -> str:
    """Return one entry as a sentence."""
    told = "; ".join(f"{name} {_text(value)}" for name, value in _numbers(entry).items())
    return (
        f"{_moment(entry)} {_what(entry)}, {_details(entry)}round {entry.get('round')} of run "
        f"{entry.get('run')} of federation {entry.get('federation')}" + (f": {told}" * bool(told))
    )


class _Group:
    """Entries of one run and one kind."""

    def __init__(self, first: Entry) -> None:
        self._first = self._last = first
        self._count = self._bytes = 0
        self._ranges: dict[str, tuple[float, float]] = {}
        self._models: set[str] = set()

    def add(self, entry: Entry) -> None:
        """Count an entry."""
        self._last = entry
        self._count += 1
        self._bytes += int(entry.get("bytes", 0))
        self._models.add(str(entry.get("model", "")))
        for name, value in _numbers(entry).items():
            if isinstance(value, int | float):
                low, high = self._ranges.get(name, (value, value))
                self._ranges[name] = (min(low, value), max(high, value))

    def line(self) -> str:
        """Return a sentence that describes the group."""
        first, last = self._first, self._last
        rounds = sorted({int(first.get("round", 0)), int(last.get("round", 0))})
        which = f"round{'s' * (len(rounds) > 1)} {' to '.join(map(str, rounds))}"
        size = f", {self._bytes} bytes in all" * bool(self._bytes)
        models = self._models - {""}
        on = f", with {len(models)} model{'s' * (len(models) > 1)}" * bool(models)
        told = "; ".join(
            f"{name} {_text(low)}" + (f" to {_text(high)}" * (high != low))
            for name, (low, high) in self._ranges.items()
        )
        return (
            f"{_moment(last)} {self._count} times {_what(first)}{on}{size}, for {which} of run "
            f"{first.get('run')} of federation {first.get('federation')}"
            + (f": {told}" * bool(told))
        )


def _what(entry: Entry) -> str:
    kind = entry.get("kind")
    if kind == Outgoing.ANSWER:
        return f"the answer to '{entry.get('question')}'"
    if kind == Outgoing.HELD_OUT:
        subject = entry.get("subject")
        return f"counts on held-out samples{f' with {subject}' * bool(subject)}"
    if kind == Outgoing.UPDATE:
        return f"an update without masks (number of samples: {entry.get('weighting')})"
    if kind == Outgoing.FAILURE:
        return f"a failure ({entry.get('reason')})"
    return str(kind)


def _details(entry: Entry) -> str:
    kind = entry.get("kind")
    if kind == Outgoing.UPDATE:
        size, digest, model = (entry.get(name) for name in ("bytes", "blake3", "model"))
        return f"{size} bytes, BLAKE3 {digest}, of model {model}, for "
    if kind == Outgoing.FAILURE:
        return f"“{entry.get('message')}”, for "
    model = entry.get("model")
    return f"with model {model}, for " if model else "for "


def _numbers(entry: Entry) -> dict[str, Any]:
    """Return the numbers that were disclosed, by name."""
    kind = entry.get("kind")
    if kind == Outgoing.ANSWER:
        return dict(entry.get("numbers", {}))
    if kind == Outgoing.HELD_OUT:
        names = ("samples", "correct", "loss_sum", "by_class")
        return {name: entry[name] for name in names if name in entry}
    if kind == Outgoing.UPDATE:
        report = entry.get("report", {})
        told = {name: report[name] for name in _NUMBERS if report.get(name) is not None}
        return told | dict(report.get("reports", {}))
    return {}


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _moment(entry: Entry) -> str:
    return str(entry.get("at", ""))[:19].replace("T", " ") + " UTC"
