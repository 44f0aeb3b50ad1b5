"""Sphinx configuration: ``sphinx-build -W -b html docs docs/_build``.

Nothing is fetched. With ``-t online`` names of PyTorch and PyG become links into their documentation, whose
inventories are downloaded for it.
"""

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
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!graphfuse\b).*")]  # of others, only with inventories

if tags.has("online"):  # noqa: F821  # Sphinx puts `tags` here
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_timeout = 10
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "torch_geometric": ("https://pytorch-geometric.readthedocs.io/en/latest", None),
    }

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes"]

html_theme = "furo"
html_title = f"graphfuse {release}"
