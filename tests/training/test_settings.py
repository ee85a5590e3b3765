"""Settings: the paper's values, one-line errors with suggestions, flags on top of the file, methods by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from realvr.errors import UserError
from realvr.training import configuration, packaged
from realvr.training.configuration import load_settings, save_resolved
from realvr.training.method import METHODS
from realvr.training.methods.lvr_sft import LvrSftConfig
from realvr.training.methods.realvr import ReaLVRConfig
from realvr.training.packaged import FOLDER
from realvr.training.sections import OptimSettings
from realvr.training.settings import RlSettings, SftSettings, TrainSettings
from realvr.zoo.presets import PRESETS as BACKBONES

PAPER = sorted((FOLDER / "paper").glob("*.yaml"))
SMALL: dict[str, Any] = {"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "run": {"out": "o"}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def write(path: Path, **extra: Any) -> Path:
    path.write_text(yaml.safe_dump(SMALL | extra, allow_unicode=True))
    return path


# ---------------------------------------------------------------------- the paper


def test_there_is_a_paper_config_for_every_backbone_and_stage() -> None:
    names = {f"{name.lower()}-{kind}.yaml" for name in BACKBONES for kind in ("sft", "rl")}
    assert {path.name for path in PAPER} == names


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_configs_hold_the_tables(path: Path) -> None:
    name, kind = path.stem.rsplit("-", 1)
    backbone = next(preset for key, preset in BACKBONES.items() if key.lower() == name)
    settings = load_settings(kind, path)
    head = path.read_text().split("\nengine:")[0]
    assert "configured, not run" in head and all(line.startswith("#") for line in head.splitlines() if line)
    optim, variable = settings.optim, backbone.family.startswith("qwen")
    assert optim.batch == (1600 if "235b" in name else 512) and optim.microbatch == 1
    assert (optim.schedule, optim.warmup, optim.weight_decay) == ("cosine", 0.03, 0.1)
    # DeepSpeed would hold the whole gradient of Stage 2, which these two have no room for.
    own = kind == "rl" and name in ("qwen3-vl-235b-a22b", "qwen3-vl-30b-a3b")
    assert settings.model.dtype == "bfloat16" and settings.engine == ("fsdp2" if own else "zero3-paper")
    plan = f"--stage {kind} --gpus {optim.batch} --gpu mi250x --engine {settings.engine}\n"
    assert f"#   realvr plan --backbone {backbone.name} {plan}" in head
    assert ("paper's is zero3-paper" in head) == own
    assert f"paper/{path.stem} --dry-run" not in head  # on one process it would load the whole model
    if isinstance(settings, SftSettings):
        assert settings.model.path == backbone.hub_id
        assert optim.lr == 1e-5 and settings.model.latents == 8 and isinstance(settings.method, LvrSftConfig)
        assert (settings.method.reconstruction_weight, settings.method.reconstruction_reduction) == (0.1, "mean")
        assert settings.method.pack_tokens == 4096
        assert (settings.model.min_tokens, settings.model.max_tokens) == ((128, 5120) if variable else (None, None))
        assert settings.method.position_jitter == 0 and settings.method.hide_image_ratio == 0
        assert settings.method.gradient_checkpointing
    else:
        assert isinstance(settings, RlSettings)
        assert settings.model.path == str(load_settings("sft", path.with_name(f"{name}-sft.yaml")).run.out / "final")
        assert (optim.lr, optim.steps, settings.checkpoint.every) == (5e-7, 100, 25)
        assert settings.model.latents is None  # Stage 1's
        assert (settings.model.min_tokens, settings.model.max_tokens) == ((128, 2560) if variable else (None, None))
        assert settings.model.max_tiles == (9 if backbone.family == "internvl3" else None)
        assert f"--method direct --model.path {backbone.hub_id} " in head
        method = settings.method
        assert isinstance(method, ReaLVRConfig)
        assert (method.group, method.temperature, method.top_p, method.top_k) == (8, 0.6, 1.0, 0)
        assert (method.beta, method.max_prompt, method.max_new) == (0, 4096, 192)
        assert (method.lambda_ev, method.margin, method.eta, method.negatives) == (0.2, 0.5, 0.3, 16)
        assert settings.method.type == "realvr" and len(settings.data.sources) == 2


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_defaults_are_those_of_the_paper_configs(kind: str, config: Path) -> None:
    """A file that says nothing about an hyperparameter trains like the paper's."""
    ours = load_settings(kind, config).model_dump()
    paper = load_settings(kind, f"paper/qwen2.5-vl-7b-{kind}").model_dump()
    for section in ("model", "data", "run", "checkpoint", "engine"):
        ours.pop(section), paper.pop(section)
    assert configuration.differences(ours, paper) == {}


# ---------------------------------------------------------------------- files and flags


def test_flags_go_on_top_of_the_file_and_the_result_reads_back(config: Path, tmp_path: Path) -> None:
    write(config, optim={"lr": "3e-5"}, lora={"rank": 4})
    flags = ["--optim.lr", "1e-6", "--data.sources.0.weight", "2", "--no-gradient-checkpointing"]
    settings = load_settings("sft", config, flags)
    assert isinstance(settings, SftSettings)
    assert settings.optim.lr == 1e-6 and settings.lora.rank == 4 and not settings.method.gradient_checkpointing
    assert settings.data.sources[0].weight == 2
    assert load_settings("sft", save_resolved(settings, tmp_path / "deep/settings.yaml")) == settings


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"optm": {}}, "unknown setting 'optm'; did you mean 'optim'?"),
        ({"optim": {"learning_rate": 1}}, "unknown setting 'optim.learning_rate'"),
        ({"optim": {"warm_up": 1}}, "unknown setting 'optim.warm_up'; did you mean 'optim.warmup'?"),
        ({"lr": 1e-5}, "unknown setting 'lr'; did you mean 'optim.lr'?"),
        ({"data": {"sources": [{"pth": "x"}]}}, "'data.sources.0.pth'; did you mean 'data.sources.0.path'?"),
        ({"optim": {"lr": "fast"}}, "optim.lr: Input should be a valid number"),
        ({"optim": {"lr": -1}}, "optim.lr: Input should be greater than 0 (it is -1)"),
        ({"optim": {"lr": float("nan")}}, "optim.lr: Input should be a finite number"),
        ({"optim": {"warmup": 2.5}}, "neither a share below 1 nor a whole number"),
        ({"model": {}}, "'model.path' is required"),
        ({"run": {"out": " "}}, "run.out: it is empty: name a folder"),
        ({"data": {"sources": []}}, "data.sources: List should have at least 1 item"),
        ({"data": {"sources": [{"path": "x", "weight": 0}]}}, "every source has weight 0"),
        ({"model": {"path": "m", "min_tokens": 9, "max_tokens": 3}}, "min_tokens 9 is over max_tokens 3"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_file_and_key(extra: dict[str, Any], message: str, config: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_settings("sft", write(config, **extra))
    text = str(caught.value)
    assert message in text and text.startswith(str(config)) and "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found nothing"),
        (b"- 1\n", "found [1]"),
        (b"a: [1\n", "line 2: this is not YAML"),
        (b"a: \xff\n", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_not_settings(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="bad.yaml") as caught:
        load_settings("rl", path)
    assert message in str(caught.value)


def test_wrong_flags(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="command line: optim.lr: Input should be greater than 0"):
        load_settings("sft", config, ["--optim.lr", "0"])
    with pytest.raises(UserError, match="did you mean 'no-negatives'"):
        load_settings("rl", config, ["--method", "no-negative"])
    with pytest.raises(SystemExit) as caught:
        load_settings("sft", config, ["--optim.lrr", "1"])
    assert caught.value.code == 2 and "--optim.lr" in capsys.readouterr().err


# ---------------------------------------------------------------------- methods

REALVR = {"routing": "selective", "objective": "contrast", "mass_matched": False, "detach": True, "on_policy": True}
EXPECTED: dict[str, dict[str, Any]] = {
    "realvr": {},
    "lvr-rl": {"lambda_ev": 0},
    "direct": {"lambda_ev": 0, "model.latents": 0},
    "uniform": {"eta": 1, "routing": "uniform"},
    "selective": {"eta": 0},
    "raw-attention": {"routing": "raw"},
    "no-negatives": {"objective": "hinge-positive"},
    "undetached": {"detach": False},
    "off-policy": {"on_policy": False},
    "mass-matched-u+": {"mass_matched": True, "routing": "uniform", "objective": "hinge-positive"},
    "mass-matched-u±": {"mass_matched": True, "routing": "uniform"},
    "mass-matched-c+": {"mass_matched": True, "objective": "hinge-positive"},
    "mass-matched-c±": {"mass_matched": True},
    "custom": {},
}


@pytest.mark.parametrize("method", [method.name for method in METHODS if method.stage == "rl"])
def test_a_method_changes_exactly_what_it_says(method: str, config: Path) -> None:
    default = load_settings("rl", config).model_dump()
    for settings in (
        load_settings("rl", write(config, method=method)),
        load_settings("rl", write(config), ["--method", method]),
        load_settings(
            "rl", write(config, eta=0.7, lambda_ev=0.4, model={"path": "m", "latents": 4}), ["--method", method]
        )
        if method in ("direct",)
        else load_settings("rl", write(config), [f"--method={method}"]),
    ):
        changed = configuration.differences(default, settings.model_dump())
        changed = {key.removeprefix("method."): new for key, (_, new) in changed.items()}
        changed = {key: new for key, new in changed.items() if key not in ("type", "eta")} | (
            {"eta": settings.method.eta} if settings.method.eta not in (0.3, 0.7) else {}
        )
        assert changed == EXPECTED[method]
    assert load_settings("rl", save_resolved(settings, config)) == settings


def test_a_method_flag_beats_the_file_and_contradictions_are_refused(config: Path) -> None:
    settings = load_settings("rl", write(config, method="realvr", eta=0.4), ["--method", "selective"])
    assert isinstance(settings, RlSettings) and settings.method.eta == 0
    settings = load_settings("rl", write(config, method="uniform"), ["--method", "realvr"])
    assert isinstance(settings, RlSettings) and (settings.method.eta, settings.method.routing) == (0.3, "selective")
    with pytest.raises(UserError, match="method 'uniform' means eta = 1.0, but eta is 0.5"):
        load_settings("rl", write(config, method="uniform", eta=0.5))
    with pytest.raises(UserError, match="method 'undetached' means detach = false, but detach is true"):
        load_settings("rl", write(config, method="undetached", detach=True))
    with pytest.raises(UserError, match="method 'direct' means model.latents = 0"):
        load_settings("rl", write(config, method="direct", model={"path": "m", "latents": 8}))
    with pytest.raises(UserError, match="mass_matched needs eta > 0"):
        load_settings("rl", write(config, method="mass-matched-c±", eta=0))
    with pytest.raises(UserError, match="config.yaml: no method is called 'nonsense'"):
        load_settings("rl", write(config, method="nonsense"))
    custom = load_settings("rl", write(config, method="custom", detach=False, routing="raw"))
    assert isinstance(custom, RlSettings) and (custom.method.detach, custom.method.routing) == (False, "raw")


def test_names_without_the_plus_minus_sign(config: Path) -> None:
    for given in (load_settings("rl", config, ["--method", "mass-matched-c+-"]),
                  load_settings("rl", write(config, method="mass-matched-c+-"))):  # fmt: skip
        assert isinstance(given, RlSettings) and given.method.type == "mass-matched-c±"


def test_combinations_that_make_no_sense(config: Path) -> None:
    for extra, message in (
        ({"method": "custom", "routing": "uniform"}, "eta = 1"),
        ({"model": {"path": "m", "latents": 0}}, "needs latents"),
        ({"rewards": {"accuracy": 0}}, "nothing to learn from"),
    ):
        with pytest.raises(UserError, match=message):
            load_settings("rl", write(config, **extra))


# ---------------------------------------------------------------------- schedule


def test_learning_rate() -> None:
    cosine = OptimSettings(lr=1.0, steps=100, warmup=0.1, min_lr_ratio=0.2)
    rates = [cosine.lr_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 and rates[10] == 1.0
    assert rates[55] == pytest.approx(0.6) and rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert OptimSettings(steps=100, warmup=7).warmup_steps == 7
    constant = OptimSettings(lr=1.0, steps=10, warmup=0, schedule="constant")
    assert {constant.lr_at(step) for step in range(10)} == {1.0}


def test_every_field_is_documented_and_unknown_ones_are_refused() -> None:
    def check(model: Any) -> None:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            inner = configuration._section(field.annotation)
            if inner is not None:
                check(inner)

    for model in configuration.KINDS.values():
        check(model)
    for method in METHODS:
        check(method.Config)
    with pytest.raises(ValidationError):
        TrainSettings.model_validate(SMALL | {"surprise": 1})


# ---------------------------------------------------------------------- names of packaged files


def test_a_packaged_file_is_found_by_name_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = load_settings("rl", FOLDER / "own" / "rl.yaml")
    assert wanted.run.out == Path("runs/own/rl")
    assert all(load_settings("rl", name) == wanted for name in ("own/rl", "own/rl.yaml", "configs/own/rl.yaml"))
    (tmp_path / "own").mkdir()
    write(tmp_path / "own" / "rl.yaml", optim={"steps": 7})
    assert load_settings("rl", "own/rl.yaml").optim.steps == 7, "a file of the user's own comes first"
    assert load_settings("rl", "own/rl") == wanted


def test_every_packaged_file_is_one_of_a_training() -> None:
    by_kind = {kind: packaged.names(kind) for kind in configuration.KINDS}
    assert sorted(name for names in by_kind.values() for name in names) == packaged.names()
    for kind, names in by_kind.items():
        assert len(names) > 2
        for name in names:
            load_settings(kind, name)


def test_a_name_that_is_none_is_refused_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"own/rll: the settings cannot be read \(No such file or directory\); did you mean own/rl\?"
    ):
        load_settings("rl", "own/rll")
    for kind in configuration.KINDS:
        with pytest.raises(UserError, match=rf"No such file .*`realvr train {kind} --help` lists"):
            load_settings(kind, "nothing-of-the-kind.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: the settings cannot be read .*directory"):
        load_settings("sft", "folder")
