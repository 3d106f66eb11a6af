"""Sphinx configuration: plain Markdown pages, light and dark."""

from outlast import __version__

project = "Outlast"
author = "The Outlast authors"
copyright = "The Outlast authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.mathjax", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["code.css"]
html_title = f"Outlast {release}"
# The report's accent colours, so that the pages and the picture of a run belong together.
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#005f9e",
        "color-brand-content": "#005f9e",
    },
    "dark_css_variables": {
        "color-brand-primary": "#6fb7f2",
        "color-brand-content": "#6fb7f2",
    },
}
html_copy_source = False
html_show_sphinx = False
