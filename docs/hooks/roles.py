"""Docstrings name things as Sphinx does; on the site a name is code."""

import re

import griffe


class Roles(griffe.Extension):
    """``:func:`~a.b` `` becomes code, `b`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Of every object that is read."""
        if obj.docstring:
            text = re.sub(r":\w+:`(?:~(?:\w+\.)*)?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = text
