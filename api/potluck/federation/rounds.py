"""Committed rounds, as notebooks show them."""

from __future__ import annotations

from html import escape

from potluck.common.records.round import Round as RoundRecord
from potluck.deploy.view.readable import readable_coverage


class Round(RoundRecord):
    """A committed round; a notebook shows it as tables."""

    def _over(self, measure: str) -> str:
        """Return the clients and samples behind a metric as text; empty if they are not known."""
        return readable_coverage(self.coverage[measure]) if measure in self.coverage else ""

    def _repr_html_(self) -> str:
        measured = "".join(
            f"<tr><td>{escape(name)}</td><td>{value:.4g}</td><td>{self._over(name)}</td></tr>"
            for name, value in sorted(self.measures.items())
        )
        rows = "".join(
            f"<tr><td>{escape(member.client)}</td><td>{escape(member.state)}</td>"
            f"<td>{escape(member.reason)}</td></tr>"
            for member in self.members
        )
        return (
            f"<p><b>round {self.number}</b>, {self.seconds:.2g} s</p>"
            f"<table>{measured}</table>"
            f"<table><tr><th>client</th><th>state</th><th>why</th></tr>{rows}</table>"
        )


def round_of(record: RoundRecord) -> Round:
    """Return a round as the class that a notebook shows."""
    return Round(**vars(record))
