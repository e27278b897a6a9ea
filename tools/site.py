"""The documentation's site, built by `make docs` from the files as they lie in the repo (a hook of mkdocs).

The README is the site's first page. Every file that a page links to is part of the site, wherever it lies: what is in
docs/ stands at the site's root, anything else under its path in the repo. Links are written as they work in the repo
and are rewritten to where their targets stand in the site, so that a link which is broken in one is broken in both, and
`mkdocs build --strict` says so. Nothing on a page comes from elsewhere: it works, search included, without a network
and without a server.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from headrace.pool.calls import BlockingPool

ROOT = Path(__file__).resolve().parents[1]
#: A link or an image of Markdown to a place within the repo: its opening, its path, its anchor.
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
#: What the theme would fetch for search in pages that are opened from a folder; docs/assets/worker.js stands in for it.
REMOTE_WORKER = re.compile(r"https://[\w.]+/iframe-worker/shim")
#: Where the reference has the pool's calls, which are made from a table that no reader of source finds them in.
CALLS = "<!-- the pool's calls -->"
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README and, link by link, every file outside of docs/ that a page of the site leads to."""
    waiting = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    waiting += [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, _site_path(path), content=(ROOT / path).read_bytes()))
        if path.endswith(".md"):
            waiting += [target for target in _targets(path) if (ROOT / target).is_file()]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points a page's links to where their targets stand in the site."""
    path = _repo_path(page.file.src_uri)
    markdown = markdown.replace(CALLS, "\n\n".join(_pool_calls()))

    def rewritten(link: re.Match[str]) -> str:
        target = _site_path(_resolved(path, link[2]))
        return link[1] + posixpath.relpath(target, posixpath.dirname(page.file.src_uri)) + link[3]

    prose = CODE.split(markdown)
    codes = [*CODE.findall(markdown), ""]
    return "".join(LINK.sub(rewritten, text) + code for text, code in zip(prose, codes, strict=True))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Takes the one script that the theme would fetch from the site's own folder."""
    return REMOTE_WORKER.sub(posixpath.relpath("assets/worker.js", posixpath.dirname(page.url) or "."), output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Likewise of the page that stands for one that is not there."""
    return REMOTE_WORKER.sub("assets/worker.js", output_content)


def _pool_calls() -> list[str]:
    """A section for each call of a pool: its name, signature and meaning. Scored groups' are the Trajectory API's."""
    calls = {name: call for name, call in vars(BlockingPool).items() if not name.startswith(("_", "desk_"))}
    sections = []
    for name, call in calls.items():
        if not (inspect.isfunction(call) and call.__doc__):
            continue
        _, *parameters = inspect.signature(call).parameters.values()
        shown = inspect.signature(call).replace(parameters=parameters)
        told = inspect.cleandoc(call.__doc__)
        sections.append(f"### {name} {{#headrace.DataPool.{name}}}\n\n```python\n{name}{shown}\n```\n\n{told}")
    return sections


def _targets(path: str) -> list[str]:
    """The repo's files that a page links to; a folder stands for its README."""
    return [_resolved(path, link[2]) for link in LINK.finditer(CODE.sub("", (ROOT / path).read_text()))]


def _resolved(path: str, link: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def _site_path(path: str) -> str:
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _repo_path(site: str) -> str:
    if site == "index.md":
        return "README.md"
    return f"docs/{site}" if (ROOT / "docs" / site).is_file() else site
