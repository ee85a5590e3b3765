"""``realvr push`` to a hub on this machine, and the same model back from it."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants
from PIL import Image

from hub_standin import Hub, client
from realvr.cli import main
from realvr.models import locate
from realvr.runs.hashes import fingerprint, record_weights
from realvr.training.card import card

MINI = Path(locate("mini"))
SIZE = (MINI / "model.safetensors").stat().st_size


def copy(folder: Path, *left_out: str) -> Path:
    """The packaged model in a folder of ours, without some files."""
    folder.mkdir(parents=True)
    for file in MINI.iterdir():
        if file.name not in left_out:
            shutil.copyfile(file, folder / file.name)
    return folder


def on_disk(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != "README.md"}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("realvr: error: ")
    return line


def test_a_run_with_its_card_arrives_whole(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    final = copy(run / "final")
    (run / "settings.yaml").write_text("{}")
    (final / ".part").write_text("hidden")
    text = card("run", str(tmp_path / "base"), str(final), "steps: 3", {"loss": 0.5}, ["realvr", "sft"])
    (final / "README.md").write_text(text)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("<p>")
    assert main(["push", str(run), "tester/mini", "--private", "--also", str(tmp_path / "report")]) == 0
    assert f"{hub.url}/tester/mini/commit/" in capsys.readouterr().out
    found = hub.files("model", "tester/mini")
    assert without_card(found) == {**on_disk(MINI), "report/index.html": b"<p>"}
    assert hub.repos["model", "tester/mini"].private
    shown = ModelCard(found["README.md"].decode())
    assert shown.data.to_dict() == {"library_name": "transformers", "tags": ["realvr", "sft"]}  # a base not on the hub
    assert "realvr ask tester/mini picture.png" in shown.text
    assert re.search(r"Backbone\.load\(['\"]tester/mini['\"]\)", shown.text)
    assert str(final) not in shown.content and "| loss | 0.5 |" in shown.text and "steps: 3" in shown.text
    assert [method for method, path in hub.asked if path.startswith("/lfs/")].count("PUT") >= 1  # weights are large


def latents_of(folder: Path, weights: Path) -> Path:
    """What `realvr diagnose --card` leaves, as far as it goes to the hub."""
    folder.mkdir(parents=True)
    facts = f"|  |  |\n| --- | --- |\n| fingerprint of the weights | {fingerprint(weights)} |"
    text = (
        f"# Latents\n\n**Verdict:** unused: 0.0 %.\n\n{facts}\n\n![a](walk.svg)\n\n![b](gone.svg)\n\n![c](../x.svg)\n"
    )
    (folder / "card.md").write_text(text)
    (folder / "card.html").write_text("<p>")
    (folder / "walk.svg").write_text("<svg/>")
    (folder / "walk.jsonl").write_text("records stay here")
    return folder


def test_the_card_of_the_latents_goes_along(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    final = copy(run / "final", "README.md")
    latents_of(run / "diagnose", final)
    assert main(["push", str(run), "tester/mini"]) == 0
    found = hub.files("model", "tester/mini")
    assert {name for name in found if "/" in name} == {"diagnose/card.html", "diagnose/card.md", "diagnose/walk.svg"}
    text = found["README.md"].decode()
    assert "**Verdict:** unused: 0.0 %." in text and "[Card of the latents](diagnose/card.md)" in text
    other = latents_of(tmp_path / "other", MINI.parent / "mini-short")
    capsys.readouterr()
    assert main(["push", str(run), "tester/mini", "--latents", str(other), "--dry-run"]) == 2
    assert "is the card of other weights than those of" in one_line(capsys)
    shutil.rmtree(run / "diagnose")
    other.rename(run / "diagnose")
    assert main(["push", str(run), "tester/mini", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "is the card of other weights" in said.err and "card.md" not in said.out
    assert main(["push", str(run), "tester/mini", "--latents", str(tmp_path), "--dry-run"]) == 2
    assert "no card in it; realvr diagnose MODEL" in one_line(capsys)


def test_a_second_push_replaces_the_model_and_a_branch_leaves_it(hub: Hub, tmp_path: Path) -> None:
    hub.add("model", "tester/mini", {"model-00001-of-00002.safetensors": b"old", "notes.md": b"kept", "README.md": b""})
    assert main(["push", "mini", "tester/mini", "--revision", "next"]) == 0
    assert hub.files("model", "tester/mini")["model-00001-of-00002.safetensors"] == b"old"
    assert without_card(hub.files("model", "tester/mini", "next")) == {**on_disk(MINI), "notes.md": b"kept"}
    folder = copy(tmp_path / "model", "README.md")
    assert main(["push", str(folder), "tester/mini"]) == 0
    assert without_card(hub.files("model", "tester/mini")) == {**on_disk(MINI), "notes.md": b"kept"}
    assert "# mini" in hub.files("model", "tester/mini")["README.md"].decode()


def test_a_dry_run_needs_no_network_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hub: Hub
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", "mini", "tester/mini", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        all(file.name in out for file in MINI.iterdir())
        and f"dry run: {len(list(MINI.iterdir()))} files would be uploaded" in out
    )
    assert not hub.asked


def cut(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def changed(folder: Path) -> None:
    record_weights(folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def lost_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder: Path) -> None:
    (folder / "extra").write_bytes(pickle.dumps({"a": 1}))


def torch_file(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"PK")


def lost(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, f"model.safetensors is incomplete: it has {SIZE // 2:,} bytes of {SIZE:,}"),
        (changed, "is not the file that was saved"),
        (lost_shard, "is incomplete: model.safetensors.index.json lists model-00002-of-00002.safetensors"),
        (lost("model.safetensors"), "has no weights"),
        (lost("tokenizer.json"), "has no tokenizer files"),
        (lost("config.json"), "has no config.json: it is neither a model folder nor a run"),
        (pickled, "extra is, or may hold, a pickle"),
        (torch_file, "optimizer.pt is, or may hold, a pickle"),
    ],
)
def test_what_others_could_not_load_is_refused(
    damage: Callable[[Path], None], says: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copy(tmp_path / "model"))
    assert main(["push", str(tmp_path / "model"), "tester/mini"]) == 2
    assert says in one_line(capsys) and not hub.asked


def test_names_that_are_no_model(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "run" / "settings.yaml").write_text("{}")
    (tmp_path / "run" / "checkpoints" / "step-1" / "rank-0.json").write_text("{}")
    for model, says in {
        "run": "has no final model yet: the run is not finished",
        "run/checkpoints/step-1": "a checkpoint of a run is its state, not a model: name the run",
        "absent": "is no folder here",
    }.items():
        assert main(["push", str(tmp_path / model), "tester/mini"]) == 2
        assert says in one_line(capsys)
    assert main(["push", "mini", "mini"]) == 2 and "write OWNER/NAME" in one_line(capsys)
    assert main(["push", "mini", "tester/mini", "--also", str(tmp_path / "absent")]) == 2
    assert "--also" in one_line(capsys)


def test_what_the_hub_refuses_is_one_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", "mini", "somebody/mini"]) == 2
    line = one_line(capsys)
    assert "somebody/mini: the hub refuses (403: " in line and "use one with write access" in line
    hub.add("model", "tester/open", {"README.md": b""})
    assert main(["push", "mini", "tester/open", "--private"]) == 2
    assert "tester/open exists and is public" in one_line(capsys)
    assert list(hub.files("model", "tester/open")) == ["README.md"]
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    assert main(["push", "mini", "tester/mini"]) == 2
    assert "the hub refuses (401: " in one_line(capsys)
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", "mini", "tester/mini"]) == 2
    assert "uploading needs a token of the hub: run `hf auth login`, or set HF_TOKEN" in one_line(capsys)
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["push", "mini", "tester/mini"]) == 2
    assert "tester/mini: the hub cannot be reached" in one_line(capsys)


BACK = """
import sys
import torch
from transformers import AutoModelForImageTextToText
load = AutoModelForImageTextToText.from_pretrained
pulled, local = load("tester/mini").state_dict(), load(sys.argv[1]).state_dict()
assert pulled.keys() == local.keys() and len(local) > 10
assert all(torch.equal(pulled[name], local[name]) for name in local)
"""
"""Stock transformers only."""


@pytest.mark.slow
def test_the_model_comes_back_with_the_same_weights_and_answers(hub: Hub, tmp_path: Path) -> None:
    assert main(["push", "mini", "tester/mini", "--private"]) == 0
    Image.effect_noise((48, 48), 60).convert("RGB").save(tmp_path / "a.png")
    environment = os.environ | client(hub, tmp_path / "home") | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(MINI.parents[2]), os.environ.get("PYTHONPATH", "")])

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], env=environment | more, text=True, capture_output=True)

    def ask(model: str, **more: str) -> dict[str, Any]:
        asked = (model, str(tmp_path / "a.png"), "Which colour?", "--json", "--dtype", "float32")
        done = run("-m", "realvr", "ask", *asked, **more)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    pulled, local = ask("tester/mini"), ask("mini")
    assert {k: v for k, v in pulled.items() if k not in ("seconds", "model")} == {
        k: v for k, v in local.items() if k not in ("seconds", "model")
    }
    done = run("-c", BACK, str(MINI))
    assert done.returncode == 0, done.stderr
    absent = run("-m", "realvr", "ask", "tester/mini", "Which?", HF_HOME=str(tmp_path / "other"), HF_TOKEN="")
    assert absent.returncode == 2 and len(absent.stderr.splitlines()) == 1, absent.stderr
