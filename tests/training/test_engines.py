"""The engine seam: the protocol suffices for a second engine, nothing goes around it, and what does not exist is
refused."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import stage_runs
import training_task
from forked import Forked
from plain_engine import PlainEngine
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.errors import UserError
from realvr.training import engine as engines
from realvr.training.dry_run import dry_run
from realvr.training.engine import launchers
from stage_runs import command, config_file, configure, environment, lines, numbers, run, world, write
from training_task import Options, RegressionTask, make_settings

TRAINING = Path(engines.__file__).parents[1]
LORA = {"rank": 4, "targets": ["q_proj", "down_proj"], "dropout": 0.2}


# ---------------------------------------------------------------------- a second engine


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("sft", {"pack_tokens": 256}, marks=pytest.mark.slow),
        ("sft", {"pack_tokens": 256, "lora": LORA}),
        ("rl", {"max_new": 12, "beta": 0.05}),  # the reference is a frozen copy
        # The reference is the model without its adapters.
        pytest.param("rl", {"max_new": 12, "beta": 0.05, "lora": LORA}, marks=pytest.mark.slow),
    ],
    ids=["sft", "sft lora", "rl", "rl lora"],
)
def test_another_engine_trains_the_same(kind: str, changes: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    data = write(world(6), tmp_path / "data")
    changes = {**changes, "optim": {"steps": 3}, "log": {"parts_every": 2}}
    plain = PlainEngine()
    second = run(kind, configure(kind, trained, data, tmp_path / "plain", **changes), plain)
    first = run(kind, configure(kind, trained, data, tmp_path / "ddp", **changes))
    assert numbers(second) == numbers(first) and len(first) == 3
    assert any(name.startswith("grad_norm/") for name in first[1])
    assert kind == "sft" or first[1]["grad_norm/policy"] > 1e-3
    assert bool(plain.frozen) == (kind == "rl" and "lora" not in changes)
    assert plain.rollouts >= (3 if kind == "rl" else 1)
    models = [Backbone.load(tmp_path / name / "final", dtype="float32").model for name in ("plain", "ddp")]
    for ours, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(ours, theirs)


def test_another_engine_skips_and_resumes_the_same(tmp_path: Path) -> None:
    """A loss and a gradient that are not finite; a run that is continued in the middle."""
    options: dict[str, Any] = {"noise": True, "bad": {"2": "loss", "5": "gradient"}}
    options["settings"] = {"optim": {"schedule": "constant"}, "log": {"parts_every": 2}}
    training_task.run(out=str(tmp_path / "ddp"), steps=9, **options)
    for steps in (4, 9):
        training_task.run(PlainEngine(), out=str(tmp_path / "plain"), steps=steps, **options)
    first, second = (numbers(lines(tmp_path / name)) for name in ("ddp", "plain"))
    assert first == second and [line["skipped"] for line in first] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(UserError, match="step-000009 was written by engine plain, this run uses ddp"):
        training_task.run(out=str(tmp_path / "plain"), steps=12, **options)


def test_another_engine_estimates_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``--dry-run`` prints is the engine's own estimate."""

    class Half(PlainEngine):
        def estimate(self, module: Any, optim: Any) -> dict[str, int]:
            return {name: size // 2 for name, size in super().estimate(module, optim).items()}

    texts = []
    for engine in (PlainEngine(), Half()):
        options = Options(out=str(tmp_path / "run"), width=2_000_000)
        assert dry_run(RegressionTask(options, engine), make_settings(options), engine) == 0
        texts.append(capsys.readouterr().out)
    numbers = 4 * 2_000_000 + 4 * 2_000_000 + 1  # weights of both layers, biases and those of the norm
    for text, share in zip(texts, (1, 2), strict=True):
        assert f"gradients: {numbers * 8 / share / 2**30:.3f} GiB" in text
        assert f"optimizer: {numbers * 16 / share / 2**30:.3f} GiB" in text


IN_STEP = """
import json, sys
from collections import Counter
from pathlib import Path
import torch
import stage_runs
from realvr.training.engine.ddp import DDP

DDP.lockstep, passes, leave = sys.argv.pop() == "in-step", Counter(), DDP.exit

def count(module, *_):
    if not torch.is_grad_enabled():
        passes[type(module).__name__] += 1

def write_and_leave(engine, code):
    Path(sys.argv[2]).with_name(f"passes-{engine.rank}.json").write_text(json.dumps(passes, sort_keys=True))
    return leave(engine, code)

torch.nn.modules.module.register_module_forward_hook(count)
DDP.exit = write_and_leave
sys.exit(stage_runs.main())
"""


@pytest.mark.slow
def test_two_ranks_roll_out_in_step(trained: Path, tmp_path: Path) -> None:
    """As an engine with sharded parameters needs it: equally many passes of every module, and the same numbers."""
    data = write(world(8), tmp_path / "data")
    (tmp_path / "in_step.py").write_text(IN_STEP)
    passes, records = {}, {}
    for how in ("in-step", "freely"):
        folder = tmp_path / how
        folder.mkdir()
        raw = configure("rl", trained, data, folder / "run", max_new=12, optim={"steps": 2, "microbatch": 1})
        arguments = command("rl", config_file(raw, folder / "config.yaml"), how, ranks=2)
        arguments[arguments.index(stage_runs.__file__)] = str(tmp_path / "in_step.py")
        path = os.pathsep.join([str(Path(stage_runs.__file__).parent), environment()["PYTHONPATH"]])
        variables = environment() | {"PYTHONPATH": path}
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        passes[how] = [(folder / f"passes-{rank}.json").read_text() for rank in range(2)]
        records[how] = numbers(lines(folder / "run"))
    assert passes["freely"][0] != passes["freely"][1], "the test needs ranks that end at different times"
    assert passes["in-step"][0] == passes["in-step"][1]
    assert records["in-step"] == records["freely"]


# ---------------------------------------------------------------------- nothing goes around it


def test_only_engines_know_accelerate_and_torch_distributed() -> None:
    """Imports of any kind, and ``torch.distributed`` through ``torch``."""
    users = {path.relative_to(TRAINING).as_posix() for path in TRAINING.rglob("*.py") if distributed(path.read_text())}
    assert "engine/ddp.py" in users
    assert {user.split("/")[0] for user in users} == {"engine"}


def distributed(source: str) -> bool:
    """Whether code reaches for accelerate, torch.distributed, DDP or DeepSpeed."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names += [ast.literal_eval(value) for value in node.args[:1] if isinstance(value, ast.Constant)]
    packages = ("accelerate", "deepspeed", "torch.distributed", "torch.nn.parallel")
    return any(name == package or name.startswith(f"{package}.") for name in names for package in packages)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from accelerate.utils import gather_object",
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed",
        "from torch.nn.parallel import DistributedDataParallel",
        "import importlib\nimportlib.import_module('deepspeed')",
    ],
)
def test_that_test_sees_every_way(source: str) -> None:
    assert distributed(source)


# ---------------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    ("variable", "name"), [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_FSDP", "FSDP")]
)
def test_a_launcher_that_asks_for_another_engine_is_refused(
    variable: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read: neither model nor data exists."""
    config = config_file(configure("sft", tmp_path / "model", tmp_path / "data", tmp_path / "run"), tmp_path / "c.yaml")
    monkeypatch.setenv(variable, "true")
    assert main(["train", "sft", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"realvr: error: the launcher's configuration asks for {name} ({variable}=true)")
    assert "this run's engine is ddp" in line and not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "1")  # the other ranks leave it to the first to say so
    with pytest.raises(SystemExit, match="2"):
        engines.start_engine(cpu=True)
    monkeypatch.setenv(variable, "false")
    monkeypatch.delenv("RANK")
    assert engines.start_engine(cpu=True).name == "ddp"


FSDP: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
DEEPSPEED: dict[str, Any] = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}


def launched_with(content: dict[str, Any], folder: Path) -> dict[str, str]:
    """The variables that ``accelerate launch`` makes of a configuration file."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    general = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "use_cpu": False}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(general | {"machine_rank": 0} | content))
    parser = launch.launch_command_parser()
    given = parser.parse_args(["--config_file", str(folder / "accelerate.yaml"), "--main_process_port", "0", "a.py"])
    given, known, _ = launch._validate_launch_command(given)
    given.deepspeed_fields_from_accelerate_config = ",".join(known.deepspeed_config)  # as `launch_command` does
    return prepare_deepspeed_cmd_env(given)[1] if given.use_deepspeed else prepare_multi_gpu_env(given)


@pytest.mark.parametrize(
    ("engine", "content", "said"),
    [
        ("zero3", DEEPSPEED | {"deepspeed_config": {"zero_stage": 2}}, "ZERO_STAGE=2, but engine zero3 is stage 3"),
        (
            "zero3",
            DEEPSPEED | {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}},
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu, but engine zero3 does not offload",
        ),
        (
            "zero3",
            DEEPSPEED | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            "ACCELERATE_DEEPSPEED_CONFIG_FILE=ds.json, but engine zero3 does not read files of DeepSpeed",
        ),
        ("fsdp2", FSDP | {"fsdp_config": {"fsdp_version": 1}}, "FSDP_VERSION=1, but engine fsdp2 is version 2"),
        (
            "fsdp2",
            FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}},
            "FSDP_OFFLOAD_PARAMS=true, but engine fsdp2 does not offload",
        ),
        (
            "fsdp2",
            FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
            "FSDP_RESHARD_AFTER_FORWARD=false, but engine fsdp2 has reshard_after_forward true in its engine file",
        ),
        ("fsdp2", DEEPSPEED, "asks for DeepSpeed (ACCELERATE_USE_DEEPSPEED=true), but this run's engine is fsdp2"),
        ("zero3", FSDP, "asks for FSDP (ACCELERATE_USE_FSDP=true), but this run's engine is zero3"),
        ("zero3", DEEPSPEED, ""),
        ("fsdp2", FSDP, ""),
    ],
)
def test_a_launcher_that_contradicts_the_engine_in_detail_is_refused(
    engine: str,
    content: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``--engine`` is given, and fits the launcher's in name only. The last two contradict
    nothing."""
    config = config_file(configure("sft", tmp_path / "model", tmp_path / "data", tmp_path / "run"), tmp_path / "c.yaml")
    for name, value in launched_with(content, tmp_path).items():
        monkeypatch.setenv(name, value)
    if said:
        assert main(["train", "sft", str(config), "--engine", engine]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("realvr: error: the launcher's configuration ") and said in line
    else:
        settings = engines.engine_settings(engine)
        launchers.refuse_other_settings(settings, engines.ENGINES.get(engine).launcher_flag)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_accelerate_launch_with_an_fsdp_file_is_refused(tmp_path: Path) -> None:
    """The real launcher with a configuration file as ``accelerate config`` writes it."""
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
    }
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(content))
    config = config_file(configure("sft", tmp_path / "model", tmp_path / "data", tmp_path / "run"), tmp_path / "c.yaml")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp.yaml")]
    done = subprocess.run(
        [*launcher, "-m", "realvr", "train", "sft", str(config)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert done.returncode != 0
    assert done.stderr.count("realvr: error:") == 1 and "asks for FSDP (ACCELERATE_USE_FSDP=true)" in done.stderr


@pytest.mark.slow
def test_variables_of_a_launcher_change_no_number(tmp_path: Path) -> None:
    """accelerate reads them where it is not told otherwise: a divided loss, autocast, compilation."""
    given = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16"}
    given["ACCELERATE_DYNAMO_BACKEND"] = "EAGER"
    for name, more in (("alone", {}), ("launched", given)):
        options = f'{{"out": "{tmp_path / name}", "steps": 3, "settings": {{"log": {{"parts_every": 1}}}}}}'
        command = [sys.executable, training_task.__file__, options]
        assert Forked.of(command, environment=environment() | more).wait() == 0
    assert numbers(lines(tmp_path / "launched")) == numbers(lines(tmp_path / "alone"))
    facts = [(tmp_path / name / "facts-0.json").read_text() for name in ("alone", "launched")]
    assert facts[0] == facts[1] and '"wrapped": "Module"' in facts[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("type: fsdp3", "type is 'fsdp3', not an engine file"),
        ("distributed_type: FSDP\nfsdp_config: {}", "this is a configuration of accelerate, not an engine file"),
        ('{"zero_optimization": {"stage": 3}}', "this is a configuration of DeepSpeed, not an engine file"),
        ("type: ddp\ntimeuot: 3", "engine ddp has no setting 'timeuot'; did you mean 'timeout'?"),
        ("type: ddp\ntimeout: 0", "timeout: Input should be greater than 0"),
        ("- 1", "type is None, not an engine file"),
        ("a: b: c", "the engine file cannot be read"),
    ],
)
def test_engine_files_that_are_none(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine.yaml").write_text(content)
    config = config_file(configure("sft", tmp_path / "model", tmp_path / "data", tmp_path / "run"), tmp_path / "c.yaml")
    assert main(["train", "sft", str(config), "--engine", str(tmp_path / "engine.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("realvr: error: ") and str(tmp_path / "engine.yaml") in line and said in line
    assert main(["train", "sft", str(config), "--engine", "dpd"]) == 2
    assert "engine: dpd is neither a file nor the name of an engine; did you mean ddp?" in capsys.readouterr().err


def test_env_names_the_engines_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    found = yaml.safe_load(text)["engines"]
    assert list(found) == [*(engine.title for engine in engines.ENGINES), "LoRA"]
    assert os.environ.get("ACCELERATE_USE_FSDP") is None
