"""Writes a model card as files next to the model."""

from __future__ import annotations

from pathlib import Path

from potluck.common.errors import StorageError
from potluck.deploy.cards.model_card import ModelCard


def write_card(card: ModelCard, model: Path) -> tuple[Path, Path]:
    """Write a card as JSON and Markdown, next to the model's file or into the folder of its shards.

    Returns their paths: `NAME.card.json` and `NAME.card.md`. Raises StorageError.
    """
    stem = model / "model" if model.is_dir() else model.with_suffix("")
    paths = (stem.with_name(f"{stem.name}.card.json"), stem.with_name(f"{stem.name}.card.md"))
    for path, text in zip(paths, (card.json_text(), card.markdown()), strict=True):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"can't write {path}: {error.strerror}", path=path) from error
    return paths
