"""The wheel, installed into an environment of its own and used from a folder that is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from realvr.training import packaged

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "realvr"


def call(*words: object, cwd: Path, timeout: int = 300) -> str:
    """What a command prints on both streams; neither this checkout nor the network is there for it."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "REALVR", "VIRTUAL"))
    }
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=outside | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "150"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building writes beside the sources."""
    copy = tmp_path_factory.mktemp("source") / "realvr"
    shutil.copytree(SOURCE, copy / "src" / "realvr", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, copy, cwd=out)
    (built,) = out.glob("realvr-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment that holds the wheel. Its other packages are those of this one: to
    install torch again would take the network and minutes."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    call(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home.parent)
    (own,) = (home / "lib").glob("python*/site-packages")
    # As a plain folder on the path: the .pth files in it, with it the way to this checkout, are not read.
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("realvr/")}
    there = {
        str(path.relative_to(SOURCE.parent))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there
    assert "realvr/py.typed" in packed and "realvr/configs/own/rl.yaml" in packed


@pytest.mark.slow
def test_settings_are_found_by_name_outside_a_checkout(installed: Path, tmp_path: Path) -> None:
    where = call(installed / "python", "-c", "import realvr; print(realvr.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    realvr = installed / "realvr"
    call(realvr, "world", "make", "world", "--split", "train-boxes", "--size", "48", "--count", "40", cwd=tmp_path)
    data = "world/train-boxes/samples.jsonl"
    small = ["--model.path", "mini", "--model.dtype", "float32", "--data.sources.0.path", data]
    told = call(realvr, "train", "rl", "own/rl", *small, "--dry-run", cwd=tmp_path)
    assert "type: realvr" in told and "group: 8" in told and not (tmp_path / "runs").exists()
    listed = call(realvr, "train", "rl", "--help", cwd=tmp_path)
    assert all(name in listed for name in packaged.names("rl"))


@pytest.mark.slow
def test_the_quick_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    call(installed / "realvr", "demo", "--quick", "--out", "demo", cwd=tmp_path)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary and (tmp_path / "demo" / "report" / "index.html").is_file()
