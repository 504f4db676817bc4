"""Data sets that come as folders of images: CINIC-10, WaterBirds, Spawrious."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.search import Found, inside, missing, one_of


def cinic10(folder: Path) -> Found:
    """Return CINIC-10 without its validation images. Raises ConfigurationError."""
    names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    found: Found = {}
    for split in ("train", "test"):
        paths = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((folder / split / name).glob("*.png"))
        ]
        if len({label for _, label in paths}) < len(names):
            raise missing(folder, f"{split}/{names[0]}/….png and so on for all ten classes")
        found[f"x_{split}"] = scaled_photographs([path for path, _ in paths], 32)
        found[f"y_{split}"] = np.array([label for _, label in paths], dtype=np.uint8)
    return found


def waterbirds(folder: Path, side: int) -> Found:
    """Return WaterBirds by its metadata.csv: splits 0 and 2, with `y` and `place`.

    Raises ConfigurationError.
    """
    table = one_of(folder, "metadata.csv")
    rows: dict[str, list[tuple[Path, int, int]]] = {"0": [], "2": []}
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        wanted = {"img_filename", "y", "split", "place"}
        if not wanted <= set(reader.fieldnames or ()):
            raise ConfigurationError(
                f"{table} has the columns {reader.fieldnames}, but must have {sorted(wanted)}"
            )
        for row in reader:
            if row["split"] in rows:
                path = inside(table.parent, row["img_filename"])
                rows[row["split"]].append((path, int(row["y"]), int(row["place"])))
    return _with_attributes(rows["0"], rows["2"], side)


_BREEDS: Final = ("labrador", "dachshund", "bulldog", "corgi")
_PLACES: Final = ("beach", "snow")


def spawrious(folder: Path, side: int) -> Found:
    """Return Spawrious. About a tenth, as many of each breed and place, is for the test.

    Raises ConfigurationError.
    """
    train: list[tuple[Path, int, int]] = []
    test: list[tuple[Path, int, int]] = []
    generator = np.random.default_rng(0)
    cells = {
        (label, place): sorted(_cell_paths(folder, breed, where))
        for label, breed in enumerate(_BREEDS)
        for place, where in enumerate(_PLACES)
    }
    kept = min(len(paths) for paths in cells.values()) // 10
    for (label, place), paths in cells.items():
        order = generator.permutation(len(paths)).tolist()
        test += [(paths[row], label, place) for row in sorted(order[:kept])]
        train += [(paths[row], label, place) for row in sorted(order[kept:])]
    return _with_attributes(train, test, side)


def _cell_paths(folder: Path, breed: str, place: str) -> Iterator[Path]:
    found = [path for path in folder.rglob(f"{place}/{breed}/*") if path.suffix in (".png", ".jpg")]
    if len(found) < 10:
        raise missing(folder, f"ten images such as 0/{place}/{breed}/….png")
    yield from found


def _with_attributes(
    train: list[tuple[Path, int, int]], test: list[tuple[Path, int, int]], side: int
) -> Found:
    found: Found = {}
    for split, rows in (("train", train), ("test", test)):
        if not rows:
            raise ConfigurationError(f"no {split} images found")
        found[f"x_{split}"] = scaled_photographs([path for path, _, _ in rows], side)
        found[f"y_{split}"] = np.array([label for _, label, _ in rows], dtype=np.uint8)
        found[f"a_{split}"] = np.array([place for _, _, place in rows], dtype=np.uint8)
    return found


def scaled_photographs(paths: list[Path], side: int) -> NDArray[np.uint8]:
    """Return n × side × side × 3 pixels: each image is scaled, and its longer side cropped."""
    images = np.empty((len(paths), side, side, 3), dtype=np.uint8)
    for row, path in enumerate(paths):
        try:
            with Image.open(path, formats=("JPEG", "PNG")) as image:
                fitted = ImageOps.fit(image.convert("RGB"), (side, side))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ConfigurationError(f"can't read the image {path}: {error}", path=path) from None
        images[row] = np.asarray(fitted)
    return images
