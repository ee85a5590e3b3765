"""Direct-SFT with auxiliary targets: against stock forwards of single examples, and beside Direct on the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import reference
from helpers import DEVICE, ask
from pair import Pair, gradients, relative
from realvr.backbone import Prompt
from realvr.data.sample import Box, Sample
from realvr.errors import UserError
from realvr.training.examples import Encoder
from realvr.training.method import Step
from realvr.training.methods.direct_aux import DirectAux, DirectAuxConfig
from realvr.training.sft_batch import SftExample, pack_rows
from stage_runs import column, configure, lines, make, numbers, run, world, write

K, WEIGHT = 3, 0.7
TARGETS = ((0, 3, 3), (), (2, 1, 0), (1, 2, 2))  # the second example has none


def example(pair: Pair, number: int) -> SftExample:
    """Prompt and response without a span. The last has two images."""
    shown = (number, number + 1) if number == 3 else (number,)
    prompt = pair.ours.prompt(ask(*shown, text="Which of the shapes is larger, and what is its color?"[: 20 + number]))
    text = torch.randint(5, 200, (2 + number,), generator=torch.Generator().manual_seed(number))
    targets = torch.tensor(TARGETS[number], dtype=torch.long)
    ids = torch.cat([prompt.ids, text])
    return SftExample(Prompt(ids, prompt.images), len(prompt), targets, earlier=len(targets))


def stock(pair: Pair, method: DirectAux, example: SftExample) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies, and the error of what the head reads from the last state of the prompt; by loops."""
    sequence = pair.begin([Prompt(example.prompt.ids, example.prompt.images)])
    hidden = reference.hidden(pair.stock, sequence, None)[0]
    ce = hidden.sum() * 0
    for place in range(example.prompt_length, len(example)):
        ce = ce - torch.log_softmax(pair.stock.lm_head(hidden[place - 1]), -1)[example.prompt.ids[place]]
    visual, width = sequence.embeds[sequence.image].detach(), hidden.shape[-1]
    error = hidden.sum() * 0
    for t, target in enumerate(example.targets.tolist()):
        part = slice(t * width, (t + 1) * width)
        read = method.head.weight[part] @ hidden[example.prompt_length - 1] + method.head.bias[part]
        error = error + ((read - visual[target]) ** 2).mean() / K
    return ce, error


@pytest.mark.parametrize("family", ["gemma3", "internvl3"], indirect=True)
def test_the_step_is_that_of_stock_forwards(exact: Pair) -> None:
    """Packed in two rows: loss, every gradient of the model, and those of the head."""
    config = DirectAuxConfig(
        span="fixed", auxiliary_targets=K, reconstruction_weight=WEIGHT, gradient_checkpointing=False
    )
    with reference.wide_softmax():
        method = DirectAux(exact.ours, config)
        examples = [example(exact, number) for number in range(4)]
        micro = pack_rows(exact.ours, [examples[:3], examples[3:]]).to(torch.device(DEVICE))
        micro.tokens_total, micro.targets_total = float(sum(2 + number for number in range(4))), 3.0
        loss, metrics = Step(method)(micro)
        parts = [stock(exact, method, one) for one in examples]
        right = sum(ce for ce, _ in parts) / micro.tokens_total + WEIGHT * sum(error for _, error in parts) / 3
        assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=1e-10)
        head = torch.autograd.grad(loss, method.head.weight, retain_graph=True)[0]
        wanted = torch.autograd.grad(right, method.head.weight, retain_graph=True)[0]
        torch.testing.assert_close(head, wanted, rtol=1e-9, atol=1e-12)
        assert relative(gradients(exact.ours.model, loss), gradients(exact.stock, right)) <= 1e-10
    assert not micro.slot_RT.any() and float(head.abs().max()) > 0
    assert [float(x) for x in metrics["data/with_targets"]] == [3, 4]


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(world(8, split="trails-train", size=48), tmp_path_factory.mktemp("trails"))


def test_rows_are_those_of_direct_and_the_head_is_not_exported(trails: Path, tmp_path: Path) -> None:
    """Killed after one of two steps and resumed, it ends where an uninterrupted run does."""
    asked = {"model": {"path": "mini-base", "latents": 0}, "optim": {"steps": 2}, "evidence_order": "given"}

    def raw(name: str, method: str, **more: object) -> dict:
        settings = configure("sft", Path("mini-base"), trails, tmp_path / name, method=method, **asked)
        return settings | more

    direct, aux = run("sft", raw("direct", "direct-sft")), run("sft", raw("aux", "direct-aux"))
    assert aux[0]["loss/next_token"] == pytest.approx(direct[0]["loss/next_token"], rel=1e-5)
    assert column(aux, "tokens") == column(direct, "tokens")
    assert aux[0]["loss/reconstruction"] > 0 and aux[0]["data/with_targets"] == 1
    assert json.loads((tmp_path / "aux" / "final" / "config.json").read_text())["realvr"]["latents"] == 0
    names = []
    for name in ("direct", "aux"):
        with safe_open(tmp_path / name / "final" / "model.safetensors", "pt") as file:
            names.append({key: file.get_slice(key).get_shape() for key in file.keys()})  # noqa: SIM118
    assert names[0] == names[1]
    halves = raw("halves", "direct-aux", checkpoint={"every": 1})
    run("sft", halves | {"optim": halves["optim"] | {"steps": 1}})
    assert numbers(run("sft", halves)) == numbers(aux) == numbers(lines(tmp_path / "aux"))


def test_targets_are_those_of_a_span(trails: Path, tmp_path: Path) -> None:
    """The eight cells that LVR-SFT would put into slots, and no marker in the sequence."""

    def made(method: str, latents: int) -> Any:
        asked = {"method": method, "model": {"latents": latents}, "span": "fixed", "evidence_order": "given"}
        return make("sft", configure("sft", Path("mini-base"), trails, tmp_path / method, **asked))[0]

    task, span = made("direct-aux", 0), made("lvr-sft", 8)
    for sample in world(4, split="trails-train", size=48):
        ours, theirs = task.encoder.sequence(sample), span.encoder.sequence(sample)
        assert ours.targets.tolist() == theirs.targets.tolist() and len(ours.targets) == 8
        cells = [6 * row + column for row, column in sample.meta["trail"]["cells"]]
        assert ours.targets.tolist() == cells + [cells[-1]] * (8 - len(cells))
        assert not set(ours.prompt.ids.tolist()) & set(vars(task.backbone.markers).values())
        assert not ours.behind_span and len(theirs) == len(ours) + 10


def test_more_boxes_than_targets_are_refused(trails: Path, tmp_path: Path) -> None:
    long = Sample.ask("long", world(1)[0].images, "?", "red", boxes=[Box(0, (0, 0, 0.1 * n, 0.2)) for n in range(1, 5)])
    given = write([long], tmp_path / "long")
    few = {"model": {"path": "mini-base", "latents": 0}, "auxiliary_targets": 3, "method": "direct-aux"}
    with pytest.raises(UserError, match="4 boxes, more than the 3 targets"):
        make("sft", configure("sft", Path("mini-base"), given, tmp_path / "c", **few))
    task, _, _ = make("sft", configure("sft", Path("mini-base"), given, tmp_path / "d", **few, too_many_boxes="thin"))
    assert isinstance(task.encoder, Encoder) and len(task.encoder.sequence(long).targets) == 3
