"""How the site is built (`make docs`): Sphinx, Markdown pages by MyST, the reference from docstrings by autodoc."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

from gemini.version import __version__  # noqa: E402

project = "Gemini"
author = "The Gemini authors"
project_copyright = f"2026, {author}"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_source"]
exclude_patterns = ["_build"]
smartquotes_action = "D"  # dashes alone: "auto" is to be read as it is typed

# ---- Markdown ------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Links to files of the repository that are not pages (reports, the license) lead to the repository's own tree.
myst_url_schemes = ("http", "https", "mailto")

# ---- the reference -------------------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"

# ---- HTML: nothing is fetched from elsewhere, pages read the same without a network -------------------------------

html_theme = "furo"
html_title = f"Gemini {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
highlight_language = "text"  # a block without a language is a drawing or output
pygments_style = "friendly"
pygments_dark_style = "github-dark"
