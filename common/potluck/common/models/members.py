"""Creates the members of a model that is composed of other models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from torch import nn

from potluck.common.errors import ConfigurationError
from potluck.common.settings import plugins
from potluck.common.settings.option_checks import checked

_OF_OTHERS: Final = ("concatenation", "ensemble", "low-rank")


def member_maker(of: Mapping[str, Any], *, whole: str) -> Callable[[], nn.Module]:
    """Return a function that creates models from a table like [model]. whole: name of the composed
    model, for errors.

    Raises ConfigurationError if the table does not name a model, or names a composed one;
    PluginError if the model is not installed.
    """
    options = {key: value for key, value in of.items() if key != "name"}
    name = of.get("name")
    if not isinstance(name, str) or name in _OF_OTHERS:
        raise ConfigurationError(
            f"model {whole}: option 'of' is {dict(of)}; it must be a table with the name of "
            'another model: of = {name = "lenet5"}'
        )
    make: Any = plugins.find_callable(plugins.MODELS, name)
    return partial(make, **checked(make, options, of=f"model {name}"))
