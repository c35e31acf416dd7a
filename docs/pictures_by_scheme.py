"""A hook of mkdocs: where a page shows a picture of ours, the site shows the one that goes with its colours."""

from __future__ import annotations

import re
from typing import Any

_PICTURE = re.compile(r'<img (?P<before>[^>]*?)src="(?P<path>[^"]*pictures/[\w-]+)\.svg"(?P<after>[^>]*)>')


def by_scheme(html: str) -> str:
    """Both pictures in the place of one; the theme hides the one whose address says that it is not meant."""

    def both(match: re.Match[str]) -> str:
        schemes = (("", "light"), ("-dark", "dark"))
        before, path, after = match["before"], match["path"], match["after"]
        return "".join(f'<img {before}src="{path}{end}.svg#only-{name}"{after}>' for end, name in schemes)

    return _PICTURE.sub(both, html)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with each page."""
    return by_scheme(html)
