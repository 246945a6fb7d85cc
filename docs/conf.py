"""The configuration of Sphinx; `docs/pages.py` writes the sources and calls it."""

import re

project = "tpukit"
author = "the authors of tpukit"
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
    "use_download_button": False,  # it would lead to sources, which are not copied
    "navbar_persistent": [],  # the search box is in the side bar
}
templates_path = []

default_role = "code"  # text in single backticks
# Otherwise signatures would show values from the environment of this machine.
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # a longer signature has one argument per line
autodoc_member_order = "bysource"
napoleon_use_ivar = True
nb_execution_mode = (
    "off"  # the tests execute the notebooks; each page names the source of its outputs
)
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = [
    "misc.highlighting_failure",  # outputs may have any characters
    "myst.header",  # some notebooks go from a title to the third level
    "mystnb.unknown_mime_type",  # live panels have an HTML copy for pages without a kernel
]


def setup(app) -> None:
    """Connect `_mark_code`, so that indented code in docstrings is displayed as code."""
    app.connect("autodoc-process-docstring", _mark_code, priority=400)  # before napoleon


def _mark_code(app, what, name, value, options, lines: list[str]) -> None:
    """Insert `::` before indented code, which docstrings omit so that `help()` reads well."""
    for number in range(len(lines) - 1, 0, -1):
        begins_block = lines[number].startswith("    ") and not lines[number - 1].strip()
        text_before = [line for line in lines[:number] if line.strip()]
        if not begins_block or not text_before:
            continue
        last = text_before[-1]
        is_section = re.fullmatch(r"\w+:", last)  # "Args:", whose entries are indented too
        if not last.startswith(" ") and not is_section:
            lines[number:number] = ["::", ""]
