"""Reads Fed-TCGA-BRCA and Fed-ISIC2019 in the form of FLamby's repository."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.photographs import scaled_photographs
from potluck.experiments.data_sets.search import Found, one_of
from potluck.experiments.tasks.flamby import PATIENT_COLUMNS, REGIONS

_LESIONS = 8
_SPLITS = ("train", "test")


def tcga_brca(folder: Path) -> Found:
    """Return each patient's 39 features and recorded event (0 or 1), by region and split.

    Patients are in the order of brca.csv; those without a split are dropped, as in FLamby. Raises
    ConfigurationError.
    """
    table, split_table = one_of(folder, "brca.csv"), one_of(folder, "train_test_split.csv")
    fold_of = {row["pid"]: row["fold2"] for row in _rows(split_table, ("pid", "fold2"))}
    patients: dict[str, list[tuple[list[float], int]]] = {}
    for row in _rows(table, ("pid", "E", "T")):
        if row["pid"] not in fold_of:
            continue
        values = [value for name, value in row.items() if name not in ("pid", "E", "T")]
        try:
            numbers, event = [float(value) for value in values], float(row["E"])
        except (TypeError, ValueError):
            raise _wrong(table, row, "numbers in all columns but pid") from None
        if len(numbers) != PATIENT_COLUMNS or event not in (0.0, 1.0):
            raise _wrong(table, row, f"{PATIENT_COLUMNS} features, and 0 or 1 as E")
        patients.setdefault(fold_of[row["pid"]], []).append((numbers, int(event)))
    return _by_fold(
        {
            fold: (
                np.array([numbers for numbers, _ in own], dtype=np.float32),
                np.array([event for _, event in own], dtype=np.uint8),
            )
            for fold, own in patients.items()
        },
        split_table,
    )


def isic2019(folder: Path, side: int) -> Found:
    """Return Fed-ISIC2019's images, scaled and cropped to squares, by centre and split.

    side: side of the images, in pixels. Raises ConfigurationError.
    """
    table = one_of(folder, "train_test_split", "train_test_split.csv")
    places = {path.stem: path for path in sorted(folder.rglob("*.jpg"))}
    chosen: dict[str, list[tuple[Path, int]]] = {}
    for row in _rows(table, ("image", "target", "fold2")):
        if row["image"] not in places:
            raise ConfigurationError(
                f"{table} names {row['image']}.jpg, which is missing in {folder}; download the "
                "images again"
            )
        if row["target"] not in map(str, range(_LESIONS)):
            raise _wrong(table, row, f"a target from 0 to {_LESIONS - 1}")
        chosen.setdefault(row["fold2"], []).append((places[row["image"]], int(row["target"])))
    return _by_fold(
        {
            fold: (
                scaled_photographs([path for path, _ in own], side),
                np.array([target for _, target in own], dtype=np.uint8),
            )
            for fold, own in chosen.items()
        },
        table,
    )


def _rows(path: Path, wanted: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file with the wanted columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if not set(wanted) <= set(reader.fieldnames or ()):
                raise ConfigurationError(
                    f"{path} lacks one of the columns {', '.join(wanted)}; download FLamby's file "
                    "again"
                )
            yield from reader
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"can't read {path}: {error}", path=path) from None


def _wrong(path: Path, row: Mapping[str, str], expected: str) -> ConfigurationError:
    first = next(iter(row.values()))
    return ConfigurationError(
        f"{path}: the row of {first} must have {expected}; download FLamby's file again"
    )


def _by_fold(
    samples: Mapping[str, tuple[NDArray[np.generic], NDArray[np.uint8]]], source: Path
) -> Found:
    """Return the samples of the folds train_0 … test_5, by client."""
    names = [f"{split}_{region}" for split in _SPLITS for region in REGIONS]
    if set(samples) != set(names):
        odd = sorted(set(samples) ^ set(names))[0]
        raise ConfigurationError(
            f"{source}: fold2 must have the values {names[0]} … {names[-1]}, but also has '{odd}' "
            "or lacks it; download FLamby's file again"
        )
    found: Found = {"names": np.array(REGIONS)}
    for split in _SPLITS:
        own = [samples[f"{split}_{region}"] for region in REGIONS]
        found[f"x_{split}"] = np.concatenate([x for x, _ in own])
        found[f"y_{split}"] = np.concatenate([y for _, y in own])
        sizes = [len(y) for _, y in own]
        found[f"c_{split}"] = np.repeat(np.arange(len(REGIONS), dtype=np.uint8), sizes)
    return found
