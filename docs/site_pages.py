"""A hook of mkdocs: pages of the root folder become pages of the site, and links that leave `docs/` are put right."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the root folder, and the pages that they become."""

_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
_SOURCE = re.compile(r'\b(src|srcset)="docs/')
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root folder."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site; other targets become plain text."""
    sources = {generated: source for source, generated in PAGES.items()}
    path = page.file.src_uri
    source = sources.get(path, f"docs/{path}")

    def put_right(match: re.Match[str]) -> str:
        label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group()
        file, mark, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        if not (ROOT / file).exists():
            _log.warning("%s links to %s, which is not there", source, target)
        if file in PAGES:
            return f"{label}({PAGES[file]}{mark}{anchor})"
        if file.startswith("docs/"):
            return f"{label}({file.removeprefix('docs/')}{mark}{anchor})"
        text = label.strip("![]")
        return f"{text} (`{file}`)" if text.strip("`") != file else f"`{file}`"

    parts, last = [], 0
    for code in _CODE.finditer(markdown):  # what looks like a link in code is none
        parts += [_LINK.sub(put_right, markdown[last : code.start()]), code.group()]
        last = code.end()
    return _SOURCE.sub(r'\1="', "".join([*parts, _LINK.sub(put_right, markdown[last:])]))
