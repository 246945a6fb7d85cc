"""Follow the links of built pages: those inside have to lead somewhere, others have to be addresses."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.anchors = [], {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:  # noqa: D102
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if given.get(name) is not None]
        self.anchors |= {given.get("id"), given.get("name")}


def broken_links(folder: Path) -> list[str]:
    """Return a line for each link that leads nowhere."""
    found = [path for path in folder.rglob("*.html") if "_static" not in path.parts]  # templates of the theme lie there
    pages = {path.resolve(): _Page(path.read_text()) for path in found}
    return [
        f"{path.relative_to(folder.resolve())}: {link} {why}"
        for path, page in pages.items()
        for link in dict.fromkeys(page.links)
        if (why := _fault(link, path, pages))
    ]


def _fault(link: str, path: Path, pages: dict[Path, _Page]) -> str:
    try:
        parts = urlsplit(link)
    except ValueError as error:
        return f"is no address: {error}"
    if parts.scheme in ("data", "mailto"):
        return ""
    if parts.scheme or parts.netloc:
        fits = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.-]+\.[a-z]{2,}(:\d+)?", parts.netloc)
        return "" if fits and " " not in link else "is no address"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "leads to no file"
    known = target not in pages or unquote(parts.fragment) in pages[target].anchors
    return "" if known else "leads to no place of that page"
