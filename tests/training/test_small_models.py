"""Options for models that learn from nothing: answers in words, the first latent watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.data.wording import readout_text
from realvr.errors import UserError
from realvr.latent import prefill, think
from realvr.training import rollouts
from realvr.zoo.tiny import build
from stage_runs import configure, make, run, with_markers, world, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("internvl3", "tiny", tmp_path_factory.mktemp("model") / "new")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(world(12), tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("spell_out", [False, True])
def test_an_answer_is_taught_in_words_before_its_letter(
    spell_out: bool, model: Path, data: Path, tmp_path: Path
) -> None:
    raw = configure("sft", model, data, tmp_path, optim={"batch": 3, "microbatch": 3}, spell_out=spell_out)
    task, _, _ = make("sft", raw)
    (batch,) = task.collect(0).microbatches
    known = {sample.id: sample for sample in world(12)}
    assert {bool(known[name].choices) for name in batch.names} == {True, False}
    rows, columns = batch.predict_M2[:, 0], batch.predict_M2[:, 1] + 1
    for number, name in enumerate(batch.names):
        mine = batch.segment_RT[rows, columns] == number
        text = task.backbone.tokenizer.decode([int(i) for i in batch.labels_M[mine]], skip_special_tokens=True)
        sample = known[name]
        block = f"<answer>{sample.answer}</answer>"
        assert text == (f"{sample.answer_text}\n{block}" if spell_out and sample.choices else block)


def test_stage_two_refuses_a_base(model: Path, data: Path, tmp_path: Path) -> None:
    """Its tokenizer has the markers since it was saved by us, but nobody trained them: K is 0."""
    base = with_markers(model, tmp_path / "base", latents=0)
    with pytest.raises(UserError, match="train Stage 1 first"):
        make("rl", configure("rl", base, data, tmp_path / "run"))


def test_the_first_latent_is_logged_apart(model: Path, data: Path, tmp_path: Path) -> None:
    """Against the state after the opening marker, example by example, with nothing of the evidence read yet."""
    task, _, _ = make("sft", configure("sft", model, data, tmp_path, optim={"batch": 3, "microbatch": 3}))
    backbone = task.backbone
    (batch,) = task.collect(0).microbatches
    _, metrics = task.module(batch)
    known = {sample.id: sample for sample in world(12)}
    found = []
    for name in batch.names:
        sample = known[name]
        prompt = backbone.prompt(conversation(sample, [image.open() for image in sample.images]))
        with torch.no_grad():
            state, _ = prefill(backbone, backbone.batch([prompt]))
            _, z_BKD = think(backbone, state, 1)
            target = backbone.encode_images(prompt.images).features_ND[task.encoder.sequence(sample).targets[0]]
        found.append(float(torch.nn.functional.cosine_similarity(z_BKD[0, 0], target, dim=0)))
    total, count = metrics["latents/cos_first"]
    assert float(count) == len(found) > 3
    assert float(total) == pytest.approx(sum(found), abs=1e-4)


def _answering_d(result: Any) -> Any:
    """The rollout with the last completion of each group replaced: an untrained model never gives a wrong answer."""
    for group in result.completions:
        group[-1].text = "<answer>D</answer>"
    return result


@pytest.mark.parametrize("spell_out", [False, True])
def test_an_answer_is_read_out_as_it_was_taught(
    spell_out: bool, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 1 leaves a checkpoint that remembers how it was taught to reply; Stage 2 reads answers out in that form."""
    optim = {"steps": 1, "batch": 2, "microbatch": 2}
    run("sft", configure("sft", model, data, tmp_path / "sft", optim=optim, spell_out=spell_out))
    trained = tmp_path / "sft" / "final"
    assert Backbone.load(trained, device="cpu").spell_out is spell_out
    raw = configure("rl", trained, data, tmp_path / "rl", optim={"steps": 1, "batch": 6, "microbatch": 6})
    task, _, _ = make("rl", raw)
    plain = rollouts.rollout
    monkeypatch.setattr(rollouts, "rollout", lambda *args, **options: _answering_d(plain(*args, **options)))
    (batch,) = task.collect(0).microbatches
    known = {sample.id: sample for sample in world(12)}
    seen = set()
    for row, name in enumerate(batch.names):
        sample, decode = known[name], task.backbone.tokenizer.decode
        for y in range(batch.answers_BYS.shape[1]):
            ids, real, content = (x[row, y] for x in (batch.answers_BYS, batch.answers_real_BYS, batch.content_BYS))
            if not bool(real.any()):
                continue
            text = decode(ids[real])
            answer = text.split("<answer>")[1].removesuffix("</answer>")
            assert (answer == sample.answer) == (y == 0)
            words = sample.choices["ABCDE".index(answer)] if spell_out and sample.choices else ""
            assert text == (f"{words}\n" if words else "") + f"<answer>{answer}</answer>"
            told = decode(ids[content]).replace("\n", "").replace(">", "").replace("<", "").replace("/", "")
            assert told == f"{words}{answer}", told
            seen.add((bool(sample.choices), y == 0))
    assert len(seen) == 4
    task.export(tmp_path / "again")
    assert Backbone.load(tmp_path / "again", device="cpu").spell_out is spell_out


def test_a_base_remembers_that_it_spells_out(model: Path, data: Path, tmp_path: Path) -> None:
    run("base", configure("base", model, data, tmp_path / "base", optim={"batch": 2}))
    assert Backbone.load(tmp_path / "base" / "final", device="cpu").spell_out


def test_words_are_the_letter_s_option() -> None:
    assert readout_text("B", ["a cat", "two dogs"], True) == ("two dogs\n<answer>B</answer>", [(0, 8), (17, 18)])
    assert readout_text("B", ["a cat", "two dogs"]) == ("<answer>B</answer>", [(8, 9)])
    assert readout_text("B", (), True) == ("<answer>B</answer>", [(8, 9)])
    assert readout_text("a cat", ["a cat", "two dogs"], True) == ("<answer>a cat</answer>", [(8, 13)])
