"""No page mentions what does not exist: names in Python, flags, settings, metrics, files, make targets, variables.

The pages are README, CONTRIBUTING, docs/ and the notebook. Commands and links are in test_docs.py.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from realvr.backbone.automatic import TITLES
from realvr.cli import COMMANDS
from realvr.diagnostics import DIAGNOSTICS
from realvr.errors import UserError
from realvr.evaluation.benchmark import BENCHMARKS
from realvr.training import configuration
from realvr.training.method import METHODS
from test_docs import options

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "realvr"
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), NOTEBOOK]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)

FOREIGN_FLAGS = {
    *("--standalone", "--nproc-per-node", "--num-processes"),  # torchrun, accelerate
    *("--index-url", "--model", "--tasks", "--model_args", "--batch_size", "--output_path", "--include_path"),
    "--repo-type",
    "--use_cache",
}
"""Of pip, launchers, lmms-eval and hf."""
USERS_FILES = re.compile(r"(?:.*/)?(?:my_\w+|mine|span_norm|path|FILE|NAME|test_NAME)\.py|vlmeval/.*")
"""Files that a reader is to write, or that belong to others."""


def text_of(path: Path) -> str:
    """A page as Markdown, also where it is a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    whole = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in whole)


def inline(path: Path) -> list[str]:
    """Code inside sentences and tables."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(path)))


def python_blocks(path: Path) -> Iterator[ast.Module]:
    for language, text in FENCE.findall(text_of(path)):
        if language == "python":
            yield ast.parse(text)


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            fields = getattr(found, "__annotations__", {}) | getattr(found, "__dataclass_fields__", {})
            try:
                if part not in fields and not hasattr(found, part):
                    return False
                found = getattr(found, part, None)
            except UserError:  # needs a package that is not installed here
                return part in Path(str(found.__file__)).read_text()
        return True
    return False


# ---------------------------------------------------------------------- Python


@page
def test_python_imports_what_exists(page: Path) -> None:
    for tree in python_blocks(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "realvr":
                for alias in node.names:
                    assert exists(f"{node.module}.{alias.name}"), f"{page.name}: {node.module} has no {alias.name}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "realvr":
                assert exists(f"realvr.{node.attr}"), f"{page.name}: realvr has no {node.attr}"


@page
def test_dotted_names_exist(page: Path) -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for code in inline(page):
        for name in re.findall(r"(?<![\w./-])(\w+(?:\.\w+)+)(?![\w/-]|\.\w)", code):
            first, second, *_ = name.split(".")
            if first == "realvr" and second not in ("ipynb", "egg"):
                assert exists(name), f"{page.name}: {name} does not exist"
            elif first in rooms and (PACKAGE / first / f"{second}.py").is_file():
                assert exists(f"realvr.{name}"), f"{page.name}: {name} does not exist"


# ---------------------------------------------------------------------- the command line


@functools.cache
def known_flags() -> set[str]:
    """Options of every command, of every diagnostic, of the scripts, and the settings of training."""
    names = {name for verb in COMMANDS for name in options(verb)} | {"--help", "--plugin", "--method", "--resume"}
    names |= {name for benchmark in BENCHMARKS for name in benchmark.flags}
    names |= {name for diagnostic in DIAGNOSTICS.names() for name in options(f"diagnose {diagnostic}")}
    for file in [
        path for folder in ("scripts", "benchmarks", "src/realvr/cli") for path in (ROOT / folder).glob("*.py")
    ]:
        names |= set(re.findall(r'"(--[a-z][\w-]*)"', file.read_text()))
    return names | FOREIGN_FLAGS


@functools.cache
def settings() -> set[str]:
    """Dotted names of the settings of training, and those of the methods also without their section."""
    names: set[str] = set()

    def visit(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            names.add(prefix + name)
            inner = configuration._section(field.annotation)
            if inner is not None:
                visit(inner, f"{prefix}{name}.")

    for kind in configuration.KINDS.values():
        visit(kind, "")
    for method in METHODS:
        visit(method.Config, "")
        visit(method.Config, "method.")
    return names


@page
def test_flags_exist(page: Path) -> None:
    wanted = {name for code in inline(page) for name in re.findall(r"(?<![\w-])(--[a-z][\w.-]*)", code)}
    for name in wanted - known_flags():
        setting = re.sub(r"^no_|\.no_", lambda m: m[0].replace("no_", ""), name[2:].replace("-", "_").rstrip("."))
        setting = re.sub(r"\.\d+\.|\.N\.", ".", setting)
        if name.startswith("--no-") and setting in TITLES and f"--{name[5:]}" in known_flags():
            continue  # one of three values, whose flag is understood without a value
        assert setting in settings() or f"--no-{name[2:]}" in known_flags() or setting.startswith("data.sources."), (
            f"{page.name}: nothing has {name}"
        )


@page
def test_settings_and_metrics_exist(page: Path) -> None:
    sections = {name.split(".")[0] for name in settings() if "." in name} - {"method"}
    if page.name == "diagnostics.md":
        sections.remove("model")  # there it is the object that a diagnostic gets
    for code in inline(page):
        for name in re.findall(rf"(?<![\w./-])((?:{'|'.join(sections)})\.[a-z_]+)(?![\w/.(-])", code):
            section, field = name.split(".")
            file = field in ("md", "json", "jsonl", "py", "yaml")
            module = (PACKAGE / section / f"{field}.py").is_file() or (PACKAGE / section / field).is_dir()
            assert file or module or name in settings(), f"{page.name}: {name} is no setting"


def test_metrics_of_the_table_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text() for path in (PACKAGE / "training").rglob("*.py"))
    prefixes = "loss|latents|data|groups|completions|prompts|policy|evidence|validation"
    named = set(re.findall(rf"`((?:{prefixes})/[a-z_]+)`", (ROOT / "docs" / "training.md").read_text()))
    assert len(named) > 40
    built = {"validation/", *re.findall(rf'f"((?:{prefixes})/[a-z_]*){{', source)}
    for name in named:
        rests = [name.removeprefix(start) for start in built if name.startswith(start)]
        assert f'"{name}"' in source or any(f'"{rest}"' in source for rest in rests), f"{name} is no metric"


# ---------------------------------------------------------------------- files, targets, variables


@page
def test_source_files_exist(page: Path) -> None:
    """Also where only the end of a path is written: `methods/realvr.py`."""
    files = [
        path.as_posix()
        for folder in ("src", "tests", "scripts", "benchmarks", "reference")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for code in inline(page):
        name = code.partition("::")[0].partition(" ")[0]
        if re.fullmatch(r"[\w/.-]+\.py", name) and not USERS_FILES.fullmatch(name):
            assert any(path.endswith(f"/{name}") for path in files), f"{page.name}: {name} does not exist"


@page
def test_files_of_the_repository_exist(page: Path) -> None:
    pattern = r"(?<![\w/.])((?:docs|examples|\.ci|\.github)/[\w./-]*\w)"
    for name in re.findall(pattern, re.sub(r"\]\([^)]*\)", "]", text_of(page))):
        assert (ROOT / name).exists(), f"{page.name}: {name} does not exist"


@page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = text_of(page)
    wanted = {word for code in inline(page) for word in re.findall(r"^make ([\w-]+)$", code)}
    wanted |= {word for _, block in FENCE.findall(text) for word in re.findall(r"^make ([\w-]+)", block, re.MULTILINE)}
    assert wanted <= targets, f"{page.name}: make {wanted - targets}"


@page
def test_variables_exist(page: Path) -> None:
    places = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / ".ci" / "run", ROOT / "Makefile"]
    known = {name for path in places for name in re.findall(r"REALVR_[A-Z_]+", path.read_text())}
    named = set(re.findall(r"REALVR_[A-Z_]+", text_of(page)))
    assert named <= known, f"{page.name}: {named - known}"


# ---------------------------------------------------------------------- the check itself


def test_the_check_notices_what_is_wrong(tmp_path: Path) -> None:
    """A page on which everything is wrong fails every check."""
    wrong = tmp_path / "wrong.md"
    wrong.write_text(
        "`realvr.latent.spann`, `latent.span.thinkk`, `--bnech`, `optim.lrate`, `methods/raelvr.py`,\n"
        "`docs/missing.md`, `make dcos`, REALVR_" + "NOTHING\n\n```python\nfrom realvr.latent import thinkk\n```\n"
    )
    for check in (
        test_python_imports_what_exists,
        test_dotted_names_exist,
        test_flags_exist,
        test_settings_and_metrics_exist,
        test_source_files_exist,
        test_files_of_the_repository_exist,
        test_make_targets_exist,
        test_variables_exist,
    ):
        with pytest.raises(AssertionError, match=r"wrong\.md: "):
            check(wrong)
