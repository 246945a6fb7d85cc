"""Follow the links of built pages: the target must exist, or be a well-formed address."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links = []
        self.anchors = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:  # noqa: D102
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if given.get(name) is not None]
        self.anchors |= {given.get("id"), given.get("name")}


def broken_links(folder: Path) -> list[str]:
    """Return a line for each broken link."""
    # _static has templates of the theme, which are not pages.
    files = [path for path in folder.rglob("*.html") if "_static" not in path.parts]
    pages = {path.resolve(): _Page(path.read_text()) for path in files}
    broken = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            if fault := _fault(link, path, pages):
                broken.append(f"{path.relative_to(folder.resolve())}: {link} {fault}")
    return broken


def _fault(link: str, path: Path, pages: dict[Path, _Page]) -> str:
    """Return the reason why a link is broken, or an empty text."""
    try:
        parts = urlsplit(link)
    except ValueError as error:
        return f"is not an address: {error}"
    if parts.scheme in ("data", "mailto"):
        return ""
    if parts.scheme or parts.netloc:
        has_host = re.fullmatch(r"[\w.-]+\.[a-z]{2,}(:\d+)?", parts.netloc)
        is_address = parts.scheme in ("http", "https") and has_host and " " not in link
        return "" if is_address else "is not an address"
    target = path
    if parts.path:
        target = (path.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "leads to no file"
    has_anchor = target not in pages or unquote(parts.fragment) in pages[target].anchors
    return "" if has_anchor else "leads to no place of that page"
