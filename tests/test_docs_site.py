"""The documentation site: `make docs` builds it without a warning, and it opens from the disk without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Page
from optional import need_browser, need_package

ROOT = Path(__file__).resolve().parent.parent
SEARCH = """
(() => {
  document.querySelector("[data-md-toggle=search]").click();
  const query = document.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "prototype";
  query.dispatchEvent(new Event("input", { bubbles: true }));
  query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
})()
"""


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_package("mkdocs")
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", out)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return out


@pytest.fixture
def tab(site: Path) -> Iterator[Page]:
    need_browser()
    with Page() as tab:
        yield tab
        assert not tab.complaints
        assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in tab.requests), tab.requests


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(named) == pages, "mkdocs.yml: nav lists each page of docs/ once"


def test_make_docs_is_this_build() -> None:
    done = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "mkdocs build --strict" in done.stdout


@pytest.mark.slow
def test_pages_of_the_repository_and_of_the_api_are_there(site: Path) -> None:
    for name in ("index", "how_it_works", "api/realvr", "api/maths", "repository/src/realvr/models/mini/index"):
        assert (site / f"{name}.html").is_file(), name
    helps = (site / "api/commands.html").read_text()
    assert "--exchange-seed" in helps and "--checkpoint.keep-best" in helps
    assert 'id="realvr.maths.credit.selective"' in (site / "api/maths.html").read_text()
    from_elsewhere = re.compile(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="https?:')
    loading = [page.name for page in site.rglob("*.html") if from_elsewhere.search(page.read_text())]
    assert not loading, f"these pages load something from elsewhere: {loading}"


@pytest.mark.slow
def test_pages_open_from_the_disk(site: Path, tab: Page) -> None:
    tab.open(site / "how_it_works.html")
    assert tab.run("document.querySelector('h1').innerText").startswith("How it works")
    pictures = "Array.from(document.querySelectorAll('article img'))"
    assert tab.run(f"{pictures}.length") == 2 and tab.run(f"{pictures}.every(one => one.naturalWidth > 600)")
    assert tab.run("document.documentElement.scrollWidth") <= 1280
    tab.resize(390)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    tab.resize(1280)
    tab.open(site / "api/latent.html")
    assert tab.run("document.getElementById('realvr.latent.span.think') !== null")


@pytest.mark.slow
def test_search_works_without_a_server(site: Path, tab: Page) -> None:
    tab.open(site / "index.html")
    tab.run(SEARCH)
    until = time.monotonic() + 30
    while time.monotonic() < until and not tab.run("document.querySelectorAll('.md-search-result__item').length"):
        time.sleep(0.2)
    assert "Prototype" in tab.run("document.querySelector('.md-search-result').innerText")


@pytest.mark.slow
def test_a_broken_link_and_a_page_outside_the_navigation_stop_the_build(tmp_path: Path) -> None:
    need_package("mkdocs")
    pages = tmp_path / "docs"
    pages.mkdir()
    settings = re.sub(
        r"^(hooks|extra|extra_css|nav):.*?(?=^\S|\Z)", "", (ROOT / "mkdocs.yml").read_text(), flags=re.M | re.S
    )
    settings = re.sub(r"^plugins:.*?(?=^\S|\Z)", "plugins: []\n", settings, flags=re.M | re.S)
    (tmp_path / "mkdocs.yml").write_text(settings + "nav: [index.md]\n")
    (pages / "index.md").write_text("# Home\n")
    good = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert good.returncode == 0, good.stderr
    for text in ("[x](missing.md)", "[x](index.md#no-such-heading)"):
        (pages / "index.md").write_text(f"# Home\n\n{text}\n")
        assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0, text
    (pages / "index.md").write_text("# Home\n")
    (pages / "other.md").write_text("# Other\n")
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0
