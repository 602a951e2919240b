"""A hook of mkdocs: links from docs/ to files elsewhere in the repository point to the repository's site.

`docs/*.md` are read in the repository and on the docs site. A link such as `../CONTRIBUTING.md` works in the
first only. On the site it becomes an address below `repo_url` of `mkdocs.yml`. A link to a file that does not
exist is a warning, so `mkdocs build --strict` fails.
"""

from __future__ import annotations

import logging
import os.path
import re
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.docs_links")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def point_outside(markdown: str, page: Path, docs: Path, repository_url: str) -> tuple[str, list[str]]:
    """Rewrite the links that leave `docs`. Returns the text, and the links whose file does not exist."""
    root, broken = docs.parent, []

    def replace(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if "://" in target or not target.startswith(".."):
            return match[0]
        path = Path(os.path.normpath(page.parent / target))
        if path.is_relative_to(docs):
            return match[0]
        if not path.exists() or not path.is_relative_to(root):
            broken.append(target)
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        address = f"{repository_url.rstrip('/')}/{kind}/main/{path.relative_to(root).as_posix()}"
        return f"{opening}{address}{anchor or ''}{closing}"

    return LINK.sub(replace, markdown), broken


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    source = Path(page.file.abs_src_path)
    text, broken = point_outside(markdown, source, Path(config["docs_dir"]), config["repo_url"])
    for target in broken:
        LOG.warning("%s links to %s, which does not exist", page.file.src_path, target)
    return text
