"""The site's search is for the manual: pages of results stay out of it."""

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by mkdocs for each page before it is drawn."""
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"exclude": True})
    return markdown
