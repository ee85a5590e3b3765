"""Weights that were changed after they were saved: a resumed run refuses them, a plain load prints a notice."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from realvr.backbone import Backbone
from realvr.cli import main
from realvr.errors import UserError
from realvr.runs.hashes import changed_weights
from realvr.training import loop
from stage_runs import configure, lines, make, run


def flip(path: Path, place: int = -5) -> None:
    """Change one bit of a file. In the middle or near the end of a safetensors file lie values, which stay readable."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def half(plain: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint after each; the third is still to come."""
    out = tmp_path_factory.mktemp("half") / "run"
    run("sft", configure("sft", plain, data, out, optim={"steps": 2}, checkpoint={"every": 1, "keep": 2}))
    return out


def resume(half: Path, plain: Path, data: Path, out: Path) -> int:
    raw = configure("sft", plain, data, out, optim={"steps": 3}, checkpoint={"every": 1, "keep": 2})
    return loop.train(*make("sft", raw))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rank-0.safetensors", "rank-0.json"])
def test_a_run_does_not_continue_from_a_changed_file(
    name: str, half: Path, plain: Path, data: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(half, tmp_path / "run")
    newest = out / "checkpoints" / "step-000002"
    if name.endswith(".json"):  # still JSON, another number
        state = json.loads((newest / name).read_text())
        state["task"]["rejected"] = {"too_long": 3}
        (newest / name).write_text(json.dumps(state))
    else:
        flip(newest / name)
    with pytest.raises(UserError, match=f"step-000002: {name} is not the file that was saved") as caught:
        resume(half, plain, data, out)
    assert "Remove the folder to go back one" in str(caught.value) and "\n" not in str(caught.value)
    shutil.rmtree(newest)
    assert resume(half, plain, data, out) == 0 and [line["step"] for line in lines(out)] == [1, 2, 3]


def test_files_of_two_checkpoints_do_not_mix(half: Path, plain: Path, data: Path, tmp_path: Path) -> None:
    out = shutil.copytree(half, tmp_path / "run")
    first, second = (out / "checkpoints" / f"step-00000{n}" for n in (1, 2))
    shutil.copy(first / "model.safetensors", second / "model.safetensors")
    with pytest.raises(UserError, match="step-000002: model.safetensors is not the file that was saved"):
        resume(half, plain, data, out)


def test_checkpoints_written_without_hashes_still_resume(half: Path, plain: Path, data: Path, tmp_path: Path) -> None:
    out = shutil.copytree(half, tmp_path / "run")
    record = out / "checkpoints" / "step-000002" / "run.json"
    known = json.loads(record.read_text())
    files = {path.name: path.read_bytes() for path in record.parent.iterdir() if path != record}
    assert known.pop("sha256") == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    record.write_text(json.dumps(known))
    assert resume(half, plain, data, out) == 0


def test_a_saved_model_tells_when_its_weights_were_changed(half: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(half / "final", tmp_path / "model")
    listed = subprocess.run(["sha256sum", "-c", "weights.sha256"], cwd=folder, capture_output=True, text=True)
    assert listed.returncode == 0 and listed.stdout.count("OK") == len(list(folder.glob("*.safetensors"))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Backbone.load(folder, device="cpu")
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)
    with pytest.warns(UserWarning, match=r"model.safetensors is not the file that was saved .* remove weights.sha256"):
        Backbone.load(folder, device="cpu")
    shutil.copy(half / "final" / "model.safetensors", folder)
    save_file({"w": torch.ones(1)}, folder / "model-2.safetensors")
    with pytest.warns(UserWarning, match="model-2.safetensors was not there when it was saved"):
        Backbone.load(folder, device="cpu")


def test_edited_weights_load_with_a_note_until_the_hashes_are_removed(
    half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(half / "final", tmp_path / "model")
    edited = {name: value * 1.01 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(edited, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["ask", str(folder), "What?", "--max-new", "1", "--device", "cpu"]) == 0
    assert f"realvr: note: {folder}: model.safetensors is not the file" in capsys.readouterr().err
    (folder / "weights.sha256").unlink()
    assert main(["ask", str(folder), "What?", "--max-new", "1", "--device", "cpu"]) == 0
    assert "realvr: note" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "where"), [("", ""), ("\n\n", ""), ("{good}\n# my notes\n", ", line 2,"), ("\0\n", ", line 1,")]
)
def test_a_list_of_hashes_that_cannot_be_read_says_nothing_about_the_weights(
    text: str, where: str, half: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(half / "final", tmp_path / "model")
    good = (folder / "weights.sha256").read_text().strip()
    (folder / "weights.sha256").write_text(text.replace("{good}", good))
    message = changed_weights(folder)
    assert message is not None and message.startswith(f"{folder / 'weights.sha256'}{where} holds no SHA-256 hash")
    assert "changed" not in message


@pytest.mark.parametrize("option", ["--text", "--binary"])
def test_both_formats_of_sha256sum_are_read(option: str, half: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(half / "final", tmp_path / "model")
    names = [path.name for path in folder.glob("*.safetensors")]
    made = subprocess.run(["sha256sum", option, *names], cwd=folder, capture_output=True, text=True, check=True)
    (folder / "weights.sha256").write_text(made.stdout + "\n")
    assert changed_weights(folder) is None
    flip(folder / names[0], (folder / names[0]).stat().st_size // 2)
    assert "is not the file that was saved" in str(changed_weights(folder))
