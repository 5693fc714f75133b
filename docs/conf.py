"""The documentation's build: `sphinx-build -W --keep-going docs docs/_build` (see CONTRIBUTING.md)."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for `drawings` and `llms`

project = "dualwrite"
author = "the dualwrite contributors"
project_copyright = "2026, the dualwrite contributors"
version = release = installed_version("dualwrite")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "drawings",
    "llms",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines names, as if they were links
html_title = f"dualwrite {release}"
llms_summary = "A Python library that makes a database write and a Kafka publish one atomic write, without a relay."

# Links to other sites: `sphinx-build -b linkcheck docs docs/_build/links` (see CONTRIBUTING.md).
linkcheck_timeout = 20
linkcheck_retries = 2

# Markdown. A repository viewer draws ```mermaid and finds headings by the same anchors.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Python. Names of other libraries aren't linked: that would need the network.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
