"""Sphinx configuration; `make docs` builds with warnings as errors."""

from __future__ import annotations

import wingbeat

project = "wingbeat"
author = "The wingbeat authors"
project_copyright = author
version = release = wingbeat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"

html_theme = "furo"
html_title = f"wingbeat {version}"
