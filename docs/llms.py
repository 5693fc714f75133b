"""A Sphinx extension: the HTML build also has `llms.txt`, a list of pages for programs, and `llms-full.txt`, all their text.

The form is that of llmstxt.org. A page is linked as Markdown, as it was written; the pages that are made of docstrings are in
`llms-full.txt` as the text that was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.builders.text import TextBuilder
from sphinx.writers.text import TextWriter


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the files when the build has ended."""
    app.add_config_value("llms_summary", "", "", str)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "version": "1"}


def _write(app: Sphinx, failed: Exception | None) -> None:
    if failed is not None or app.builder.format != "html":
        return
    pages = _in_order(app, app.config.root_doc)
    lines = [f"# {app.config.html_title}", "", f"> {app.config.llms_summary}", ""]
    for page in pages:
        if app.env.toctree_includes.get(page):
            lines += ["", f"## {_title(app, page)}", ""]
        lines.append(f"- [{_title(app, page)}]({app.config.html_baseurl}_sources/{page}.md.txt)")
    full = "\n\n".join(f"<!-- {page} -->\n\n{_text(app, page).strip()}" for page in pages)
    folder = Path(app.outdir)
    (folder / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "llms-full.txt").write_text(full + "\n", encoding="utf-8")


def _in_order(app: Sphinx, page: str) -> list[str]:
    """The page, and those below it, as the table of contents has them."""
    below = [name for child in app.env.toctree_includes.get(page, ()) for name in _in_order(app, child)]
    return [page, *below]


def _title(app: Sphinx, page: str) -> str:
    return app.env.titles[page].astext()


def _text(app: Sphinx, page: str) -> str:
    source = Path(app.env.doc2path(page)).read_text(encoding="utf-8")
    if "{eval-rst}" not in source:
        return source
    builder = TextBuilder(app, app.env)
    builder.init()
    writer = TextWriter(builder)
    tree: nodes.document = app.env.get_and_resolve_doctree(page, builder)
    writer.document = tree
    writer.translate()
    return str(writer.output)
