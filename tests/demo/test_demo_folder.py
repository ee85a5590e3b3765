"""Whose folder it is, what is refused before any work, and what the numbers are said to mean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realvr import models
from realvr.demo import files
from realvr.demo.choice import choice, filled
from realvr.demo.leading import Words
from realvr.demo.plan import ARMS, DemoSettings, quick_settings, steps_of
from realvr.demo.steps import samples_of, training_settings
from realvr.demo.words import notes
from realvr.diagnostics import DIAGNOSTICS, DiagnoseSettings
from realvr.errors import UserError
from realvr.training.configuration import KINDS


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints of which only the bytes matter here."""
    for name in models.NAMES:
        folder = tmp_path / "installed" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(name.encode())
    monkeypatch.setattr(models, "_HOME", tmp_path / "installed")
    return tmp_path / "installed"


def test_settings_come_back_and_others_are_refused_by_name(tmp_path: Path, installed: Path) -> None:
    out, settings = tmp_path / "demo", quick_settings(3)
    for _ in range(2):
        with files.open_demo_folder(out, settings):
            assert files.read_settings(out) == settings
    before = (out / files.SETTINGS).read_bytes()
    with (
        pytest.raises(UserError, match="rl_steps was 4, now 9"),
        files.open_demo_folder(out, settings.replaced(rl_steps=9)),
    ):
        pass
    (installed / "mini" / "model.safetensors").write_bytes(b"another")
    with pytest.raises(UserError, match="the weights of mini differ"), files.open_demo_folder(out, settings):
        pass
    assert (out / files.SETTINGS).read_bytes() == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("important")
    with (
        pytest.raises(UserError, match="not empty and holds no demo"),
        files.open_demo_folder(tmp_path / "mine", quick_settings()),
    ):
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    file = tmp_path / "mine" / "thesis.txt"
    with pytest.raises(UserError, match="is a file"), files.open_demo_folder(file, quick_settings()):
        pass


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="cannot be made or written"),
        files.open_demo_folder(Path("/proc/demo"), quick_settings()),
    ):
        pass
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o555)
        inside = tmp_path / "locked" / "demo"
        with pytest.raises(UserError, match="cannot be"), files.open_demo_folder(inside, quick_settings()):
            pass


def test_a_missing_package_is_named_with_its_extra_before_any_work(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['accelerate'] = None\n"
        "from realvr.cli import main\n"
        f"sys.exit(main(['demo', '--quick', '--out', {str(tmp_path / 'demo')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "accelerate" in done.stderr and "realvr[train]" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "demo").exists()


@pytest.mark.parametrize("settings", [DemoSettings(), quick_settings()])
def test_steps_need_only_steps_that_exist_and_come_before(settings: DemoSettings) -> None:
    seen: set[str] = set()
    for step in steps_of(settings):
        assert seen.issuperset(step.needs) and step.name not in seen and step.cost > 0
        seen.add(step.name)


@pytest.mark.parametrize("settings", [DemoSettings(), quick_settings()])
def test_the_data_file_chooses_what_there_is(settings: DemoSettings) -> None:
    """Names that no registry knows, or settings that they refuse, would only fail minutes into a demo."""
    chosen, numbers = choice(), settings.numbers | {"seed": settings.seed}
    for name, one in chosen.diagnostics.items():
        DIAGNOSTICS.get(name).configure(filled(one.settings, numbers))
        DiagnoseSettings("model", samples_of(one.data), "out", **filled(one.run, numbers)).check()
        assert all(beside in DIAGNOSTICS for beside in one.beside) and chosen.split(one.data)
    for step in steps_of(settings):
        if step.training is not None:
            command = chosen.recipes[step.training.recipe].command
            KINDS[command].model_validate(training_settings(step, settings))
    names = {arm.name for arm in ARMS}
    shown = {name for table in chosen.tables for name in table.arms}
    compared = {name for comparison in chosen.comparisons for pair in comparison.pairs for name in pair}
    assert len(names) == len(ARMS) and compared | shown <= names
    assert {name for arm in ARMS for name in arm.diagnostics} <= set(chosen.diagnostics)
    assert set(chosen.parts) | {one.bench for one in chosen.comparisons if one.bench} <= set(
        chosen.evaluation.benchmarks
    )
    assert all(one.group in chosen.parts[one.bench].groups for one in chosen.comparisons if one.group)


def _effect(ci: list[float], readable: list[float] | None = None, read: float = 98.0) -> dict[str, Any]:
    return {"points": 0.0, "ci": ci, "read": read, "readable": {"points": 0.0, "ci": readable or ci}}


def _arm(other: dict[str, Any], latents: int = 8) -> dict[str, Any]:
    flips = {"separate": {"rate": 0.5}}
    return {
        "latents": latents,
        "five_task_mean": {"coverage": 99.0},
        "help": _effect([-1.0, 1.0]),
        "dependence_other": other,
        "dependence_noise": _effect([-1.0, 1.0]),
        "strict_correct_flip": flips,
    }


def _difference(second: str, gain: float, ci: list[float], over: str = "mini five-task mean") -> dict[str, Any]:
    return {"over": over, "second": second, "first": "Direct", "gain": gain, "difference": gain, "ci": ci}


def test_notes_tell_noise_from_more_than_noise() -> None:
    unmeasured: dict[str, Any] = {"help": None, "dependence_other": None, "dependence_noise": None}
    arms = {
        "Direct": _arm(_effect([0.0, 0.0]), latents=0)
        | unmeasured
        | {"strict_correct_flip": {"separate": {"rate": 0.754}}},
        "Broken": _arm(_effect([5.0, 20.0], [-1.0, 1.0], read=60.0)),
        "Deaf": _arm(_effect([-1.0, 1.0])),
        "Follows": _arm(_effect([5.0, 20.0])),
        "Not asked": _arm(_effect([0.0, 0.0])) | unmeasured | {"strict_correct_flip": None},
    }
    differences = {
        "first": _difference("Follows", -4.0, [-6.0, -2.0]),
        "second": _difference("Deaf", 0.5, [-1.0, 2.0]),
        "zero": _difference("Broken", -0.04, [-1.0, 0.0]),
        "third": _difference("Follows", 20.0, [10.0, 30.0], "long trails"),
    }
    said = "\n".join(notes(DemoSettings(), arms, differences))
    assert (
        "Mini five-task mean, within noise (the 95 % interval holds 0): Deaf minus Direct +0.5 [-1.0, +2.0]; " in said
    )
    assert "; Broken minus Direct +0.0 [-1.0, +0.0]." in said
    assert "Mini five-task mean, beyond the noise of these questions: Follows minus Direct -4.0 [-6.0, -2.0]." in said
    assert "Long trails, beyond the noise of these questions: Follows minus Direct +20.0 [+10.0, +30.0]." in said
    assert "Long trails, within" not in said
    assert "conversations of their own: Direct 75.4, Broken 50.0, Deaf 50.0, Follows 50.0 %." in said
    # Answers that only lose their format are no evidence of use, however many points that costs.
    assert "- Broken, Deaf: on the mini-benchmarks neither the latents" in "- " + said.replace("\n", "\n- ")
    assert "Replies lose their format: Broken with another's latents (60 % read, 99 % own)." in said
    assert "mean nothing" not in said and "mean nothing" in "\n".join(notes(quick_settings(), arms, differences))


def test_templates_of_the_first_lines_show_shares_intervals_and_what_is_missing() -> None:
    found = {
        "walk": {"own": {"rate": 0.971, "ci": [0.95, 0.982]}, "odd": {"gain": 12.3, "ci": [-1.0, 25.4]}, "no": None}
    }

    def said(text: str) -> str:
        return Words().vformat(text, (), found)

    assert said("in {walk[own][rate]:%} {walk[own][ci]:ci%}") == "in 97 % [95, 98]"
    assert (
        said("{walk[odd][gain]:+.1f} {walk[odd][ci]:ci}, low end {walk[odd][ci][0]:.1f}")
        == "+12.3 [-1, 25], low end -1.0"
    )
    assert said("{walk[no][rate]:%} {walk[no][ci]:ci%} {walk[no][n]}") == "– – –"
    with pytest.raises(KeyError):
        said("{walk[another][rate]}")


def test_progress_counts_whole_lines_of_all_journals(tmp_path: Path) -> None:
    step = next(step for step in steps_of(quick_settings()) if step.name == "stage-1-counterfactual")
    assert files.progress(tmp_path, step) == 0
    for journal, text in zip(step.journals, ("{}\n{}\n", '{}\n{"half'), strict=True):
        (tmp_path / journal).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / journal).write_text(text)
    assert files.progress(tmp_path, step) == 3
