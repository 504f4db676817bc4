"""The card of a model: its run, what it was made from and of whom, what it measures. Pure."""

from __future__ import annotations

from typing import Any

from potluck.deploy.cards.card_markdown import markdown
from potluck.deploy.cards.card_parts import CardFacts


class ModelCard(CardFacts):
    """A model and all that is known of where it comes from."""

    def values(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return self.model_dump(mode="json")

    def json_text(self) -> str:
        """All of it as JSON, indented."""
        return self.model_dump_json(indent=2) + "\n"

    def markdown(self) -> str:
        """The same for people, with long lists summed up."""
        return markdown(self)

    def __str__(self) -> str:
        return self.markdown()

    def __repr__(self) -> str:
        return f"<ModelCard: round {self.round} of run {self.run}; print it, or see .values()>"

    def _repr_markdown_(self) -> str:
        return self.markdown()
