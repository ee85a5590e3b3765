"""A diagnostic in a file of the user: measured with a kill and several processes, summary, report, lists, refusals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outside
from pair_cases import world_samples
from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.data.export import write as export
from realvr.data.reading import read
from realvr.diagnostics import DIAGNOSTICS, DiagnoseSettings, diagnose
from realvr.errors import UserError
from realvr.evaluation.published import published
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.registry import load_file
from stage_runs import LATENTS, with_markers, world, write

TOY = Path(__file__).resolve().parents[1] / "toys" / "toy_diagnostic.py"
DOCS = TOY.parents[2] / "docs" / "diagnostics.md"
COUNT = 12


@pytest.fixture(scope="module")
def model(build_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_markers(build_tiny("qwen2.5-vl"), tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, the third with a picture that is damaged after it was written."""
    path = write(world(COUNT), tmp_path_factory.mktemp("data"))
    broken = path.parent / json.loads(path.read_text().splitlines()[2])["images"][0]
    broken.write_bytes(broken.read_bytes()[:90])
    return path


start, run = partial(outside.start, plugin=TOY), partial(outside.run, plugin=TOY)


def command(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    return ["diagnose", "span-norm", model, data, "--out", out, "--device", "cpu", "--batch", 1, *more]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "span-norm.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, run(*command(model, data, out, "--power", "3"))


def test_its_numbers_are_those_of_single_questions(finished: tuple[Path, str], model: Path, data: Path) -> None:
    out, said = finished
    backbone = Backbone.load(model, device="cpu")
    norms = {}
    for place, sample in enumerate(read(data)):
        if place != 2:
            prompt = backbone.prompt(conversation(sample, [image.open() for image in sample.images]))
            span = rollout(backbone, [prompt], sampling=Sampling(temperature=0.0, max_new=1), latents=LATENTS)
            norms[sample.id] = (np.abs(span.latents_BKD[0].double().numpy()) ** 3).sum(-1) ** (1 / 3)
    found = {record["id"]: record["norms"] for record in records(out) if record["error"] is None}
    assert list(found) == list(norms) and len(norms) == COUNT - 1
    for name, expected in norms.items():
        assert found[name] == pytest.approx(expected.tolist(), rel=1e-4)
    summary = json.loads((out / "span-norm.json").read_text())
    assert summary["norm"]["mean"] == pytest.approx(np.mean([one.mean() for one in norms.values()]), rel=1e-4)
    assert summary["norm"]["pairs"] == COUNT - 1
    assert summary["settings"]["power"] == 3.0 and summary["settings"]["latents"] == LATENTS
    shown = f"{summary['norm']['mean']:.4f}"
    assert "| arm | mean norm |" in (out / "span-norm.md").read_text() and shown in (out / "span-norm.md").read_text()
    assert f"Norms,{model},mean norm,{summary['norm']['mean']}" in (out / "span-norm.csv").read_text()
    assert shown in said and f"1 of {COUNT} questions cannot be read; these are left out (first: " in said


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_records(
    finished: tuple[Path, str], model: Path, data: Path, tmp_path: Path
) -> None:
    """Two processes, killed and continued, write what one process writes."""
    whole, cut = finished[0], tmp_path / "cut"
    args = command(model, data, cut, "--power", "3", "--processes", 2)
    process = start(*args)
    process.until(lambda: sum(part.read_bytes().count(b"\n") for part in cut.glob("span-norm.rank*.jsonl")) >= 2)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = [part.read_bytes() for part in cut.glob("span-norm.rank*.jsonl")]
    assert 2 <= sum(part.count(b"\n") for part in left) < COUNT, "it was over before it was killed"
    said = run(*args)
    assert "mean norm" in said
    for name in ("span-norm.jsonl", "span-norm.json", "span-norm.md", "span-norm.csv", "span-norm_settings.json"):
        assert (cut / name).read_text() == (whole / name).read_text()
    assert not list(cut.glob("*.rank*"))
    lines = (cut / "span-norm.jsonl").read_text().splitlines(keepends=True)
    (cut / "span-norm.jsonl").write_text("".join([lines[0], *lines[3:7]]) + lines[7][:20])  # one process goes on
    toy = load_file(TOY).SpanNorm
    diagnose([toy.configure({"power": 3.0})], DiagnoseSettings(str(model), data, cut, device="cpu", batch=1))
    again = [json.loads(line) for line in (cut / "span-norm.jsonl").read_text().splitlines()]
    assert [record["id"] for record in again] == [json.loads(line)["id"] for line in lines]


def test_a_folder_keeps_to_its_settings(finished: tuple[Path, str], model: Path, data: Path) -> None:
    toy = load_file(TOY).SpanNorm
    with pytest.raises(UserError, match="power was 3.0, now 2.0.*--out"):
        diagnose([toy()], DiagnoseSettings(str(model), data, finished[0], device="cpu"))


def test_it_is_listed_and_explained() -> None:
    assert re.search(r"span-norm +How long are the latents\? Needs a trained latent span; no value", run("diagnose"))
    said = run("diagnose", "span-norm", "--help")
    assert "--power" in said and "The p of the p-norm." in said and "How long are the latents?" in said
    assert "span-norm" not in run("diagnose", plugin=None)


# ---------------------------------------------------------------------- report and lists


def test_the_report_has_its_section(finished: tuple[Path, str], tmp_path: Path) -> None:
    out = finished[0]
    run("report", out, "--out", tmp_path / "with")
    norm = json.loads((out / "span-norm.json").read_text())["norm"]
    data = json.loads((tmp_path / "with" / "data.json").read_text())
    (section,) = [section for section in data["sections"] if section["id"] == "span-norm"]
    (table,) = [table for table in section["tables"] if table["caption"] == "Norms"]
    assert section["title"] == "Norm of the latents" and table["rows"][0][1]["value"] == norm["mean"]
    (effects,) = [table for table in data["sections"][0]["tables"] if "norm" in table["header"]]
    assert effects["rows"][0][effects["header"].index("norm")]["value"] == norm["mean"]
    page = (tmp_path / "with" / "index.html").read_text()
    assert "Mean norm of the latents: run " in page and "How long are the latents?" in page  # figure and question


def test_a_report_without_the_file_says_what_is_missing(finished: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path / "runs" / "norm")
    said = run("report", tmp_path / "runs", "--out", tmp_path / "out", plugin=None, code=2)
    assert f"{tmp_path / 'runs' / 'norm'} holds results of diagnostic span-norm" in said and "--plugin FILE.py" in said


def test_the_documentation_lists_every_diagnostic() -> None:
    row = r"^\| \[`([a-z-]+)`\]\(#[a-z-]+\) \| (.*) \| (.*) \| (yes|no) \|$"
    rows = re.findall(row, DOCS.read_text(), re.MULTILINE)
    listed = [(kind.name, kind.question, str(kind.needs), "yes" if kind.paper else "no") for kind in DIAGNOSTICS]
    assert rows == listed and len(listed) >= 4


def test_the_paper_s_values_are_those_of_its_tables() -> None:
    """Every number in the sentence stands in the table or figure that is named behind it."""
    for kind in DIAGNOSTICS:
        parts = re.split(r"\(((?:tab|fig):[a-z-]+)\)", kind.paper)
        for said, label in zip(parts[::2], parts[1::2], strict=False):
            printed = {value for row in published(label) for value, _ in row.values.values()}
            numbers = [float(n.replace("−", "-")) for n in re.findall(r"[−+]?\d+\.\d+", said)]
            assert len(numbers) >= 2 and set(numbers) <= printed | strengths(label), (kind.name, label)
        assert parts[-1] == ""  # nothing is claimed without a label


def strengths(label: str) -> set[float]:
    """Numbers in the names of a table's rows."""
    return {float(n) for row in published(label) for n in re.findall(r"\d+\.\d+", row.row)}


def test_lists_and_drawing_need_no_torch(finished: tuple[Path, str]) -> None:
    code = (
        "import importlib, pkgutil, sys, realvr.diagnostics as d\n"
        "for module in pkgutil.iter_modules(d.__path__): importlib.import_module(f'realvr.diagnostics.{module.name}')\n"
        f"from realvr.registry import use_plugins; use_plugins([{str(TOY)!r}])\n"
        "from pathlib import Path\n"
        f"kind = d.DIAGNOSTICS.get('span-norm'); summary = kind.read(Path({str(finished[0])!r}))[1]\n"
        "assert kind().section([d.Shown('a', summary)]).widgets and d.DIAGNOSTICS.names()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---------------------------------------------------------------------- refusals


def test_an_unknown_setting_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    said = run(*command(model, data, tmp_path / "out", "--powre", "3"), code=2)
    assert "--powre" in said and not (tmp_path / "out").exists()
    said = run("diagnose", "span-nrom", model, data, "--out", tmp_path / "out", code=2)
    assert "there is no diagnostic 'span-nrom'; did you mean 'span-norm'?" in said
    with pytest.raises(
        UserError, match=r"diagnostic grounding: negative: no such setting \(there are negatives, seed\)"
    ):
        DIAGNOSTICS.get("grounding").configure({"negative": 3})
    with pytest.raises(UserError, match="diagnostic grounding: negatives: Input should be .* equal to 1"):
        DIAGNOSTICS.get("grounding").configure({"negatives": 0})
    said = run(*command(model, data, tmp_path / "out", "--power", "-1"), code=2)
    assert said == "realvr: error: power: Input should be greater than 0 (got -1.0)\n"
    said = run("diagnose", "bias", model, data, "--out", tmp_path / "out", plugin=None, code=2)
    own = ", ".join(sorted(one.name for one in DIAGNOSTICS if one.__module__.startswith("realvr.")))
    assert "counterfactual, dependence, distances" in own
    assert f"(there are {own}; --plugin FILE.py adds one of your own)" in said


BROKEN = {
    "two of one name": ("name = 'span-norm'", "name = 'exchange'", "two diagnostics are called 'exchange'"),
    "no measure": ("def measure", "def mesure", "SpanNorm lacks measure "),
    "no needs": ("needs = Needs(span=True)", "", "SpanNorm lacks needs "),
    "name of a file": ("name = 'span-norm'", "name = 'summary'", "name is 'summary', which another command's files"),
    "odd name": ("name = 'span-norm'", "name = '../x'", "name is '../x': write small letters"),
    "common option": ("power: float", "limit: float", "setting 'limit' is an option of every diagnostic"),
    "no default": ("default=2.0, ", "", "setting 'power' has no default"),
    "needs in words": ("Needs(span=True)", "'span'", "needs is 'span': write Needs(...)"),
    "no settings": ("Settings = NormSettings", "Settings = dict", "Settings must be a subclass of DiagnosticSettings"),
}


@pytest.fixture
def registry() -> Iterator[Any]:
    """The registry, as it was again after the test."""
    DIAGNOSTICS.names()
    before = dict(DIAGNOSTICS._members)
    yield DIAGNOSTICS
    DIAGNOSTICS._members.clear()
    DIAGNOSTICS._members.update(before)


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_cannot_be_used_is_named_with_its_line(what: str, registry: Any, tmp_path: Path) -> None:
    old, new, said = BROKEN[what]
    text = TOY.read_text().replace('name = "span-norm"', "name = 'span-norm'")
    assert old in text
    file = tmp_path / "mine.py"
    file.write_text(text.replace(old, new))
    line = 1 + next(n for n, row in enumerate(file.read_text().splitlines()) if row.startswith("class SpanNorm"))
    with pytest.raises(UserError) as refused:
        registry.adopt(load_file(file))
    assert said in str(refused.value) and f"{file}:{line}" in str(refused.value)


MISTAKEN = {
    "no id": ('"id": sample.id, ', "", "measure must yield dicts whose 'id' names a sample of the batch"),
    "other id": ('"id": sample.id, ', '"id": "x" + sample.id, ', ".* whose 'id' names a sample of the batch"),
    "a tensor": ("norms_K.tolist()", "norms_K", "measure must yield JSON values; .*: Object of type Tensor"),
    "no dict": ('return {"norm": mean', 'return [0] or {"norm": mean', "summarise must return a dict, not list"),
    "text": ("return [Figures(", "return ['x', Figures(", r"draw must return a list of widgets \(Explorer, Figures"),
}


@pytest.mark.parametrize("what", MISTAKEN)
def test_what_the_code_gets_wrong_is_named_with_its_place(
    what: str, model: Path, data: Path, registry: Any, tmp_path: Path
) -> None:
    """And once it is right the same folder is continued, with nothing in it that the mistake has left."""
    old, new, said = MISTAKEN[what]
    assert old in TOY.read_text()
    file = tmp_path / "mine.py"
    file.write_text(TOY.read_text().replace(old, new))
    settings = DiagnoseSettings(str(model), data, tmp_path / "out", device="cpu", limit=2)
    with pytest.raises(UserError, match=rf"^{file}:\d+: {said}"):
        diagnose([load_file(file).SpanNorm()], settings)
    assert diagnose([load_file(TOY).SpanNorm()], settings)["span-norm"]["norm"]["pairs"] == 2


def test_a_mistake_in_the_summary_of_a_continued_run_is_not_blamed_on_the_records(
    model: Path, data: Path, registry: Any, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TOY.read_text().replace('record["norms"] for', 'record["nroms"] for'))
    settings = DiagnoseSettings(str(model), data, tmp_path / "out", device="cpu", limit=2)
    with pytest.raises(KeyError):
        diagnose([load_file(file).SpanNorm()], settings)
    line = 1 + next(n for n, row in enumerate(file.read_text().splitlines()) if "nroms" in row)
    with pytest.raises(UserError, match=rf"{file}:{line} cannot summarise the records \(KeyError: 'nroms'\); correct"):
        diagnose([load_file(file).SpanNorm()], settings)


def test_what_data_or_model_lack_is_named(model: Path, build_tiny: Any, tmp_path: Path) -> None:
    pairs, plain = tmp_path / "pairs.jsonl", tmp_path / "plain.jsonl"
    export(iter(world_samples(1)), "jsonl", pairs)
    rows = [json.loads(line) | {"boxes": []} for line in pairs.read_text().splitlines()]
    plain.write_text("".join(json.dumps(row | {"pair": None}) + "\n" for row in rows))
    untrained = build_tiny("qwen2.5-vl")
    cases: list[tuple[str, Path, Path, dict[str, Any], str]] = [
        (
            "grounding",
            model,
            plain,
            {},
            r"plain.jsonl: none of its 8 samples has evidence boxes, which diagnostic",
        ),
        ("distances", model, plain, {}, "plain.jsonl: no counterfactual pair found"),
        ("exchange", untrained, pairs, {}, r"has no trained latent span \(K = 0\), which diagnostic exchange needs"),
        ("exchange", model, pairs, {"second_model": "mini"}, "--second-model: diagnostic exchange looks at one model"),
        ("distances", model, pairs, {"batch": 0}, "--batch is 0"),
    ]
    for name, chosen, questions, options, said in cases:
        settings = DiagnoseSettings(str(chosen), questions, tmp_path / "out", device="cpu", **options)
        with pytest.raises(UserError, match=said):
            diagnose([DIAGNOSTICS.get(name)()], settings)
        assert not (tmp_path / "out").exists()


def test_a_second_model_is_loaded_where_it_is_needed(model: Path, data: Path, tmp_path: Path, registry: Any) -> None:
    """And a record for every sample is insisted on."""
    toy = load_file(TOY).SpanNorm

    class Both(toy):  # type: ignore[misc, valid-type]
        name = "both"
        needs = type(toy.needs)(span=True, second_model=True)

        def measure(self, model: Any, samples: Any) -> Any:
            other = {record["id"]: record for record in super().measure(model.second, samples)}
            for record in super().measure(model, samples):
                if record["id"] in other and record["error"] is None:
                    yield record | {
                        "norms": [a - b for a, b in zip(record["norms"], other[record["id"]]["norms"], strict=True)]
                    }

    settings = DiagnoseSettings(str(model), data, tmp_path / "out", device="cpu", limit=2)
    with pytest.raises(UserError, match="diagnostic both compares two models: name the other with --second-model"):
        diagnose([Both()], settings)
    two = DiagnoseSettings(str(model), data, tmp_path / "out", device="cpu", limit=2, second_model=str(model))
    found = diagnose([Both()], two)["both"]
    assert found["norm"]["mean"] == 0.0 and found["norm"]["pairs"] == 2
    assert found["settings"]["second_model"]["weights"] == found["settings"]["model"]["weights"] != ""
    three = DiagnoseSettings(str(model), data, tmp_path / "more", device="cpu", limit=3, second_model=str(model))
    with pytest.raises(UserError, match="diagnostic both left .* without a record"):
        diagnose([Both()], three)
