"""The site: `make docs` builds it into site/."""

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import generate
from sphinx import addnodes

import fl_dist

project = "fl_dist"
author = "the authors of fl_dist"
version = release = fl_dist.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["reference/generated", "records"]
default_role = "literal"

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
nitpicky = True
# Types of Python, torch, numpy and pydantic, and private ones: there are no pages to link to.
nitpick_ignore_regex = [("py:.*", r"(?!fl_dist\.[A-Z]\w*$).*")]

html_theme = "furo"
html_title = f"fl_dist {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_copyright = html_show_sphinx = False
# Prompts and output stay out of what is copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def unlink_folders(app: Any, doctree: Any) -> None:
    """Links to folders of the repository, which the site does not have, become plain text."""
    folder = (DOCS / app.env.docname).parent
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("reftype") == "myst" and (folder / node["reftarget"]).is_dir():
            node.replace_self(node.children)


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda app: generate.write())
    app.connect("doctree-read", unlink_folders)
