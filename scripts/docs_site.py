"""Hooks of the documentation site (mkdocs.yml).

The pages in docs/ link files of the repository: the README, model cards, settings, tests. On the site those files are
pages too, so that no link leaves it. The API reference is one page per package, from the docstrings; the packages are
found, not listed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "realvr"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
REPOSITORY = "repository"
"""Folder of the site for files from outside docs/."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", "": "makefile"}
API = "api"
LEFT_OUT = ("benchmarks", "cli", "models")


def site_name(source: str) -> str:
    """Where the site has a file of the repository: docs/x.md is x.md, src/a.py is repository/src/a.py.md."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"{REPOSITORY}/{source if source.endswith('.md') else source + '.md'}"


def linked(source: str, text: str) -> set[str]:
    """Files of the repository outside docs/ that a text links."""
    targets = (resolve(source, match[2]) for match in LINK.finditer(FENCE.sub("", text)))
    return {target for target in targets if target is not None and not target.startswith("docs/")}


def resolve(source: str, link: str) -> str | None:
    """The file of the repository that a relative link leads to; None for the web, for anchors and for folders."""
    name = link.partition("#")[0]
    if not name or re.match(r"[a-z]+:", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    return target if (ROOT / target).is_file() else None


def rewritten(source: str, text: str) -> str:
    """A text with its links as the site needs them; code stays as it is."""
    home = posixpath.dirname(site_name(source))

    def replace(match: re.Match[str]) -> str:
        target = resolve(source, match[2])
        if target is None:
            return match[0]
        anchor = match[2].partition("#")[1] + match[2].partition("#")[2]
        return match[1] + posixpath.relpath(site_name(target), home or ".") + anchor + match[3]

    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in FENCE.split(text))


def shown(source: str) -> str:
    """A file of the repository as a page."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return rewritten(source, re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL))
    if source.endswith(".ipynb"):
        cells = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in json.loads(text)["cells"]]
        return "\n\n".join(f"```python\n{cell}\n```" if code else cell for cell, code in cells)
    return f"# {source}\n\n````{LANGUAGES.get(Path(source).suffix, '')}\n{text}\n````\n"


def packages() -> list[str]:
    """Packages of the reference: not the command line, which explains itself, nor old names of modules."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name not in LEFT_OUT)


def modules_of(folder: Path) -> list[str]:
    modules = []
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[-1] != "__init__" and not any(part.startswith("_") for part in parts):
            modules.append(".".join(parts))
    return modules


@functools.cache
def reference() -> dict[str, str]:
    """Pages of the API reference: the commands, the names that `realvr` exports, then every package."""
    exports = re.findall(r'^    "(\w+)": "([\w.]+)",$', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    first = "# realvr\n\nWhat `import realvr` offers. Everything else is in the pages of the packages.\n\n"
    first += "| name | from |\n|---|---|\n"
    first += "".join(f"| [`realvr.{name}`][{module}.{name}] | `{module}` |\n" for name, module in exports)
    alone = sorted(f"realvr.{file.stem}" for file in PACKAGE.glob("*.py") if not file.stem.startswith("_"))
    pages = {
        f"{API}/commands.md": commands(),
        f"{API}/realvr.md": first + "\n" + "".join(f"::: {module}\n\n" for module in alone),
    }
    for package in packages():
        blocks = "".join(f"::: {module}\n\n" for module in modules_of(PACKAGE / package))
        pages[f"{API}/{package}.md"] = f"# realvr.{package}\n\n{blocks}"
    return pages


def commands() -> str:
    """The help of every command, as it is printed."""
    from realvr.cli import COMMANDS, main

    os.environ["COLUMNS"] = "90"
    parts = ["# Command line\n\nThe output of `--help` of every command.\n"]
    for verb in COMMANDS:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main([*verb.split(), "--help"])
        parts.append(f"## realvr {verb}\n\n````text\n{text.getvalue().strip()}\n````\n")
    return "\n".join(parts)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    config.nav.append({"API reference": [{Path(name).stem: name} for name in reference()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in reference().items():
        files.append(File.generated(config, name, content=text))
    waiting = {target for page in files.documentation_pages() if page.abs_src_path for target in links_of(page)}
    done: set[str] = set()
    while waiting:
        source = waiting.pop()
        done.add(source)
        page = File.generated(config, site_name(source), content=shown(source), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
        if source.endswith(".md"):
            waiting |= linked(source, (ROOT / source).read_text(encoding="utf-8")) - done
    return files


def links_of(page: File) -> set[str]:
    return linked(f"docs/{page.src_uri}", page.content_string)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    generated = page.file.abs_src_path is None
    return markdown if generated else rewritten(f"docs/{page.file.src_uri}", markdown)
