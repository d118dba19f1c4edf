"""The site's search is for the manual: results stay out of it, and pages for some come later."""

from typing import Any

SOME = ("codebases/", "reference/api/", "training.md", "shortrun.md", "toys.md", "bism.md")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by mkdocs for each page before it is drawn."""
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"exclude": True})
    elif page.file.src_uri.startswith(SOME):
        page.meta.setdefault("search", {"boost": 0.3})
    return markdown
