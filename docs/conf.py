"""Sphinx configuration; `make docs` builds the site with warnings as errors."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from magicjax.version import version  # noqa: E402

project = "magicjax"
copyright = "The magicjax authors"
release = version()
del version  # Sphinx reads this name as a setting
html_title = "magicjax"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "notebooks/README.md", "**.ipynb_checkpoints"]

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],
}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# `make notebooks` runs the notebooks and stores their outputs; the site shows these.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Array": "jax.Array"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
add_module_names = False
