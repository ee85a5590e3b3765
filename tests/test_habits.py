"""What a project is joined by: metadata, templates and workflow say what is true here."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import realvr
from realvr.cli import main
from test_docs import anchors, prose

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAPER = ROOT.parent / "shared" / "paper" / "realvr.tex"
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]


def test_the_citation_names_this_version_and_the_paper_of_the_readme() -> None:
    cited: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited) and cited["cff-version"] == "1.2.0"
    assert cited["version"] == realvr.__version__ and cited["license"] == PROJECT["license"]
    paper = cited["preferred-citation"]
    authors = [f"{one['given-names']} {one['family-names']}" for one in paper["authors"]]
    (entry,) = re.findall(r"@misc\{.*?^\}", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    said = " ".join(entry.split())
    assert f"title = {{{paper['title']}}}" in said and f"author = {{{' and '.join(authors)}}}" in said
    assert f"year = {{{paper['year']}}}" in said and paper["url"] in said


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not beside this checkout")
def test_the_authors_are_those_of_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    text = PAPER.read_text()
    named = re.findall(r"\\mbox\{([A-Z][\w. ]+)\$\^", text)
    assert [f"{one['given-names']} {one['family-names']}" for one in cited["authors"]] == named
    assert f"\\title{{{cited['title']}}}" in text


def test_the_changelog_has_this_version_first() -> None:
    versions = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(version for version in versions if version != "Unreleased") == realvr.__version__


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())) if not re.match(r"[a-z]+:", t)]
    assert targets
    for target in targets:
        name, _, anchor = target.partition("#")
        assert (ROOT / name).exists(), f"{page.name}: {target} does not exist"
        assert not anchor or anchor in anchors(ROOT / name), f"{page.name}: {target}: no such heading"


def test_files_in_the_recipes_exist_where_they_are_not_new() -> None:
    named = set(re.findall(r"`((?:src|tests|scripts|docs|\.ci)/[\w./-]+)`", PAGES[0].read_text()))
    assert len(named) > 8
    assert [name for name in sorted(named) if "NAME" not in name and not (ROOT / name).exists()] == []
    assert [name for name in sorted(named) if "NAME" in name and not (ROOT / name).parent.is_dir()] == []


def test_the_workflow_runs_the_one_script_with_the_version_of_torch_that_the_makefile_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert job["env"]["TORCH"].partition("+")[0] == torch
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "python" in step.get("uses", "")]
    assert PROJECT["requires-python"] == f">={python}"


def test_pre_commit_runs_what_make_lint_runs() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [shlex.split(hook["entry"]) for hook in repo["hooks"]]
    recipe = (ROOT / "Makefile").read_text().split("\nlint: ")[1].split("\n\n")[0]
    lint = [shlex.split(line.strip().replace("$(BIN)", ".venv/bin")) for line in recipe.splitlines()[1:]]
    assert hooks == [[word for word in words if word != "."] for words in lint]


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_forms_are_forms(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    if form.stem != "config":
        assert {"name", "description", "body"} <= set(content)
        assert all(part["type"] in ("markdown", "textarea", "input", "dropdown") for part in content["body"])


UNDOCUMENTED = "from typing import Any\n\n\ndef public(value: Any) -> int:\n    return int(value)\n"


@pytest.mark.parametrize(
    ("file", "rules"), [("src/realvr/new.py", {"ANN401", "D100", "D103"}), ("tests/test_new.py", set())]
)
def test_ruff_asks_for_docstrings_and_types_in_the_package(file: str, rules: set[str]) -> None:
    ruff = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", file, "-"]
    done = subprocess.run(ruff, input=UNDOCUMENTED, cwd=ROOT, capture_output=True, text=True)
    assert set(re.findall(r": ([A-Z]+\d+) ", done.stdout)) == rules, done.stdout + done.stderr


# ---------------------------------------------------------------------- extras


IMPORTED = {"scikit-learn": "sklearn"}
"""Packages that are imported by another name."""


def test_an_extra_brings_what_the_package_imports() -> None:
    """Those of users; `dev` and `docs` are for tests, scripts and make."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    users = {
        extra: needed for extra, needed in PROJECT["optional-dependencies"].items() if extra not in ("dev", "docs")
    }
    assert "train" in users
    for extra, needed in users.items():
        for package in (Requirement(line).name for line in needed):
            name = IMPORTED.get(package, package.replace("-", "_"))
            assert re.search(rf"^ *(from|import) {name}\b", source, re.MULTILINE), f"{extra}: nothing imports {name}"


@pytest.mark.parametrize(
    ("package", "flags", "who"),
    [("accelerate", [], "engine ddp"), ("peft", ["--lora.rank", "2"], "lora.rank")],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str,
    flags: list[str],
    who: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["world", "make", str(tmp_path), "--split", "train-boxes", "--size", "48", "--count", "24"]) == 0
    data = tmp_path / "train-boxes" / "samples.jsonl"
    monkeypatch.setitem(sys.modules, package, None)
    assert importlib.util.find_spec(package) is None
    run = ["own/mini-sft", "--data.sources.0.path", str(data), "--run.out", str(tmp_path / "run"), "--dry-run"]
    assert main(["train", "sft", *run, *flags]) == 2
    told = capsys.readouterr().err
    assert f"realvr: error: {who} needs {package}: pip install 'realvr[train]'" in told
    (extra,) = re.findall(r"realvr\[(\w+)\]", told)
    assert any(Requirement(line).name == package for line in PROJECT["optional-dependencies"][extra])
