"""What Sphinx needs to know; `docs/pages.py` lays out the pages and calls it."""

import re

project, author = "tpukit", "the authors of tpukit"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "sphinx_book_theme"
html_title = "tpukit"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["find_message.js"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,  # it leads to sources, which are not copied
    "navbar_persistent": [],  # the search stands at the side already
}
templates_path = []

default_role = "code"  # what stands in single backticks
autodoc_preserve_defaults = True  # else the values of this machine's environment would stand in signatures
autodoc_typehints = "none"  # they stand in the signature's own words below, as axes, ranges and units
autodoc_member_order = "bysource"
napoleon_use_ivar = True
nb_execution_mode = "off"  # the tests execute every notebook; a page says whether it shows what a run printed
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = [
    "misc.highlighting_failure",  # what a run printed may hold any character
    "myst.header",  # notebooks go from a title to a third level where that reads better
    "mystnb.unknown_mime_type",  # a panel of a run that is over has HTML beside what only a kernel can draw
]


def setup(app) -> None:
    """Have code in docstrings shown as code: there it is only indented, so that `help()` reads well."""
    app.connect("autodoc-process-docstring", _mark_code, priority=400)  # before napoleon


def _mark_code(app, what, name, value, options, lines: list[str]) -> None:
    for number in range(len(lines) - 1, 0, -1):
        before = [line for line in lines[:number] if line.strip()][-1:]
        begins = lines[number].startswith("    ") and not lines[number - 1].strip()
        if begins and before and not before[0].startswith(" ") and not re.fullmatch(r"\w+:", before[0]):
            lines[number:number] = ["::", ""]
