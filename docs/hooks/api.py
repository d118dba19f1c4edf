"""The API pages: an entry for each public name, and a check that the built pages have them all.

In a page `<!-- api: ebmguard.samplers.* -->` stands for the entries of all names that a room
exports, `<!-- api: ebmguard.guard -->` for one. mkdocstrings finds a name only in the file that
defines it, so each is followed there. Nothing is imported: the sources are read.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from html import unescape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ebmguard"
# The first is the name that users write; the command line has a page of its own.
RENAMED = {"ebmguard.runs": "ebmguard.report.frames"}
UNLISTED = ("ebmguard.cli",)
PLACEHOLDER = re.compile(r"^<!-- api: ([\w.]+?)(\.\*)? -->$", re.MULTILINE)
ENTRY = "::: {}\n    options: {{show_root_full_path: false}}\n"
SIGNATURE_OR_MARK = re.compile(r'<div class="[^"]*doc-signature.*?</div>|<[^>]+>', re.DOTALL)
HEADING = re.compile(r'<h\d id="([^"]+)" class="doc doc-heading">')


@cache
def exports(module: str) -> dict[str, str]:
    """Of the names in a module's `__all__`, where each is defined; its own rooms are left out."""
    path = ROOT.joinpath(*RENAMED.get(module, module).split("."))
    is_package = path.is_dir()
    file = path / "__init__.py" if is_package else path.with_suffix(".py")
    names: list[str] = []
    origins: dict[str, str] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = file.parents[node.level - 1].relative_to(ROOT)
            origin = ".".join([*folder.parts, *([node.module] if node.module else [])])
            origins |= {alias.name: origin for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
    found = {}
    for name in names:
        origin = origins.get(name)
        if origin is None:
            found[name] = f"{'.'.join(path.relative_to(ROOT).parts)}.{name}"
        elif origin != module:  # else `from . import name`
            found[name] = exports(origin).get(name, f"{origin}.{name}")
    return found


def rooms() -> list[str]:
    """The package, and all in it that exports names."""
    parts = [path.stem for path in sorted(PACKAGE.iterdir()) if path.suffix in ("", ".py")]
    found = ["ebmguard", *(f"ebmguard.{part}" for part in parts if part[0] != "_"), *RENAMED]
    return [room for room in found if room not in UNLISTED and exports(room)]


def expanded(markdown: str) -> str:
    """A page with its placeholders replaced."""

    def entries(match: re.Match[str]) -> str:
        path, every = match.groups()
        room, _, name = path.rpartition(".")
        homes = exports(path).values() if every else [exports(room)[name]]
        return "\n".join(ENTRY.format(home) for home in homes)

    return PLACEHOLDER.sub(entries, markdown)


def missing(pages: Iterable[str]) -> list[str]:
    """What is wrong with built pages: names without an entry, entries without their parts."""
    entries: dict[str, str] = {}
    for page in pages:
        _, *parts = HEADING.split(page)
        for path, text in zip(parts[::2], parts[1::2], strict=True):
            entries.setdefault(unescape(path), re.split(r"<h\d|</article>", text)[0])
    wrong = []
    for room in rooms():
        for name, path in exports(room).items():
            entry = entries.get(path) or entries.get(f"{room}.{name}")
            if entry is None:
                wrong.append(f"{room}.{name} has no entry")
                continue
            heading, _, body = entry.partition("</h")
            # A class that is made without arguments has none.
            if "doc-signature" not in body and "doc-class-name" not in heading:
                wrong.append(f"{room}.{name} has no signature")
            if len(SIGNATURE_OR_MARK.sub(" ", f"<{body}").split()) < 2:
                wrong.append(f"{room}.{name} has no docstring")
    return wrong


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for each page before it is drawn."""
    return expanded(markdown)


def on_post_build(config: dict[str, str], **_: object) -> None:
    """Called by mkdocs when all pages are written; an error ends the build."""
    from mkdocs.exceptions import PluginError

    pages = Path(config["site_dir"], "reference", "api").rglob("*.html")
    wrong = missing(path.read_text(encoding="utf-8") for path in pages)
    if wrong:
        raise PluginError("The API pages lack something: " + "; ".join(sorted(wrong)))
