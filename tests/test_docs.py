"""The documentation as a reader uses it: links lead somewhere, tests that are named exist, commands can be given."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from realvr.cli import COMMANDS, main, train
from realvr.cli.diagnose import SuiteCommand, as_settings, as_suite, is_suite, options_of
from realvr.cli.dispatch import settings_type
from realvr.diagnostics import DIAGNOSTICS
from realvr.errors import UserError
from realvr.registry import load_file
from realvr.training import packaged
from realvr.training.configuration import load_settings

ROOT = Path(__file__).resolve().parent.parent
TOYS = ROOT / "tests" / "toys"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
CONFIGS = [packaged.FOLDER / f"{name}.yaml" for name in packaged.names()]
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def prose(text: str) -> str:
    """The page without fenced code."""
    return FENCE.sub("", text)


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path.read_text()), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(next(n for n in (name, *(f"{name}-{i}" for i in range(1, 99))) if n not in found))
    return found


# ---------------------------------------------------------------------- links and tests


@page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target} does not exist"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}: no such heading"


def test_the_contents_link_every_page() -> None:
    """docs/index.md is the list of pages; the README links it."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    linked = set(re.findall(r"\]\(([\w.]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == pages - {"index.md"}
    from_readme = set(re.findall(r"\]\(docs/([\w.]+\.md)[^)]*\)", (ROOT / "README.md").read_text()))
    assert "index.md" in from_readme


def test_tests_that_are_named_exist() -> None:
    named = {(file, name) for path in PAGES for file, name in re.findall(r"([\w/]+\.py)::(\w+)", path.read_text())}
    assert len(named) > 40
    for file, name in named:
        text = (ROOT / "tests" / file.removeprefix("tests/")).read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"


def test_files_that_are_named_exist() -> None:
    """Scripts, tests and the like, as the texts write them: `benchmarks/foundation.py`."""
    pattern = r"(?<![\w/.])((?:scripts|benchmarks|reference|tests|src)/[\w./-]+\.(?:yaml|py|sh|json))"
    for path in PAGES:
        for name in re.findall(pattern, path.read_text()):
            # The tests of a part are also written without "tests/", as in "evaluation/test_published.py".
            assert (ROOT / name).is_file() or (ROOT / "tests" / name).is_file(), f"{path.name}: {name} does not exist"


def test_settings_that_are_named_exist() -> None:
    """By name, `own/sft`, or by the place of their file, `configs/own/sft.yaml`."""
    pattern = r"[` ](?:(?:src/realvr/)?configs/((?:own|mini|paper)/[\w.-]+)\.yaml|((?:own|mini|paper)/[\w.-]+))(?=[` ])"
    found = {(page, "".join(names)) for page in PAGES for names in re.findall(pattern, page.read_text())}
    assert len(found) > 10
    assert [(page.name, name) for page, name in found if name not in packaged.names()] == []


# ---------------------------------------------------------------------- commands


def code_lines(path: Path) -> Iterator[str]:
    """Fenced and indented code of a page, or the comments of a settings file, with continued lines joined."""
    text = path.read_text()
    if path.suffix == ".yaml":
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        yield from re.sub(r"\\\n\s*", " ", text).splitlines()
        return
    for block in FENCE.findall(text):
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()
    yield from re.findall(r"^ {4}(\S.*)$", prose(text), re.MULTILINE)


def mentions(path: Path) -> list[str]:
    """Commands inside sentences, which may leave out what does not matter there."""
    return re.findall(r"`(realvr [^`]*)`", prose(path.read_text())) if path.suffix == ".md" else []


def commands(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """(verb, arguments) of every `realvr VERB …`, also behind a launcher."""
    for line in lines:
        found = re.match(r"(?:\$ )?(?:.*-m )?realvr +([a-z-].*)", line.strip())
        if not found or "error:" in line:
            continue
        words = [word for word in shlex.split(found[1], comments=True) if word not in ("…", "...")]
        verb = " ".join(words[:2]) if words[0] in GROUPS else words[0]
        if not verb.startswith("-") and verb not in GROUPS:
            yield verb, words[len(verb.split()) :]


def parse(verb: str, args: list[str]) -> None:
    """As the command line would, without doing anything."""
    import tyro

    command = COMMANDS[verb]
    if "--plugin" in args:  # taken off before a verb sees its arguments; the file is the reader's
        place = args.index("--plugin")
        args = args[:place] + args[place + 2 :]
    if verb == "diagnose":
        if is_suite(args):
            tyro.cli(SuiteCommand, args=as_suite(args)).suite().diagnostics()
        elif args:
            kind = (
                DIAGNOSTICS.get(args[0]) if args[0] in DIAGNOSTICS else load_file(TOYS / "toy_diagnostic.py").SpanNorm
            )
            tyro.cli(options_of(kind), args=as_settings(kind, args[1:]))
        return
    if command.raw:
        _, (config, *rest) = train.processes(args)
        flags = [arg.replace("--resume", "--checkpoint.resume") for arg in rest if arg not in train.SWITCHES]
        kind = verb.split()[1]
        # A file of the reader's own stands for any: the example for one's own data knows every setting as well.
        load_settings(kind, config if "/" in config else {"base": "mini/base"}.get(kind, f"own/{kind}"), flags)
        return
    module = importlib.import_module(command.module)
    function = getattr(module, command.function)
    args = getattr(module, command.rewrite)(args) if command.rewrite else args
    settings = settings_type(function)
    tyro.cli(settings or functools.wraps(function)(lambda *args, **kwargs: 0), args=args)


@functools.cache
def options(verb: str) -> set[str]:
    """Names of the options in the help of a command; not those in its examples."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*verb.split(), *(["MODEL"] if verb == "diagnose" else []), "--help"])
    lines = re.findall(r"^[│ ]*(--?[a-z].*)$", text.getvalue(), re.MULTILINE)
    return {name for line in lines for name in re.findall(r"--[\w.-]+", line)}


@pytest.mark.parametrize("path", PAGES + CONFIGS, ids=lambda path: "/".join(path.relative_to(ROOT).parts[-2:]))
def test_commands_can_be_given(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, args in commands(code_lines(path)):
        assert verb in COMMANDS, f"{path.name}: realvr {verb} is not a command"
        if "--help" in args or "CONFIG" in args or any(re.search(r"\.py:\w+$", arg) for arg in args):
            continue  # a file that a page writes is run with its commands: tests/test_tutorials.py
        try:
            parse(verb, args)
        except (SystemExit, UserError) as error:
            out = capsys.readouterr()
            pytest.fail(f"{path.name}: realvr {verb} {' '.join(args)}: {error} {out.err}{out.out}")


@page
def test_commands_in_sentences_have_names_that_exist(page: Path) -> None:
    for verb, args in commands(mentions(page)):
        assert verb in COMMANDS, f"{page.name}: realvr {verb} is not a command"
        for name in [arg.partition("=")[0] for arg in args if arg.startswith("--")]:
            assert name in options(verb), f"{page.name}: realvr {verb} has no {name}"


def test_the_check_notices_what_is_wrong(tmp_path: Path) -> None:
    text = "```\nrealvr evaluate x\nrealvr eval m --bnch a=b --out o\nrealvr train rl my.yaml --optim.lrate 1\n```\n"
    (tmp_path / "page.md").write_text(text)
    first, second, third = commands(code_lines(tmp_path / "page.md"))
    assert first[0] not in COMMANDS
    with pytest.raises(SystemExit):
        parse(*second)
    with pytest.raises((SystemExit, UserError)):
        parse(*third)
    assert "--policy" in options("score") and "--polcy" not in options("score")


def test_enough_is_checked() -> None:
    found = [verb for path in PAGES for verb, _ in commands(code_lines(path))]
    assert len(found) > 50
    assert set(COMMANDS) <= set(found), "every command stands in the documentation"


def test_no_torch_was_needed() -> None:
    code = "import sys; import realvr.training.configuration, realvr.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
