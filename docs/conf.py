"""Sphinx configuration; `make docs` builds with warnings as errors."""

from __future__ import annotations

import wingbeat

project = "wingbeat"
author = "The wingbeat authors"
project_copyright = author
version = release = wingbeat.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"

html_theme = "furo"
html_title = f"wingbeat {version}"
html_use_index = False  # the API is one page, and the search finds its names
html_domain_indices = False

# Only the commands of a console block are copied, without their prompt.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
