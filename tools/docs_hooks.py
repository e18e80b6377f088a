"""MkDocs hooks: files of the repository as pages of the site, and the links between both.

A page of the nav that docs/ lacks is the file of that path in the repository, such as SECURITY.md.
Links are written for readers of the repository, relative to the file, and rewritten for the site.
"""

import os
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
# Pages of the site that show another file than the one that a link names.
_SHOWN_BY = {"README.md": "index.md"}


def pages(nav: list[Any]) -> Iterator[str]:
    """The paths of all pages in a nav, in its order."""
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(target, list):
            yield from pages(target)
        else:
            yield target


def in_repository(page: str) -> str:
    """The path in the repository of a page of the site."""
    return f"docs/{page}" if (_ROOT / "docs" / page).is_file() else page


def links(markdown: str) -> list[str]:
    """The targets of a text's relative links, without anchors."""
    return _LINK.findall(markdown)


def for_site(markdown: str, page: str) -> str:
    """The Markdown of a page, with links that lead to pages of the site."""
    folder = posixpath.dirname(in_repository(page))

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        there = _SHOWN_BY.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(there, posixpath.dirname(page) or ".")

    return _LINK.sub(target, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that docs/ lacks, and the figures that they show."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for page in pages(config["nav"]):
        path = _ROOT / page
        if in_repository(page) != page:
            continue
        files.append(File.generated(config, page, abs_src_path=os.fspath(path)))
        for link in links(path.read_text()):
            figure = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            if figure.endswith(".png"):
                source = os.fspath(_ROOT / figure)
                files.append(File.generated(config, figure, abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page."""
    return for_site(markdown, page.file.src_uri)
