"""The mathematics needs torch, numpy and the standard library, the answers not even torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import realvr.maths

PACKAGE = Path(realvr.maths.__file__).parent
MODULES = sorted(f"realvr.maths.{path.stem}" for path in PACKAGE.glob("*.py") if path.stem != "__init__")

# Torch loads packages of its own, so it comes first: what counts is what our files ask for and what they add.
PROBE = """
import builtins, importlib, json, sys
source, modules, preload = json.loads(sys.argv[1])
sys.path.insert(0, source)
for name in preload:
    importlib.import_module(name)
before, asked, original = set(sys.modules), set(), builtins.__import__

def spy(name, globals=None, locals=None, fromlist=(), level=0):
    if (globals or {}).get("__name__", "").startswith("realvr"):
        asked.add(name)
    return original(name, globals, locals, fromlist, level)

builtins.__import__ = spy
for name in modules:
    importlib.import_module(name)
print(json.dumps([sorted(asked), sorted(set(sys.modules) - before)]))
"""


def imports(modules: list[str], preload: list[str]) -> tuple[set[str], set[str]]:
    """What our files import and what becomes loaded through them, in a fresh interpreter."""
    argument = json.dumps([str(PACKAGE.parent.parent), modules, preload])
    run = subprocess.run([sys.executable, "-c", PROBE, argument], capture_output=True, text=True, check=True)
    asked, added = json.loads(run.stdout)
    return set(asked), set(added)


PARENT = {"realvr", "realvr.lazy"}
"""The package itself, which every import of ours passes through, and the table of its names."""


def foreign(names: set[str], *allowed: str) -> set[str]:
    """Names that are neither of the standard library, nor of this package, nor allowed."""
    known, own = {*sys.stdlib_module_names, *allowed}, ("realvr.maths.", "realvr.answers.")
    return {n for n in names if n.partition(".")[0] not in known and not f"{n}.".startswith(own)} - PARENT


def test_the_list_of_modules_is_complete() -> None:
    assert {"credit", "evidence", "grpo", "reconstruction"} <= {m.rpartition(".")[2] for m in MODULES}


def test_only_torch_numpy_and_the_standard_library() -> None:
    asked, added = imports(MODULES, preload=["torch", "numpy"])
    assert "torch" in asked  # the spy works
    assert not foreign(asked, "torch", "numpy")
    assert not foreign(added, "torch", "numpy")


def test_answers_need_no_torch() -> None:
    asked, added = imports(["realvr.answers"], preload=[])
    assert "re" in asked
    assert not foreign(asked, "realvr") and not foreign(added, "realvr")
    own = {name for name in asked | added if name.startswith("realvr.")} - PARENT
    assert all(name.startswith(("realvr.answers", "realvr.errors")) for name in own)


def test_the_check_would_notice_a_foreign_package() -> None:
    asked, _ = imports(["realvr.imaging.processing"], preload=["torch"])
    assert foreign(asked, "torch")


def test_the_old_home_of_the_answers_still_works() -> None:
    from realvr.maths import answers

    with pytest.deprecated_call(match="realvr.answers"):
        assert answers.parse("so <answer>B</answer>", ["red", "blue"]) == "B"
    with pytest.raises(AttributeError):
        answers.nothing  # noqa: B018


def test_names_of_the_latent_span_still_work() -> None:
    from realvr import latent
    from realvr.latent.span import decoder_pass

    assert callable(latent.rollout) and callable(latent.trajectory) and callable(latent.think)
    with pytest.deprecated_call(match="decoder_pass"):
        assert latent.advance is decoder_pass
