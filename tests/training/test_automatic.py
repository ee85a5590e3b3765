"""Settings that are ``auto`` in a run: what it trains with, says and records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from realvr.backbone.automatic import TITLES, Where
from realvr.errors import UserError
from realvr.training.configuration import load_settings, save_resolved
from realvr.training.dry_run import dry_run
from realvr.training.engine import engine_settings, start_engine
from realvr.training.estimate.batches import workload_of
from realvr.training.methods.lvr_sft import LvrSftConfig
from realvr.training.methods.realvr import ReaLVRConfig
from realvr.training.sections import LoraSettings, ModelSettings
from stage_runs import configure, lines, make, numbers, run

OWN = {"sft": ("variable_length",), "rl": ("split_attention", "recorded_span")}
"""Settings of the method; those of all stages are in ``model``."""
SMALL: dict[str, Any] = {"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "run": {"out": "o"}}


def asked(kind: str, switch: Any) -> dict[str, Any]:
    """All of a stage, set to one value."""
    return {"model": {"fused_layers": switch}} | dict.fromkeys(OWN[kind], switch)


def values(out: Path) -> dict[str, Any]:
    """What the record of a run says of them."""
    recorded = yaml.safe_load((out / "settings.yaml").read_text())
    return {name: value for name, value in (recorded["model"] | recorded["method"]).items() if name in TITLES}


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` is on, as if this were a GPU."""
    monkeypatch.setattr(Where, "takes", lambda self, name: True)


# ---------------------------------------------------------------------- settings


WORDS = {
    "auto": "auto AUTO",
    True: "true True TRUE on On ON oN yes YES y t 1",
    False: "false False FALSE off Off OFF no NO n f 0",
}
"""In YAML some are booleans or numbers, others text."""


@pytest.mark.parametrize(("written", "value"), [(word, value) for value in WORDS for word in WORDS[value].split()])
@pytest.mark.parametrize("kind", OWN)
def test_a_file_and_a_command_line_say_the_same(kind: str, written: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    own = "".join(f"{name}: {written}\n" for name in OWN[kind])
    own += f"lora:\n  kernels: {written}\n"
    file.write_text(yaml.safe_dump(SMALL).replace("path: m", f"path: m\n  fused_layers: {written}") + own)
    settings: Any = load_settings(kind, file)
    assert [settings.model.fused_layers, *(getattr(settings.method, name) for name in OWN[kind])] == [
        value,
        *(value for _ in OWN[kind]),
    ]
    assert settings.lora.kernels == value and type(settings.lora.kernels) is type(value)
    assert load_settings(kind, save_resolved(settings, tmp_path / "saved.yaml")) == settings
    file.write_text(yaml.safe_dump(SMALL))
    flags = ["--model.fused-layers", written, *(each for name in OWN[kind] for each in (f"--{name}", written))]
    flags += ["--lora.kernels", written]
    assert load_settings(kind, file, flags) == settings
    assert load_settings(kind, file, [f"--model.fused_layers={written}", *flags[2:]]) == settings


def test_flags_alone_mean_yes_and_no(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    settings = load_settings("rl", file, ["--split-attention", "--method.no-recorded-span", "--model.fused-layers"])
    method: Any = settings.method
    assert (method.split_attention, method.recorded_span, settings.model.fused_layers) == (True, False, True)
    for flag, value in (("--lora.kernels", True), ("--lora.no-kernels", False)):  # as when it was true or false
        changed: Any = load_settings("rl", file, [flag, "--lora.rank", "4"])
        assert changed.lora.kernels is value and changed.lora.rank == 4


def test_auto_is_the_default() -> None:
    method = ReaLVRConfig(type="realvr")
    fused = ModelSettings(path="m").fused_layers
    kernels = LoraSettings().kernels
    assert {fused, method.split_attention, method.recorded_span, LvrSftConfig().variable_length, kernels} == {"auto"}


@pytest.mark.parametrize("value", ["quick", "2", "[true]", "null"])
def test_other_values_are_refused(value: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(SMALL) + f"split_attention: {value}\n")
    with pytest.raises(UserError, match=r"method.split_attention: write true, false or auto \(it is .*\)$"):
        load_settings("rl", file)
    file.write_text(yaml.safe_dump(SMALL))
    with pytest.raises(
        UserError, match=f"--method.split-attention is '{re.escape(value)}': true, false or auto is exp"
    ):
        load_settings("rl", file, ["--split-attention", value])


# ---------------------------------------------------------------------- runs


@pytest.mark.parametrize("kind", OWN)
def test_nothing_changes_on_a_cpu(
    kind: str, untrained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics, weights and records of a run with defaults and of one with all of them off, bit for bit."""
    made = {}
    for name, changes in (("default", {}), ("off", asked(kind, False))):
        raw = configure(kind, untrained, data, tmp_path / name, optim={"steps": 2}, **changes)
        made[name] = (numbers(run(kind, raw)), (tmp_path / name / "final/model.safetensors").read_bytes())
        assert "fast paths" not in capsys.readouterr().err
        assert values(tmp_path / name) == dict.fromkeys(("fused_layers", *OWN[kind]), False)
    assert made["default"] == made["off"]


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.filterwarnings("ignore:recorded span")  # which a CPU has none of
def test_a_run_says_and_records_what_was_chosen(
    kind: str, untrained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], everywhere: None
) -> None:
    """What ``auto`` has switched on is in force as if it had been asked for, and an earlier record without it, or with
    the setting off, goes on."""
    titles = ", ".join(TITLES[name] for name in TITLES if name in ("fused_layers", *OWN[kind]))
    made = {}
    for name, changes in (("default", {}), ("on", asked(kind, True))):
        raw = configure(kind, untrained, data, tmp_path / name, optim={"steps": 2}, **changes)
        made[name] = (numbers(run(kind, raw)), (tmp_path / name / "final/model.safetensors").read_bytes())
        said = capsys.readouterr().err
        assert said.count(f"fast paths: {titles}\n") == said.count("fast paths") == (name == "default")
        assert values(tmp_path / name) == dict.fromkeys(("fused_layers", *OWN[kind]), True)
    assert made["default"] == made["on"]
    task = make(kind, configure(kind, untrained, data, tmp_path / "task"))[0]
    assert task.backbone.fused_layers and all(getattr(task.config, name) is True for name in OWN[kind])


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize(
    ("lora", "recorded", "announced"),
    [
        ({"rank": 2}, True, True),
        ({"rank": 2, "dropout": 0.1}, False, False),  # rollouts alone would run them, and round differently
        ({"rank": 2, "kernels": True}, True, False),
        ({"rank": 2, "kernels": False}, False, False),
        ({}, False, False),  # no adapters
    ],
)
def test_kernels_of_adapters_are_said_and_recorded(
    lora: dict[str, Any],
    recorded: bool,
    announced: bool,
    kind: str,
    untrained: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    everywhere: None,
) -> None:
    settings: Any = make(kind, configure(kind, untrained, data, tmp_path, lora=lora))[1]
    assert settings.lora.kernels is recorded
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("fast paths: "))
    assert ("adapter kernels" in said) is announced


def test_layers_that_are_gathered_have_no_adapter_kernels_by_themselves(
    untrained: Path, data: Path, tmp_path: Path, everywhere: None
) -> None:
    """ZeRO-3 gathers the parts of a layer in hooks of their own, FSDP2 whole decoder layers."""
    for name, recorded in (("zero3", False), ("fsdp2", True)):
        engine = start_engine(cpu=True)
        engine.settings = engine_settings(name)
        settings: Any = make("rl", configure("rl", untrained, data, tmp_path, lora={"rank": 2}), engine)[1]
        assert settings.lora.kernels is recorded


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.filterwarnings("ignore:recorded span")
def test_runs_go_on_from_records_with_other_values(
    kind: str, untrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps, (switch, gpu) in enumerate(((False, False), ("auto", True), ("auto", False), (True, False)), 1):
        with monkeypatch.context() as changed:
            if gpu:
                changed.setattr(Where, "takes", lambda self, name: True)
            changes = {"optim": {"steps": steps, "lr": 1e-4}, "lora": {"kernels": switch}} | asked(kind, switch)
            run(kind, configure(kind, untrained, data, tmp_path, **changes))
        record = json.loads((tmp_path / f"checkpoints/step-{steps:06d}/run.json").read_text())["settings"]
        assert record["model"]["fused_layers"] is (gpu or switch is True)
    for name in OWN[kind]:  # written before there were such settings
        del record["method"][name]
    del record["lora"]["kernels"]
    file = tmp_path / f"checkpoints/step-{steps:06d}/run.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"settings": record}))
    run(kind, configure(kind, untrained, data, tmp_path, optim={"steps": steps + 1, "lr": 1e-4}))
    assert len(lines(tmp_path)) == steps + 1


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, True),
        ({"memory": "checkpointed"}, False),
        ({"method": "lvr-rl"}, False),
        ({"method": "off-policy"}, False),
        ({"lora": {"rank": 2, "dropout": 0.1}}, False),
        ({"lora": {"rank": 2}}, True),
        ({"lora": {"dropout": 0.1}}, True),
        ({"memory": "checkpointed", "recorded_span": True}, True),
    ],
)
def test_spans_that_could_not_be_recorded(
    changes: dict[str, Any], recorded: bool, untrained: Path, data: Path, tmp_path: Path, everywhere: None
) -> None:
    """``auto`` stands back; what is asked for stays, and a notice says why it does not apply."""
    task, settings, _ = make("rl", configure("rl", untrained, data, tmp_path, **changes))
    assert settings.method.recorded_span is recorded  # type: ignore[attr-defined]
    assert (task.recorded is not None) is recorded and task.config.split_attention is True


def test_images_that_attend_both_ways(
    build_tiny: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 keeps the mask of packed rows. That is news where something else was asked for."""
    monkeypatch.setattr(Where, "takes", lambda self, name: name != "variable_length" or self.packs)
    for switch, notices in (("auto", 0), (True, 1)):
        raw = configure("sft", build_tiny("gemma3"), data, tmp_path / str(switch), variable_length=switch)
        make("sft", raw)
        assert capsys.readouterr().err.count("keeps the mask of packed rows") == notices


def test_advice_names_what_is_on(untrained: Path, data: Path, tmp_path: Path, everywhere: None) -> None:
    on = make("rl", configure("rl", untrained, data, tmp_path))[1].method.memory_advice()
    assert "set method.recorded_span false" in on and "set method.split_attention true" not in on
    off = make("rl", configure("rl", untrained, data, tmp_path, recorded_span=False))[1].method.memory_advice()
    assert "set method.recorded_span false" not in off


@pytest.mark.filterwarnings("ignore:recorded span")
def test_a_dry_run_counts_what_was_chosen(
    untrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for gpu in (True, False):
        with monkeypatch.context() as changed:
            if gpu:
                changed.setattr(Where, "takes", lambda self, name: True)
            made = make("rl", configure("rl", untrained, data, tmp_path))
        assert dry_run(*made) == 0
        printed = capsys.readouterr().out
        assert f"split_attention: {str(gpu).lower()}\n" in printed and "span: auto" not in printed
        task, settings, engine = made
        work = workload_of(settings, engine, task.collect(0).microbatches[0], 1)
        assert work is not None and work.split is gpu
