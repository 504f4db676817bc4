"""An extension of griffe that uses a setting's description as its attribute's docstring."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class SettingsDescriptions(griffe.Extension):
    """Griffe extension that copies `Field(description="…")` into an attribute's docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **details: Any) -> None:
        """Give an attribute that has no docstring the description of its `Field`."""
        del details
        if attr.docstring is not None or not isinstance(attr.value, griffe.ExprCall):
            return
        for argument in attr.value.arguments:
            if isinstance(argument, griffe.ExprKeyword) and argument.name == "description":
                try:
                    text = ast.literal_eval(str(argument.value))
                except (SyntaxError, ValueError):
                    return
                attr.docstring = griffe.Docstring(text, parent=attr)
