"""A method from outside the package: one file, typed settings, training with a kill, records, report, refusals."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked import Forked
from realvr.cli import main
from realvr.errors import UserError
from realvr.registry import Registry
from realvr.training.configuration import KINDS, load_settings
from realvr.training.method import METHODS
from realvr.training.methods import ablations, lvr_sft, realvr
from stage_runs import column, command, config_file, configure, environment, lines, numbers, run, world, write

ROOT = Path(__file__).parents[2]
TOYS = ROOT / "tests" / "toys"
TOY, PLAIN = f"{TOYS / 'toy_method.py'}:Toy", f"{TOYS / 'toy_sft.py'}:Plain"
SMALL: dict[str, Any] = {"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "run": {"out": "o"}}


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    return config_file(SMALL, tmp_path / "config.yaml")


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    METHODS.names()
    monkeypatch.setattr(METHODS, "_members", dict(METHODS._members))


pytestmark = pytest.mark.usefixtures("_registry")


# ---------------------------------------------------------------------- training


def kill_after(process: Forked, out: Path, steps: int) -> None:
    """SIGKILL once so many steps are recorded."""
    file = out / "metrics.jsonl"
    process.until(lambda: file.exists() and len(file.read_text().splitlines()) >= steps)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("kind", "method", "flags"), [("rl", TOY, ["--pull", "0.3"]), ("sft", PLAIN, [])])
@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_numbers(
    kind: str, method: str, flags: list[str], trained: Path, tmp_path: Path
) -> None:
    """The teacher moves at every update: a run that forgot it would have other losses from step 4 on."""
    data = write(world(8), tmp_path / "data")
    changes: dict[str, Any] = {"optim": {"steps": 6, "lr": 2e-3}, "checkpoint": {"every": 3}}
    outs = [tmp_path / "whole", tmp_path / "run"]
    configs = []
    for out in outs:
        raw = configure(kind, trained, data, out, **changes)
        if kind == "sft":
            raw = {name: value for name, value in raw.items() if name not in ("pack_tokens", "gradient_checkpointing")}
        configs.append(config_file(raw, tmp_path / f"{out.name}.yaml"))
    flags = ["--method", method, *flags]
    assert main(["train", kind, str(configs[0]), *flags]) == 0
    kill_after(Forked.of(command(kind, configs[1], *flags), environment=environment()), outs[1], 4)
    assert [path.name for path in (outs[1] / "checkpoints").glob("step-*")] == ["step-000003"]
    assert main(["train", kind, str(configs[1]), *flags]) == 0
    found = lines(outs[1])
    assert numbers(found) == numbers(lines(outs[0])) and column(found, "step") == list(range(1, 7))
    if kind == "rl":
        assert column(found, "toy/updates") == [0, 1, 2, 3, 4, 5]
        for line in found:
            terms = line["loss/policy"] + 0.2 * line["loss/evidence"] + 0.3 * line["loss/pull"]
            assert line["loss"] == pytest.approx(terms, rel=1e-5) and line["loss/pull"] > 0
    check_records(outs[1], method)


def check_records(out: Path, method: str) -> None:
    """The run says which file it was trained with."""
    file = Path(method.rpartition(":")[0])
    recorded = json.loads(sorted(out.glob("checkpoints/step-*/run.json"))[-1].read_text())["method"]
    assert recorded["file"] == str(file) and recorded["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    about = json.loads((out / "method.json").read_text())
    assert about["method"] == recorded["name"] and about["sha256"] == recorded["sha256"] and about["metrics"]
    assert yaml.safe_load((out / "settings.yaml").read_text())["method"]["type"] == method


@pytest.mark.slow
def test_as_a_plugin_by_its_name_and_into_the_report(trained: Path, tmp_path: Path) -> None:
    """Processes of their own: the report's knows nothing of the method but what the run recorded."""
    data = write(world(4), tmp_path / "data")
    raw = configure("rl", trained, data, tmp_path / "run", optim={"steps": 2, "lr": 1e-3}, method={"type": "toy"})
    config = config_file(raw, tmp_path / "config.yaml")
    plugin = ["--plugin", str(TOYS / "toy_method.py")]
    flags = ["--method.decay", "0.9", "--optim.batch", "2"]
    for arguments in (
        ["train", "rl", str(config), *plugin, *flags],
        ["report", str(tmp_path / "run"), "--out", str(tmp_path / "report")],
    ):
        done = Forked(arguments, environment=environment())
        assert done.wait() == 0, done.said
    settings = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())["method"]
    assert settings["type"] == "toy" and settings["decay"] == 0.9
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Updates of the teacher" in page and "toy" in page


def test_an_edited_method_file_is_noticed(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(world(4), tmp_path / "data")
    file = tmp_path / "mine.py"
    file.write_text((TOYS / "toy_method.py").read_text())
    changes: dict[str, Any] = {"optim": {"steps": 1, "batch": 2}, "checkpoint": {"every": 1}}
    raw = configure("rl", trained, data, tmp_path / "run", method=f"{file}:Toy", **changes)
    assert main(["train", "rl", str(config_file(raw, tmp_path / "config.yaml"))]) == 0
    run_json = tmp_path / "run/checkpoints/step-000001/run.json"
    run_json.write_text(run_json.read_text().replace(hashlib.sha256(file.read_bytes()).hexdigest(), "0" * 64))
    capsys.readouterr()
    assert main(["train", "rl", str(tmp_path / "config.yaml"), "--optim.steps", "2"]) == 0
    assert f"note: {file} is not the method file that {run_json.parent} was trained with" in capsys.readouterr().err


# ---------------------------------------------------------------------- settings


def test_its_settings_are_like_those_of_the_package(settings_file: Path, tmp_path: Path) -> None:
    found = load_settings("rl", settings_file, ["--method", TOY, "--decay", "0.25", "--method.eta", "0.4"]).method
    assert (found.decay, found.eta, found.pull) == (0.25, 0.4, 0.1)  # type: ignore[attr-defined]
    in_file = config_file(SMALL | {"method": {"type": TOY, "decay": 0.25, "eta": 0.4}}, tmp_path / "nested.yaml")
    beside = config_file(SMALL | {"method": TOY, "decay": 0.25, "eta": 0.4}, tmp_path / "flat.yaml")
    assert load_settings("rl", in_file).method == load_settings("rl", beside).method == found


@pytest.mark.parametrize("flat", [True, False])
def test_an_unknown_setting_names_the_file_and_its_line(flat: bool, tmp_path: Path) -> None:
    raw = SMALL | ({"method": TOY, "decai": 0.25} if flat else {"method": {"type": TOY, "decai": 0.25}})
    file = TOYS / "toy_method.py"
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "ToyConfig(" in text)
    with pytest.raises(UserError) as caught:
        load_settings("rl", config_file(raw, tmp_path / "config.yaml"))
    text = str(caught.value)
    assert f"unknown setting '{'' if flat else 'method.'}decai'; did you mean 'method.decay'?" in text
    assert f"settings of method 'toy': {file}:{line}" in text and str(tmp_path / "config.yaml") in text


def test_an_unknown_flag_names_the_file_too(settings_file: Path) -> None:
    with pytest.raises(
        UserError, match=r"unknown setting 'method.decai'; did you mean 'method.decay'\?.*toy_method.py:\d+"
    ):
        load_settings("rl", settings_file, ["--method", TOY, "--method.decai", "1"])


HEAD = "from realvr.training.method import Method, Term\nfrom realvr.training.sections import MethodConfig\n\n\n"
WHOLE = """\
class Mine(Method):
    name, stage, Config, term_names = "mine", "rl", MethodConfig, ("fit",)

    def collect(self, step):
        pass

    def terms(self, batch):
        yield Term("fit", 1.0, 0.0, 1.0)
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("    def terms", "    def term", "{file}:5: method Mine lacks terms (see realvr.training.method.Method)"),
        ("    def collect", "    def _collect", "{file}:5: method Mine lacks collect"),
        (", Config,", ", Settings,", "{file}:5: method Mine lacks Config"),
        ('"mine", "rl"', '"mine", "lr"', "{file}:5: stage is 'lr'; choose one of sft, rl, base"),
        ('"mine", "rl"', '"mine", "sft"', "belongs to `realvr train sft`"),
        ('"mine", "rl"', '"realvr", "rl"', "two methods are called 'realvr'"),
        ("class Mine(Method)", "class Mine", "{file}:5: Mine is no subclass of realvr.training.method.Method"),
        ("class Mine", "class Yours", "{file} has no class Mine (methods it defines: Yours)"),
        ("def collect", "def 1", "{file}:8: SyntaxError"),
        ("MethodConfig, (", "dict, (", "{file}:5: method Mine: Config is no subclass of"),
        ('("fit",)', '"fit"', "{file}:5: method Mine: term_names is 'fit'; write a tuple of names"),
        ("    def collect", "    aliases = ('lvr-rl',)\n\n    def collect", "two methods are called 'lvr-rl'"),
        (
            "    def collect",
            "    fixed = {'pul': 1}\n\n    def collect",
            "fixed names 'pul', which MethodConfig does not have",
        ),
        (
            "    def collect",
            "    metrics = {'x': 'X'}\n\n    def collect",
            "{file}:5: method Mine: metrics is no list of",
        ),
    ],
)
def test_a_method_that_is_none(
    before: str, after: str, message: str, settings_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + WHOLE.replace(before, after))
    assert main(["train", "rl", str(settings_file), "--method", f"{file}:Mine"]) == 2
    said = capsys.readouterr().err
    assert message.format(file=file) in said and said.count("\n") == 1


def test_names_of_no_method(settings_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (
        ("absent.py:Mine", "absent.py: no such file"),
        ("mine.py", "'mine.py' does not name a method: write FILE.py:Class"),
        ("realvrr", "no method is called 'realvrr'; did you mean 'realvr'?"),
        ("direct-sft", "method 'direct-sft' belongs to `realvr train sft`"),
        ("--optim.lr", "--method needs the name of a method, or FILE.py:Class"),
    ):
        assert main(["train", "rl", str(settings_file), "--method", name]) == 2
        assert message in capsys.readouterr().err


def test_a_term_that_is_not_listed_is_refused(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (TOYS / "toy_method.py").read_text()
    file.write_text(text.replace('self.term_names = (*self.term_names, "pull")', "pass").replace('"toy"', '"mine"'))
    data = write(world(4), tmp_path / "data")
    raw = configure("rl", trained, data, tmp_path / "run", optim={"batch": 2}, method=f"{file}:Toy")
    with pytest.raises(
        UserError, match=rf"{re.escape(str(file))}:\d+: terms\(\) gives 'pull', term_names lists policy"
    ):
        run("rl", raw)


COLLECT = "return Collected([None], {'x': (torch.ones(()), torch.ones(()))})"
LOSS = "self.backbone.model.get_input_embeddings().weight.square().mean()"
TERM = f"yield Term('fit', 1.0, {LOSS}, 1.0, {{'y': (torch.ones(()), torch.ones(()))}})"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("return Collected", "Collected", "collect() returns NoneType, not Collected(microbatches, metrics, table)"),
        ("{'x': (torch.ones(()), torch.ones(()))}", "{'x': 0.5}", "collect(): metric 'x' is no pair of tensors"),
        (TERM, f"yield {LOSS}", "terms() yields Tensor, not Term(name, weight, loss, share, metrics)"),
        (TERM, "pass", "terms() yields nothing: yield Term(...) for each term"),
        (LOSS, "0.5", "terms(): the loss of 'fit' is float, not a tensor"),
        ("{'y': (torch.ones(()), torch.ones(()))}", "{'y': 0.5}", "terms(): metric 'y' is no pair of tensors"),
        ("", "", ""),
    ],
)
def test_what_collect_and_terms_must_give(before: str, after: str, message: str, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = "import torch\nfrom realvr.training.task import Collected\n" + HEAD + WHOLE
    text = text.replace("pass", COLLECT).replace('yield Term("fit", 1.0, 0.0, 1.0)', TERM)
    assert before in text
    file.write_text(text.replace(before, after) if before else text)
    raw = configure("rl", trained, write(world(4), tmp_path / "data"), tmp_path / "run", optim={"batch": 2})
    raw = {key: value for key, value in raw.items() if key in KINDS["rl"].model_fields} | {"method": f"{file}:Mine"}
    if not message:
        assert {"x", "y", "loss/fit"} <= run("rl", raw)[-1].keys()
        return
    with pytest.raises(UserError, match=rf"{re.escape(str(file))}:\d+: {re.escape(message)}"):
        run("rl", raw)


# ---------------------------------------------------------------------- old and new layout


def test_settings_files_of_both_layouts(tmp_path: Path) -> None:
    flat = SMALL | {"method": "no-negatives", "group": 4, "eta": 0.1, "rewards": {"accuracy": 2.0}}
    nested = SMALL | {"method": {"type": "no-negatives", "group": 4, "eta": 0.1, "rewards": {"accuracy": 2.0}}}
    found = [load_settings("rl", config_file(raw, tmp_path / "c.yaml")) for raw in (flat, nested)]
    assert found[0] == found[1] and found[0].method.objective == "hinge-positive"  # type: ignore[attr-defined]
    assert KINDS["rl"].model_validate(flat) == found[0]
    twice = SMALL | {"method": {"type": "realvr", "eta": 0.1}, "eta": 0.2}
    with pytest.raises(UserError, match="eta is 0.2, but method.eta is 0.1: keep one of them"):
        load_settings("rl", config_file(twice, tmp_path / "c.yaml"))


def test_a_checkpoint_of_the_old_layout_is_continued(trained: Path, tmp_path: Path) -> None:
    """As earlier versions wrote ``run.json``: settings of the method beside the sections, no word of its file."""
    data = write(world(4), tmp_path / "data")
    changes: dict[str, Any] = {"optim": {"steps": 1, "batch": 2}, "checkpoint": {"every": 1}, "method": "undetached"}
    run("rl", configure("rl", trained, data, tmp_path / "run", **changes))
    file = tmp_path / "run/checkpoints/step-000001/run.json"
    record = json.loads(file.read_text())
    method = record["settings"].pop("method")
    record["settings"] |= {"method": method.pop("type"), **method}
    del record["method"]
    file.write_text(json.dumps(record))
    more = configure("rl", trained, data, tmp_path / "run", **changes | {"optim": {"steps": 2, "batch": 2}})
    with pytest.raises(UserError, match=r"method.eta was 0.3, is 0.4"):
        run("rl", more | {"eta": 0.4})
    assert column(run("rl", more), "step") == [1, 2]


def test_direct_sft_is_stage_one_without_latents(settings_file: Path, tmp_path: Path) -> None:
    assert load_settings("sft", settings_file, ["--method", "direct-sft"]).model.latents == 0
    raw = SMALL | {"model": {"path": "m", "latents": 8}, "method": "direct-sft"}
    with pytest.raises(UserError, match=r"means model.latents = 0, but model.latents is 8: .*choose method 'lvr-sft'"):
        load_settings("sft", config_file(raw, tmp_path / "c.yaml"))


# ---------------------------------------------------------------------- lists


def test_the_documentation_lists_every_method() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    listed = {
        name for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    }
    assert {method.name for method in METHODS} - listed == set()


def test_help_lists_the_methods_of_a_stage_and_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    METHODS.outside(TOY)
    with pytest.raises(SystemExit):
        main(["train", "rl", "--help", "--method", "toy"])
    text = capsys.readouterr().out
    for method in METHODS:
        assert (f"\n  {method.name} " in text) == (method.stage == "rl"), method.name
    assert "ReaLVR, and latents that stay near the mean of earlier ones." in text
    assert "--method.decay" in text and "How much of the teacher stays" in text and "--method.lambda-ev" in text


def test_two_methods_of_one_name_are_refused_at_start() -> None:
    registry: Registry[Any] = Registry("method", METHODS.base, METHODS.package, METHODS.required)
    registry.add(realvr.ReaLVR)
    twin = type("Twin", (realvr.ReaLVR,), {"__module__": __name__})
    with pytest.raises(UserError, match="two methods are called 'realvr'"):
        registry.add(twin)


# ---------------------------------------------------------------------- one screen


@pytest.mark.parametrize(("module", "name"), [(realvr, "ReaLVR"), (lvr_sft, "LvrSft")])
def test_a_stage_is_read_on_one_screen(module: Any, name: str) -> None:
    """The whole class, docstrings included; an ablation is a few lines."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    assert {node.name for node in found.body if isinstance(node, ast.FunctionDef)} == {"collect", "terms"}
    assert int(found.end_lineno or 0) - found.lineno + 1 <= 80
    for node in ast.parse(Path(str(ablations.__file__)).read_text()).body:
        if isinstance(node, ast.ClassDef):
            assert int(node.end_lineno or 0) - node.lineno < 8, node.name


def test_stage_two_reads_in_the_order_of_the_paper() -> None:
    text = Path(str(realvr.__file__)).read_text()
    body = textwrap.dedent(text[text.index("    def collect(self, step") : text.index("\n\ndef replay")])
    words = [
        "rollouts.sample(",
        "self.score(",
        "grpo.advantages(",
        "def terms",
        "prefill(",
        "splice(",
        "policy_loss(",
        "regenerate(",
        "readouts(",
        "slot_credit(",
        "slot_weights(",
        "evidence_losses(",
    ]
    places = [body.index(word) for word in words]
    assert places == sorted(places)
