"""What a finished run says about itself, and where its completions end."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import stage_runs
from realvr import models
from realvr.training.card import base_model
from realvr.training.method import METHODS
from stage_runs import configure


def front(card: Path) -> dict[str, Any]:
    return yaml.safe_load(card.read_text().split("---")[1])


def test_cards_name_the_released_model_through_both_stages(
    stage_one: Path, plain: Path, data: Path, tmp_path: Path
) -> None:
    assert front(stage_one / "final/README.md")["base_model"] == str(plain)
    stage_runs.run("rl", configure("rl", stage_one / "final", data, tmp_path / "rl"))
    found = front(tmp_path / "rl/final/README.md")
    assert found == {"library_name": "transformers", "base_model": str(plain), "tags": ["realvr", "rl"]}


def test_a_card_of_somebody_else_names_nothing(tmp_path: Path) -> None:
    assert base_model("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert base_model("mini") == "mini"
    for text in ("", "# A model\n", "---\nbase_model: Qwen/Qwen2.5-VL-7B\ntags: [vision]\n---\n", "---\n[\n---\n"):
        (tmp_path / "README.md").write_text(text)
        assert base_model(str(tmp_path)) == str(tmp_path)  # the base of a released model is not ours
    (tmp_path / "README.md").write_text("---\nbase_model: org/name\ntags: [realvr, sft]\n---\n")
    assert base_model(str(tmp_path)) == "org/name"


def run_snippet(card: Path) -> str:
    """Run the Python of a card as it stands there, beside a picture; what it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.S)
    Image.new("RGB", (64, 64), (200, 30, 30)).save("picture.png")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(card), "exec"), {})
    return said.getvalue()


def test_the_snippet_of_a_card_answers(stage_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    card = stage_one / "final/README.md"
    assert f"realvr ask {stage_one / 'final'} picture.png" in card.read_text()
    assert run_snippet(card).strip()


def test_packaged_cards_have_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(models.__file__).parent
    if not (home / "mini" / "config.json").is_file():
        pytest.skip("the packaged checkpoints are not in this checkout")
    monkeypatch.chdir(tmp_path)
    assert front(home / "mini/README.md")["base_model"] == "mini-base"
    assert "no base model" in (home / "mini-base/README.md").read_text()  # trained from nothing
    for name in models.NAMES:
        shutil.copy(home / name / "README.md", tmp_path / f"{name}.md")
        assert run_snippet(tmp_path / f"{name}.md").strip()


def test_completions_end_with_their_answer_unless_told_otherwise(trained: Path, data: Path, tmp_path: Path) -> None:
    shares = {}
    for stop in (True, False):
        raw = configure("rl", trained, data, tmp_path / str(stop), stop_at_answer=stop, max_new=24, temperature=0.3)
        (step,) = stage_runs.run("rl", raw)
        shares[stop] = step["completions/ended_by_stop"], step["completions/tokens"]
    assert shares[True][0] > 0.5 and shares[False][0] == 0
    assert shares[False][1] > shares[True][1]  # the end token, or more
    assert METHODS.get("realvr").Config.model_fields["stop_at_answer"].default is True
