"""Reads FEMNIST from LEAF's JSON files: one object per file, with samples by user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.search import Found, missing

_SIDE = 28
_CLASSES = 62

Samples = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Images (n × 28 × 28, ink is bright) and labels (n) of a user."""


def femnist(folder: Path) -> Found:
    """Return FEMNIST by writer, in the order of the writers' ids.

    LEAF's images have values from 0 (ink) to 1 (paper). They are inverted, since ink is bright in
    MNIST, and stored as bytes. Raises ConfigurationError if a file is not as LEAF writes it, or a
    user of the test files has no training samples.
    """
    train, test = (_users(folder, split) for split in ("train", "test"))
    strangers = sorted(test.keys() - train.keys())
    if strangers:
        raise ConfigurationError(
            f"user '{strangers[0]}' has test samples but no training samples in {folder}; run "
            "LEAF's preprocess.sh with -t sample, which splits the samples of each user"
        )
    names = sorted(train)
    found: Found = {}
    for split, users in (("train", train), ("test", test)):
        own = [users[name] for name in names if name in users]
        sizes = [len(users[name][1]) if name in users else 0 for name in names]
        found[f"x_{split}"] = np.concatenate([images for images, _ in own])
        found[f"y_{split}"] = np.concatenate([labels for _, labels in own])
        found[f"c_{split}"] = np.repeat(np.arange(len(names), dtype=np.uint16), sizes)
    return {**found, "names": np.array(names)}


def _users(folder: Path, split: str) -> dict[str, Samples]:
    paths = sorted(path for path in folder.rglob("*.json") if path.parent.name == split)
    if not paths:
        raise missing(folder, f"{split}/….json")
    users: dict[str, Samples] = {}
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"can't read {path}: {error}", path=path) from None
        data = content.get("user_data") if isinstance(content, dict) else None
        if not isinstance(data, dict):
            raise ConfigurationError(
                f"{path} has no object 'user_data'; use the files that LEAF's preprocess.sh writes"
            )
        for user, samples in data.items():
            if user in users:
                raise ConfigurationError(
                    f"{path}: user '{user}' is also in another file of {split}; remove one of the "
                    "files"
                )
            users[user] = _samples(samples, f"{path}: user '{user}'")
    return users


def _samples(samples: Any, place: str) -> Samples:
    try:
        images = np.array(samples["x"], dtype=np.float64)
        labels = np.array(samples["y"], dtype=np.int64)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{place} has no lists of numbers 'x' and 'y' ({error}); run preprocess.sh again"
        ) from None
    if images.shape != (len(labels), _SIDE * _SIDE) or labels.ndim != 1 or len(labels) == 0:
        raise ConfigurationError(
            f"{place}: 'x' has shape {images.shape} and 'y' has shape {labels.shape}, but n × 784 "
            "and n are expected; run preprocess.sh again"
        )
    if images.min() < 0 or images.max() > 1:
        raise ConfigurationError(
            f"{place}: pixels are in [{images.min():g}, {images.max():g}], but must be in [0, 1]; "
            "run preprocess.sh again"
        )
    if not 0 <= labels.min() <= labels.max() < _CLASSES:
        raise ConfigurationError(
            f"{place}: labels are in [{labels.min()}, {labels.max()}], but must be in [0, 61]; "
            "use the files of LEAF's femnist"
        )
    pixels = np.rint((1.0 - images) * 255.0).astype(np.uint8)
    return pixels.reshape(-1, _SIDE, _SIDE), labels.astype(np.uint8)
