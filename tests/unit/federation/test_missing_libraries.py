"""The Python API names the extra of a missing library, as commands do."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from potluck.common.settings.extras import MissingLibraryError, not_installed
from potluck.common.settings.plugins import TASKS
from potluck.common.tasks.digits import Digits
from potluck.federation import load_model
from potluck.federation.session_plugins import SessionPlugins


class OwnDigits(Digits):
    pass


def missing(monkeypatch: pytest.MonkeyPatch, library: str, importer: str) -> None:
    """Make a library's import fail in a module that may have imported it before."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, importer, raising=False)


def test_loading_a_model_without_its_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing(monkeypatch, "safetensors", "potluck.federation.trained_model")
    with pytest.raises(MissingLibraryError) as caught:
        load_model("model.safetensors")
    assert caught.value.message == not_installed("safetensors", "potluck[notebook]")
    assert isinstance(caught.value, ImportError)  # so callers may catch ImportError


def test_sending_a_custom_class_without_its_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SessionPlugins()
    session.table(TASKS, OwnDigits)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    message = not_installed("cloudpickle", "potluck[notebook]")
    with pytest.raises(MissingLibraryError, match=re.escape(message)):
        session.write(tmp_path)


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("potluck.federation.frames", "pandas", "potluck[notebook]"),
        ("potluck.federation.model_report", "sklearn.metrics", "potluck[notebook]"),
        ("potluck.integrations.adapters.lightning", "lightning", "potluck[lightning]"),
        ("potluck.integrations.adapters.lora", "peft", "potluck[lora]"),
        ("potluck.integrations.adapters.monai", "ignite.engine", "potluck[monai]"),
        ("potluck.integrations.adapters.transformers", "transformers", "potluck[transformers]"),
    ],
)
def test_importing_a_module_without_its_library_names_the_extra(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(monkeypatch, library, module)
    message = not_installed(library.partition(".")[0], extra)
    with pytest.raises(MissingLibraryError, match=re.escape(message)):
        importlib.import_module(module)
