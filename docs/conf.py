"""Sphinx configuration: ``sphinx-build -W -b html docs docs/_build``."""

import graphfuse

project = "graphfuse"
author = "The graphfuse authors"
copyright = f"2026 {author}"
release = version = graphfuse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes"]

html_theme = "furo"
html_title = f"graphfuse {release}"
