"""The card of a model: its run, its settings and clients, its metrics. Pure."""

from __future__ import annotations

from typing import Any

from potluck.deploy.cards.card_markdown import markdown
from potluck.deploy.cards.card_parts import CardFacts


class ModelCard(CardFacts):
    """A model and all known facts about its origin."""

    def values(self) -> dict[str, Any]:
        """Return the whole card as plain values, for JSON."""
        return self.model_dump(mode="json")

    def json_text(self) -> str:
        """Return the whole card as indented JSON."""
        return self.model_dump_json(indent=2) + "\n"

    def markdown(self) -> str:
        """Return the card as Markdown, with long lists cut."""
        return markdown(self)

    def __str__(self) -> str:
        return self.markdown()

    def __repr__(self) -> str:
        return f"<ModelCard: round {self.round} of run {self.run}; print it, or see .values()>"

    def _repr_markdown_(self) -> str:
        return self.markdown()
