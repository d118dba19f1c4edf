"""What the API pages change about docstrings and signatures before they are drawn."""

import re

import griffe

LONGEST_DEFAULT, LONGEST_VALUE = 30, 150


class Docstrings(griffe.Extension):
    """Sphinx's roles become code, long defaults an ellipsis, comments of constants their text."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Of every object that is read."""
        if obj.docstring:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(as_markdown, paragraphs))

    def on_function(self, *, func: griffe.Function, **kwargs: object) -> None:
        """Of every function and method."""
        shorten(func.parameters)

    def on_class(self, *, cls: griffe.Class, **kwargs: object) -> None:
        """Of every class: the parameters of a dataclass are its fields."""
        for field in cls.attributes.values():
            if field.value is not None and len(str(field.value)) > LONGEST_DEFAULT:
                field.value = "..."

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: object) -> None:
        """Of every constant."""
        if attr.value is not None and len(str(attr.value)) > LONGEST_VALUE:
            attr.value = "..."
        if attr.docstring is None and attr.parent.is_module and attr.lineno:
            text = comment_of(attr.module.lines, attr.lineno, attr.endlineno or attr.lineno)
            if text:
                attr.docstring = griffe.Docstring(text, parent=attr)


def as_markdown(paragraph: str) -> str:
    """Roles such as ``:func:`~a.b` `` become code, `b`; sections of a title of their own, lists."""
    text = re.sub(r":\w+:`(?:~(?:\w+\.)*)?([^`]+)`", r"`\1`", paragraph)
    title, _, lines = text.partition("\n")
    if not title.startswith(" "):  # else code
        text = text.replace("β*", "β\\*")
    if re.fullmatch(r"[A-Z].* .*:", title) and lines.startswith("    "):
        items = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", text.partition("\n")[2], flags=re.M)
        text = f"{title}\n\n{items}"
    return text


def shorten(parameters: griffe.Parameters) -> None:
    """Replace each long default."""
    for parameter in parameters:
        if parameter.default is not None and len(str(parameter.default)) > LONGEST_DEFAULT:
            parameter.default = "..."


def comment_of(lines: list[str], first: int, last: int) -> str:
    """The comment behind the statement in these lines, counted from 1, or the one above it."""
    _, mark, behind = lines[last - 1].rpartition("  # ")
    if mark:
        return behind
    found: list[str] = []
    for line in reversed(lines[: first - 1]):
        if not line.startswith("# "):
            break
        found.insert(0, line.removeprefix("# "))
    return "\n".join(found)
