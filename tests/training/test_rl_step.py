"""The Stage-2 step against the naive reference: loss and every gradient in float64, all families, all variants.

The reference (``reference/naive_stage2.py``) re-runs the whole prompt for every completion, latent step and answer.
Measured on the CPU: losses and gradients agree to 1e-14 relative once the MoE router's float32 softmax is widened on
both sides, and to 5e-8 with the stock one.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import naive_stage2 as naive
import op_tape
import reference
from helpers import DEVICE, ask, patch_grids
from host_syncs import HostSyncs
from pair import Pair, gradients, relative
from realvr.backbone import Prompt
from realvr.backbone.attention import Columns
from realvr.latent import prefill, score, splice, think
from realvr.latent.recorded_span import RecordedSpan
from realvr.maths import grpo
from realvr.training.method import Step
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.rl_batch import RlBatch

K, G, M = 3, 3, 4
TOLERANCE = 1e-10
ROUTER_TOLERANCE = 1e-6  # the stock MoE router, and stock eager attention, compute their softmax in float32
LENGTHS = ((4, 2, 3), (1, 5, 2))
ADVANTAGES = ((1.1, -0.7, -0.4), (0.6, 0.0, -0.9))
ANSWERS = ((5, 3, 4), (4,))  # lengths of the formatted answers: two wrong ones, none
CONTENT = (((1, 2, 3), (1,), (2, 3)), ((1, 2),))
NEGATIVES = (2, 3)


def configured(**changes: Any) -> ReaLVRConfig:
    """Settings of the method, also combinations that a settings file may not have."""
    return ReaLVRConfig(type="custom", memory="cached").model_copy(update=changes)


MASS_MATCHED = {
    f"mass-matched {where}{what}": configured(routing=routing, objective=objective, mass_matched=True)
    for where, routing in (("U", "uniform"), ("C", "selective"))
    for what, objective in (("+", "hinge-positive"), ("+-", "contrast"))
}
VARIANTS: dict[str, ReaLVRConfig] = {
    "realvr": configured(),
    "lambda 0": configured(lambda_ev=0.0),
    "uniform": configured(routing="uniform"),
    "selective only": configured(eta=0.0),
    "raw attention": configured(routing="raw"),
    "no negatives, hinge": configured(objective="hinge-positive"),
    "no negatives, align": configured(objective="align"),
    "undetached": configured(detach=False),
    "undetached mass-matched": configured(detach=False, mass_matched=True),
    "off-policy": configured(on_policy=False),
    "off-policy undetached": configured(on_policy=False, detach=False),
    **MASS_MATCHED,
    "dr_grpo": configured(reduction="dr_grpo", max_new=7),
    "bnpo, wide upper clip": configured(reduction="bnpo", clip=0.1, clip_high=0.3, temperature=1.3),
    "kl": configured(beta=0.4, reduction="bnpo"),
    "normalised": configured(credit="normalised"),
}
ONE_FAMILY = pytest.mark.parametrize("family", ["gemma3"], indirect=True)  # windows, two-way images, tied embeddings


@pytest.fixture(autouse=True)
def _wide_softmax(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.function is test_equals_the_naive_reference_with_stock_softmax:
        yield
        return
    with reference.wide_softmax():
        yield


# ---------------------------------------------------------------------- the data


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE) * scale


@dataclass
class Data:
    """One step's data for two prompts, as the reference takes it, and the prompts."""

    prompts: list[Prompt]
    examples: list[naive.Example]

    def with_evidence(self, prompt: int, **changes: Any) -> Data:
        examples = [replace(e, **changes) if i == prompt else e for i, e in enumerate(self.examples)]
        return Data(self.prompts, examples)

    def part(self, *rows: int) -> Data:
        return Data([self.prompts[i] for i in rows], [self.examples[i] for i in rows])


def make_data(pair: Pair, latents: int = K) -> Data:
    backbone = pair.ours
    prompts = [backbone.prompt(ask(0)), backbone.prompt(ask(1, text="Which of the two shapes is larger, and why?"))]
    generator = torch.Generator().manual_seed(3)
    barred = set(backbone.forbidden_ids().tolist())
    allowed = torch.tensor([i for i in range(len(backbone.tokenizer)) if i not in barred])

    def text(count: int) -> Tensor:
        return allowed[torch.randint(len(allowed), (count,), generator=generator)].to(DEVICE)

    with torch.no_grad():
        _, z_BKD = think(backbone, prefill(backbone, backbone.batch(prompts))[0], latents)
    examples = []
    for b, prompt in enumerate(prompts):
        contents = [torch.zeros(count, dtype=torch.bool, device=DEVICE) for count in ANSWERS[b]]
        for content, places in zip(contents, CONTENT[b], strict=True):
            content[list(places)] = True
        # The saved latents come from an older policy: near today's, but not equal.
        saved = (
            z_BKD[b] + normal(latents, backbone.width, seed=10 + b, scale=0.2) * z_BKD.std() if latents else z_BKD[b]
        )
        positive = normal(backbone.width, seed=20 + b)
        if b == 0 and latents:
            positive = z_BKD[b, 1] - z_BKD[b, 0]  # tells the latents apart
        examples.append(
            naive.Example(
                prompt=prompt.ids,
                completions=[text(count) for count in LENGTHS[b]],
                latents=saved,
                advantages=ADVANTAGES[b],
                old_logp=[],
                answers=[text(count) for count in ANSWERS[b]],
                content=contents,
                positive=positive,
                negatives=list(normal(NEGATIVES[b], backbone.width, seed=30 + b)),
                pixels=torch.cat([image.pixels for image in prompt.images]),
                grid_thw=patch_grids(backbone, prompt.images) if backbone.mrope else None,
            )
        )
    # Recorded log-probabilities: today's and a shift that leaves the clip range at some tokens.
    data = Data(prompts, examples)
    today = policy_logp(pair, data)
    for b, example in enumerate(examples):
        example.old_logp = [
            today[b, i, :count] + normal(count, seed=40 + 3 * b + i, scale=0.3) for i, count in enumerate(LENGTHS[b])
        ]
        example.ref_logp = [
            today[b, i, :count] + normal(count, seed=60 + 3 * b + i, scale=0.5) for i, count in enumerate(LENGTHS[b])
        ]
    return data


def policy_logp(pair: Pair, data: Data, temperature: float = 0.6) -> Tensor:
    micro = our_batch(pair, data, configured())
    with torch.no_grad():
        state, _ = splice(pair.ours, prefill(pair.ours, micro.batch)[0], micro.latents_BKD)
        forbidden = pair.ours.forbidden_ids()
        return score(pair.ours, state, micro.ids_BGS, micro.real_BGS, temperature=temperature, forbidden=forbidden)[0]


def padded(groups: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """(B, n, S) and which entries are real; groups of unequal size are filled with empty rows."""
    size = max(len(x) for group in groups for x in group)
    shape = (len(groups), max(len(group) for group in groups), size)
    values = torch.zeros(shape, dtype=groups[0][0].dtype, device=DEVICE)
    real = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    for b, group in enumerate(groups):
        for i, x in enumerate(group):
            values[b, i, : len(x)], real[b, i, : len(x)] = x, True
    return values, real


def our_batch(pair: Pair, data: Data, options: ReaLVRConfig, step: Data | None = None) -> RlBatch:
    """The data as the step takes it. ``step`` is the data of the whole optimizer step, if this is a part of it."""
    backbone, examples = pair.ours, data.examples
    whole = (step or data).examples
    ids, real = padded([e.completions for e in examples])
    answers, answers_real = padded([e.answers for e in examples])
    content, _ = padded([e.content for e in examples])
    _, step_real = padded([e.completions for e in whole])
    negatives = torch.zeros(len(examples), M, *examples[0].positive.shape, dtype=torch.float64, device=DEVICE)
    valid = torch.zeros(len(examples), M, dtype=torch.bool, device=DEVICE)
    for b, example in enumerate(examples):
        for m, negative in enumerate(example.negatives):
            negatives[b, m], valid[b, m] = negative, True
        # What is not valid may look however it likes, even exactly like a latent.
        negatives[b, len(example.negatives) :] = example.positive
    old = padded([e.old_logp for e in examples])[0] if examples[0].old_logp else torch.zeros_like(ids).double()
    batch = backbone.batch(data.prompts)
    return RlBatch(
        batch=batch,
        visual=backbone.encode_images(batch.images),
        latents_BKD=torch.stack([e.latents for e in examples]),
        ids_BGS=ids,
        real_BGS=real,
        old_logp_BGS=old,
        advantages_BG=torch.tensor([e.advantages for e in examples], dtype=torch.float64, device=DEVICE),
        policy_denominator=grpo.normalizer(step_real, options.reduction, options.max_new),
        positive_BD=torch.stack([e.positive for e in examples]),
        negatives_BMD=negatives,
        valid_BM=valid,
        answers_BYS=answers,
        answers_real_BYS=answers_real,
        content_BYS=content,
        wrong_BY=answers_real.any(-1)[:, 1:],
        prompts_total=float(len(whole)),
        ref_logp_BGS=padded([e.ref_logp for e in examples])[0] if examples[0].ref_logp else None,
    )


def ours(pair: Pair, data: Data, options: ReaLVRConfig, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
    """Loss and metrics of our step."""
    step = kwargs.pop("step", None)
    return Step(ReaLVR(pair.ours, options))(our_batch(pair, data, options, step), **kwargs)


def right(pair: Pair, data: Data, options: ReaLVRConfig, **kwargs: Any) -> naive.Outcome:
    """What the reference says."""
    named = {name: getattr(options, name) for name in naive.Options.__dataclass_fields__}
    markers = naive.Markers(pair.ours.markers.start, pair.ours.markers.slot, pair.ours.markers.end)
    forbidden = pair.ours.forbidden_ids().tolist()
    return naive.Naive(pair.stock, markers, naive.Options(**named), forbidden).run(data.examples, **kwargs)


def value(metrics: dict[str, Any], name: str) -> float:
    total, count = metrics[name]
    return float(total) / float(count)


def check(pair: Pair, data: Data, options: ReaLVRConfig, tolerance: float = TOLERANCE) -> naive.Outcome:
    """Loss and every gradient are those of the reference."""
    loss, metrics = ours(pair, data, options)
    expected = right(pair, data, options)
    assert float((loss - expected.loss).detach().abs()) <= tolerance * float(expected.loss.detach().abs())
    found, wanted = gradients(pair.ours.model, loss), gradients(pair.stock, expected.loss)
    assert relative(found, wanted) <= tolerance
    assert value(metrics, "loss") == pytest.approx(float(expected.loss.detach()), rel=1e-5)
    return expected


@pytest.fixture(scope="module")
def data(exact: Pair) -> Data:
    with reference.wide_softmax():
        return make_data(exact)


# ---------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_naive_reference(exact: Pair, data: Data, variant: str) -> None:
    expected = check(exact, data, VARIANTS[variant])
    if variant == "realvr":
        assert float(expected.credit[0].sum()) > 1e-5, "answer contrast must matter"
        assert float(expected.credit[1].sum()) == 0, "no wrong answer, no credit"
        assert all(float(term) > 1e-3 for term in expected.terms)
        used = [float(g.norm()) > 0 for g in gradients(exact.stock, right(exact, data, configured()).loss).values()]
        assert sum(used) > 0.9 * len(used), "the loss must reach (nearly) every decoder parameter"


@ONE_FAMILY
@pytest.mark.parametrize("changes", [{"credit": "normalised", "detach": False}, {"objective": "hinge-positive"}])
def test_each_latent_against_a_prototype_of_its_own(exact: Pair, data: Data, changes: dict[str, Any]) -> None:
    """Positives and negatives of shape (K, D): latent t is held against the t-th of each."""
    for row, example in enumerate(data.examples):
        own = torch.stack([example.positive, *normal(K - 1, exact.ours.width, seed=50 + row)])
        others = list(normal(len(example.negatives), K, exact.ours.width, seed=55 + row))
        data = data.with_evidence(row, positive=own, negatives=others)
    expected = check(exact, data, configured(**changes))
    assert all(float(term) > 1e-3 for term in expected.terms)


@pytest.mark.parametrize("family", ["qwen3-vl-moe"], indirect=True)
@pytest.mark.parametrize("variant", ["realvr", "undetached"])
def test_equals_the_naive_reference_with_stock_softmax(exact: Pair, data: Data, variant: str) -> None:
    """Nothing widened but the norms: what the float32 router allows."""
    check(exact, data, VARIANTS[variant], ROUTER_TOLERANCE)


@pytest.mark.parametrize("case", ["no negative", "zero negatives", "zero positive"])
def test_an_undefined_evidence_term_is_zero(exact: Pair, data: Data, case: str) -> None:
    """One prompt has no margin: it contributes nothing but still counts in the mean."""
    zero = torch.zeros(exact.ours.width, dtype=torch.float64, device=DEVICE)
    changes = {
        "no negative": {"negatives": []},
        "zero negatives": {"negatives": [zero]},
        "zero positive": {"positive": zero},
    }
    data = data.with_evidence(0, **changes[case])
    expected = check(exact, data, configured())
    assert float(expected.terms[0]) == 0 and float(expected.terms[1]) > 0
    assert float(expected.evidence) == pytest.approx(float(expected.terms[1]) / 2)
    _, metrics = ours(exact, data, configured())
    assert value(metrics, "evidence/undefined") == 0.5


def test_both_sides_of_the_hinge(exact: Pair, data: Data) -> None:
    """A target margin between the best latents: one slot has reached it, the others have not."""
    margins = sorted(margin for prompt in margins_of(data, right(exact, data, configured())) for margin in prompt)
    options = configured(margin=(margins[-1] + margins[-2]) / 2)
    check(exact, data, options)
    assert value(ours(exact, data, options)[1], "evidence/active_hinge") == pytest.approx(5 / 6)


def margins_of(data: Data, found: naive.Outcome) -> list[list[float]]:
    return [
        [float(naive.cosine(z, e.positive) - max(naive.cosine(z, p) for p in e.negatives)) for z in latents]
        for e, latents in zip(data.examples, found.latents, strict=True)
    ]


@ONE_FAMILY
@pytest.mark.parametrize("objective", ["hinge-positive", "align"])
def test_positive_only_arms_need_no_negative(exact: Pair, data: Data, objective: Any) -> None:
    lonely = data.with_evidence(0, negatives=[]).with_evidence(1, negatives=[])
    expected = check(exact, lonely, configured(objective=objective))
    assert all(float(term) > 0 for term in expected.terms)


@ONE_FAMILY
def test_active_hinge_is_that_of_the_arms_own_loss(exact: Pair, data: Data) -> None:
    """Half of the slots reach the target by their cosine while no margin does: the negatives equal ``p+``."""
    alike = data
    for row, example in enumerate(data.examples):
        alike = alike.with_evidence(row, negatives=[example.positive])
    latents = right(exact, alike, configured()).latents
    cosines = sorted(
        float(naive.cosine(z, e.positive)) for e, some in zip(data.examples, latents, strict=True) for z in some
    )
    target = (cosines[2] + cosines[3]) / 2
    assert target > 0
    plus = configured(objective="hinge-positive", margin=target)
    expected = {"contrast": 1.0, "hinge-positive": 0.5, "align": 1.0}
    for objective, share in expected.items():
        _, metrics = ours(exact, alike, plus.model_copy(update={"objective": objective}))
        assert value(metrics, "evidence/active_hinge") == pytest.approx(share), objective
    # A target that every slot has reached: no loss, so nothing is active, also without any negative.
    reached = configured(objective="hinge-positive", margin=min(abs(c) for c in cosines) / 2)
    z_BKD = torch.stack(latents)
    for negatives in ([data.examples[0].positive], []):
        done = data.with_evidence(0, positive=z_BKD[0].mean(0), negatives=negatives)
        done = done.with_evidence(1, positive=z_BKD[1].mean(0), negatives=negatives)
        loss, metrics = ours(exact, done, reached, term="evidence")
        assert float(loss.detach()) == 0 and value(metrics, "evidence/active_hinge") == 0
        assert value(metrics, "evidence/undefined") == 0, "positive-only arms need no negative"


def test_without_latents(exact: Pair) -> None:
    """Direct: no span, no markers, no evidence."""
    direct = make_data(exact, latents=0)
    expected = check(exact, direct, configured())
    assert float(expected.evidence) == 0
    _, metrics = ours(exact, direct, configured())
    assert not any(name.startswith(("evidence/", "latents/")) or name == "loss/evidence" for name in metrics)


@ONE_FAMILY
def test_options_of_the_reference_change_nothing(exact: Pair, data: Data) -> None:
    """Completions as rows of one pass, precomputed visual tokens, a backward per term."""
    options = configured()
    plain = right(exact, data, options)
    expected = gradients(exact.stock, plain.loss)
    seen = [exact.ours.encode_images(prompt.images) for prompt in data.prompts]
    given = Data(
        data.prompts,
        [
            replace(e, pixels=None, features=(v.features_ND, v.deepstack))
            for e, v in zip(data.examples, seen, strict=True)
        ],
    )
    for changed, kwargs in ((data, {"together": True}), (given, {})):
        again = right(exact, changed, options, **kwargs)
        assert float(again.loss) == pytest.approx(float(plain.loss), rel=TOLERANCE)
        assert relative(gradients(exact.stock, again.loss), expected) <= TOLERANCE
    exact.stock.zero_grad()
    streamed = right(exact, data, options, backward=True)
    found = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in exact.stock.named_parameters() if n in expected
    }
    exact.stock.zero_grad()
    assert not streamed.loss.requires_grad and float(streamed.loss) == pytest.approx(float(plain.loss), rel=TOLERANCE)
    assert relative(found, expected) <= TOLERANCE
    assert plain.passes == 2 * G + 2 * K + 4  # completions, latent steps, answers: a whole prompt each


def test_the_reference_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(naive.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert "torch" in foreign and foreign <= {"torch", "transformers"}


@ONE_FAMILY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reference_runs_in_other_formats(data: Data, marked: Path, exact: Pair, dtype: torch.dtype) -> None:
    """As the benchmark uses it: precomputed numbers in any format, a backward per term, completions as rows."""
    expected = float(right(exact, data, configured(detach=False)).loss.detach())
    narrow = Pair(exact.ours, reference.load(marked, dtype, "sdpa", DEVICE))
    outcome = right(narrow, data, configured(detach=False), backward=True, together=True)
    assert float(outcome.loss) == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 0.1)
    found = [p.grad for p in narrow.stock.parameters() if p.requires_grad]
    assert all(g is not None and bool(g.isfinite().all()) for g in found)


# ---------------------------------------------------------------------- the same numbers another way


@pytest.mark.parametrize("variant", ["realvr", "undetached", "off-policy"])
def test_memory_modes_agree(exact: Pair, data: Data, variant: str) -> None:
    results = []
    for memory, share in (
        ("cached", 1),
        ("checkpointed-prefill", 1),
        ("checkpointed-prefill", 0.3),
        ("checkpointed", 1),
    ):
        loss, _ = ours(exact, data, VARIANTS[variant].model_copy(update={"memory": memory, "recompute": share}))
        results.append((float(loss.detach()), gradients(exact.ours.model, loss)))
    for loss, found in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-12)
        assert relative(found, results[0][1]) <= 1e-12


@pytest.mark.parametrize("memory", ["cached", "checkpointed-prefill", "checkpointed"])
@pytest.mark.parametrize("variant", ["realvr", "kl", "undetached", "off-policy"])
def test_split_attention_equals_the_naive_reference(
    exact: Pair, data: Data, variant: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and completions of unequal length, a padded trunk. Only a readout with gradient and short windows need a
    mask; latent steps need none, windows or not."""
    masks: list[tuple[Columns, int, int | None]] = []
    visible = Columns.visible

    def seen(columns: Columns, queries: int, window: int | None, device: torch.device) -> Tensor | None:
        masks.append((columns, queries, window))
        return visible(columns, queries, window, device)

    monkeypatch.setattr(Columns, "visible", seen)
    check(exact, data, VARIANTS[variant].model_copy(update={"memory": memory, "split_attention": True}))
    branches = [window for columns, _, window in masks if columns.segment is not None]
    if variant == "undetached":
        assert None in branches
    else:
        assert all(window is not None for window in branches) and bool(branches) == exact.ours.windowed
    assert not any(queries in (1, 2) for _, queries, _ in masks)
    spans = [window for columns, queries, window in masks if queries == K + 2 and columns.segment is None]
    assert all(window is not None for window in spans) and bool(spans) == exact.ours.windowed


def test_split_attention_scores_as_the_start_of_the_run(exact: Pair, data: Data) -> None:
    """Log-probabilities without a graph, behind one prompt without padding and behind both."""
    for part in (data, data.part(0)):
        micro, found = our_batch(exact, part, configured()), []
        for split in (False, True):
            with torch.no_grad():
                state, _ = prefill(exact.ours, micro.batch)
                state, _ = splice(exact.ours, state, micro.latents_BKD, branches=int(split))
                found.append(score(exact.ours, state, micro.ids_BGS, micro.real_BGS, split=split)[0])
        assert float((found[0] - found[1]).abs().max()) <= 1e-12


@ONE_FAMILY
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("memory", ["cached", "checkpointed-prefill"])
@pytest.mark.parametrize("variant", ["realvr", "undetached"])
def test_a_recorded_span_equals_the_naive_reference(
    exact: Pair, data: Data, variant: str, memory: str, split: bool
) -> None:
    """Recorded with one step and repeated with the same prompts in another order."""
    options = VARIANTS[variant].model_copy(update={"memory": memory, "recorded_span": True, "split_attention": split})
    method = ReaLVR(exact.ours, options)
    assert method.recorded is not None and ReaLVR(exact.ours, VARIANTS[variant]).recorded is None
    method.recorded = RecordedSpan(exact.ours, record=op_tape.record)
    for part in (data, data.part(1, 0)):
        loss, _ = Step(method)(our_batch(exact, part, options))
        wanted = gradients(exact.stock, right(exact, part, options).loss)
        assert relative(gradients(exact.ours.model, loss), wanted) <= TOLERANCE
    assert method.recorded.counts == {"recorded": 1, "replayed": 2}
    assert [each.split for each in method.recorded._recordings.values()] == [split]


@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
def test_split_attention_makes_the_host_wait_no_longer(exact: Pair, data: Data) -> None:
    """Padded trunks included: where their padding ends is only known on the device."""
    waits = []
    for split in (False, True):
        options = configured(split_attention=split)
        batch = our_batch(exact, data, options)
        with HostSyncs() as syncs:
            Step(ReaLVR(exact.ours, options))(batch)
        waits.append(syncs.found)
    assert waits[0] == waits[1]


@pytest.mark.parametrize("variant", ["realvr", "off-policy"])
def test_parts_add_up(exact: Pair, data: Data, variant: str) -> None:
    options = VARIANTS[variant]
    whole, _ = ours(exact, data, options)
    parts = {term: ours(exact, data, options, term=term) for term in ("policy", "evidence")}
    assert float(sum(loss.detach() for loss, _ in parts.values())) == pytest.approx(float(whole.detach()), rel=1e-12)
    apart = [gradients(exact.ours.model, loss) for loss, _ in parts.values()]
    together = {name: apart[0][name] + apart[1][name] for name in apart[0]}
    assert relative(together, gradients(exact.ours.model, whole)) <= 1e-12
    expected = right(exact, data, options)
    assert float(parts["policy"][0]) == pytest.approx(float(expected.policy), rel=TOLERANCE)
    assert float(parts["evidence"][0]) == pytest.approx(options.lambda_ev * float(expected.evidence), rel=TOLERANCE)
    assert not any(name.startswith("evidence/") for name in parts["policy"][1])
    assert not any(name.startswith("policy/") for name in parts["evidence"][1])


@pytest.mark.parametrize("variant", ["realvr", "dr_grpo", "kl"])
def test_microbatches_add_up(exact: Pair, data: Data, variant: str) -> None:
    """With the denominators of the whole step; ``kl`` is reduced by tokens, which the parts share unequally."""
    options = VARIANTS[variant]
    joint, joint_metrics = ours(exact, data, options)
    parts = [ours(exact, data.part(row), options, step=data) for row in (0, 1)]
    total = parts[0][0] + parts[1][0]
    assert float(total) == pytest.approx(float(joint), rel=1e-12)
    assert relative(gradients(exact.ours.model, total), gradients(exact.ours.model, joint)) <= TOLERANCE
    for name in joint_metrics:
        sums = [sum(float(metrics[name][i]) for _, metrics in parts) for i in (0, 1)]
        assert sums[1] == pytest.approx(float(joint_metrics[name][1])), name
        assert sums[0] == pytest.approx(float(joint_metrics[name][0]), rel=1e-5, abs=1e-7), name


@ONE_FAMILY
def test_order_of_prompts_does_not_matter(exact: Pair, data: Data) -> None:
    loss, _ = ours(exact, data, configured())
    swapped, _ = ours(exact, data.part(1, 0), configured())
    assert float(swapped) == pytest.approx(float(loss), rel=1e-12)


# ---------------------------------------------------------------------- each variant does what it says


def grads(pair: Pair, data: Data, options: ReaLVRConfig, term: str | None = None) -> tuple[float, dict[str, Tensor]]:
    loss, _ = ours(pair, data, options, term=term)
    return float(loss.detach()), gradients(pair.ours.model, loss)


@ONE_FAMILY
def test_lambda_zero_is_the_policy_part(exact: Pair, data: Data) -> None:
    loss, found = grads(exact, data, configured(lambda_ev=0.0))
    expected_loss, expected = grads(exact, data, configured(), term="policy")
    assert loss == expected_loss and relative(found, expected) == 0
    _, metrics = ours(exact, data, configured(lambda_ev=0.0))
    assert "loss/evidence" not in metrics
    nothing, found = grads(exact, data, configured(lambda_ev=0.0), term="evidence")
    assert nothing == 0 and all(float(g.abs().max()) == 0 for g in found.values())


@ONE_FAMILY
def test_lambda_scales_the_evidence_part_alone(exact: Pair, data: Data) -> None:
    loss, found = grads(exact, data, configured(lambda_ev=0.2), term="evidence")
    twice, found_twice = grads(exact, data, configured(lambda_ev=0.4), term="evidence")
    assert twice == pytest.approx(2 * loss, rel=1e-12)
    assert relative(found_twice, {name: 2 * g for name, g in found.items()}) <= 1e-12


@ONE_FAMILY
def test_eta_one_is_uniform_routing(exact: Pair, data: Data) -> None:
    loss, found = grads(exact, data, configured(eta=1.0))
    for same in (configured(routing="uniform", eta=0.0), configured(routing="uniform", mass_matched=True)):
        uniform_loss, uniform = grads(exact, data, same)
        assert loss == pytest.approx(uniform_loss, rel=1e-12) and relative(found, uniform) <= 1e-12
    assert loss != pytest.approx(grads(exact, data, configured())[0], rel=1e-6)


@ONE_FAMILY
def test_without_wrong_answers_credit_is_zero(exact: Pair, data: Data) -> None:
    """Then weights are eta / K, selective-only routing gives nothing, and raw attention still routes."""
    first = data.examples[0]
    alone = data.with_evidence(0, answers=first.answers[:1], content=first.content[:1])
    _, metrics = ours(exact, alone, configured())
    assert value(metrics, "evidence/credit_mass") == 0 and value(metrics, "evidence/has_wrong_answer") == 0
    default, _ = grads(exact, alone, configured(eta=0.3), term="evidence")
    uniform, _ = grads(exact, alone, configured(eta=1.0), term="evidence")
    assert default == pytest.approx(0.3 * uniform, rel=1e-12)
    nothing, found = grads(exact, alone, configured(eta=0.0), term="evidence")
    assert nothing == 0 and all(float(g.abs().max()) == 0 for g in found.values())
    raw, _ = grads(exact, alone, configured(eta=0.0, routing="raw"), term="evidence")
    assert raw > 0


@pytest.mark.parametrize("on_policy", [True, False])
def test_undetached_changes_the_gradient_and_not_the_loss(exact: Pair, data: Data, on_policy: bool) -> None:
    detached = configured(on_policy=on_policy)
    loss, found = grads(exact, data, detached, term="evidence")
    undetached_loss, undetached = grads(exact, data, detached.model_copy(update={"detach": False}), term="evidence")
    assert undetached_loss == pytest.approx(loss, rel=1e-12)
    assert relative(undetached, found) > 1e-4


@ONE_FAMILY
def test_undetached_gradient_is_the_detached_one_plus_the_router_term(exact: Pair, data: Data) -> None:
    """app:detached-credit: with the hinge values as constants, what remains is sum_t h_t grad w_t."""
    options = configured(detach=False)
    detached = gradients(exact.stock, right(exact, data, configured()).evidence)
    reading = naive.Naive(
        exact.stock, naive.Markers(*vars(exact.ours.markers).values()), naive.Options(detach=False), ()
    )
    router = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for example in data.examples:
        z = reading._regenerate(example)
        readouts = [reading._readout(example, z, a, c) for a, c in zip(example.answers, example.content, strict=True)]
        weights = reading._weights(reading._credit(readouts))
        for t in range(K):
            state = z[t].detach()
            g = naive.cosine(state, example.positive) - max(naive.cosine(state, p) for p in example.negatives)
            router = router + weights[t] * torch.relu(0.5 - g) / 2
    term = gradients(exact.stock, router)
    _, found = grads(exact, data, options, term="evidence")
    expected = {name: 0.2 * (detached[name] + term[name]) for name in term}
    assert relative(found, expected) <= TOLERANCE
    assert relative(found, {name: 0.2 * g for name, g in detached.items()}) > 1e-4


@ONE_FAMILY
def test_off_policy_reads_the_saved_latents(exact: Pair, data: Data) -> None:
    """On-policy evidence does not see what was saved; off-policy evidence does, and has no recurrence."""
    moved = data.with_evidence(0, latents=data.examples[0].latents + 0.3)
    on, off = configured(), configured(on_policy=False)
    assert grads(exact, moved, on, "evidence")[0] == pytest.approx(grads(exact, data, on, "evidence")[0], rel=1e-12)
    before, after = grads(exact, data, off, "evidence"), grads(exact, moved, off, "evidence")
    assert before[0] != pytest.approx(after[0], rel=1e-6)
    # With the model's own latents saved, both see the same states; only the gradient differs.
    with torch.no_grad():
        _, z_BKD = think(exact.ours, prefill(exact.ours, exact.ours.batch(data.prompts))[0], K)
    fresh = data.with_evidence(0, latents=z_BKD[0]).with_evidence(1, latents=z_BKD[1])
    loss, recurrent = grads(exact, fresh, on, "evidence")
    same, parallel = grads(exact, fresh, off, "evidence")
    assert same == pytest.approx(loss, rel=TOLERANCE)
    assert relative(parallel, recurrent) > 1e-3


@ONE_FAMILY
def test_every_mass_matched_arm_computes_both_branches(exact: Pair, data: Data) -> None:
    """Readout and negatives are measured in all four arms; weights have mass 1 with and without a wrong answer."""
    for name, options in MASS_MATCHED.items():
        _, metrics = ours(exact, data, options)
        assert value(metrics, "evidence/readout_mass") > 0, name
        assert value(metrics, "evidence/cos_hardest_negative") != 0, name
        assert all(float(w.sum()) == pytest.approx(1) for w in right(exact, data, options).weights), name
    with pytest.raises(ValueError, match="eta > 0"):
        ours(exact, data, configured(mass_matched=True, eta=0.0))


@ONE_FAMILY
def test_advantages_of_zero_leave_the_evidence(exact: Pair, data: Data) -> None:
    """A batch whose groups have no variance has no policy gradient but still learns from evidence."""
    flat = data.with_evidence(0, advantages=(0.0,) * G).with_evidence(1, advantages=(0.0,) * G)
    loss, found = grads(exact, flat, configured(), term="policy")
    assert loss == 0 and all(float(g.abs().max()) == 0 for g in found.values())
    whole, both = grads(exact, flat, configured())
    assert whole > 0 and relative(both, grads(exact, flat, configured(), term="evidence")[1]) <= 1e-12


@ONE_FAMILY
def test_beta_needs_a_reference_policy(exact: Pair, data: Data) -> None:
    with pytest.raises(ValueError, match="reference policy"):
        ours(exact, data.with_evidence(0, ref_logp=None), configured(beta=0.1))


# ---------------------------------------------------------------------- what is recorded


def test_metrics(exact: Pair, data: Data) -> None:
    options = configured(beta=0.1)
    loss, metrics = ours(exact, data, options)
    expected = right(exact, data, options)
    found = {name: value(metrics, name) for name in metrics}
    assert all(math.isfinite(v) for v in found.values())
    assert all(not x.requires_grad for pair in metrics.values() for x in pair)
    ratios, clipped = [], []
    for example, logps in zip(data.examples, expected.logp, strict=True):
        for logp, old, advantage in zip(logps, example.old_logp, example.advantages, strict=True):
            for ratio in (logp - old).exp().tolist():
                ratios.append(ratio)
                clipped.append((advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8))
    assert 0 < sum(clipped) < len(clipped), "some tokens are clipped, some are not"
    cosines = [
        [[float(naive.cosine(z, p)) for p in (e.positive, *e.negatives)] for z in latents]
        for e, latents in zip(data.examples, expected.latents, strict=True)
    ]
    margins = [slot[0] - max(slot[1:]) for prompt in cosines for slot in prompt]
    norms = [float(z.norm()) for latents in expected.latents for z in latents]
    adjacent = [float(naive.cosine(z[t], z[t + 1])) for z in expected.latents for t in range(K - 1)]
    shares = [[float(w / weights.sum()) for w in weights] for weights in expected.weights]
    by_hand = {
        "loss": float(expected.loss),
        "loss/policy": float(expected.policy),
        "loss/evidence": float(expected.evidence),
        "policy/ratio": sum(ratios) / len(ratios),
        "policy/clip_fraction": sum(clipped) / len(clipped),
        "evidence/margin": sum(margins) / len(margins),
        "evidence/cos_positive": sum(slot[0] for prompt in cosines for slot in prompt) / len(margins),
        "evidence/cos_hardest_negative": sum(max(slot[1:]) for prompt in cosines for slot in prompt) / len(margins),
        "evidence/active_hinge": sum(g < 0.5 for g in margins) / len(margins),
        "evidence/undefined": 0.0,
        "evidence/credit_mass": sum(float(gamma.sum()) for gamma in expected.credit) / 2,
        "evidence/unassigned_weight": sum((1 - 0.3) * (1 - float(gamma.sum())) for gamma in expected.credit) / 2,
        "evidence/weight_spread": sum(abs(share - 1 / K) for one in shares for share in one) / 2 / 2,
        "evidence/readout_mass": sum(float(r[0].sum()) for r in expected.readouts) / 2,
        "evidence/has_wrong_answer": 0.5,
        "evidence/negatives_used": sum(NEGATIVES) / 2,
        "latents/norm": sum(norms) / len(norms),
        "latents/adjacent_cosine": sum(adjacent) / len(adjacent),
    }
    for name, wanted in by_hand.items():
        assert found[name] == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    assert found.keys() - by_hand.keys() == {"policy/entropy", "policy/kl"}
    assert 0 < found["policy/entropy"] < math.log(exact.ours.model.lm_head.out_features)
    assert found["policy/kl"] > 0


def test_vision_and_prototypes_get_no_gradient(fresh_exact: Pair) -> None:
    backbone = fresh_exact.ours
    data = make_data(fresh_exact)
    vision = [p for module in backbone.vision_modules() for p in module.parameters()]
    for parameter in vision:  # even where someone unfreezes them
        parameter.requires_grad_(True)
    micro = our_batch(fresh_exact, data, configured())
    constants = [micro.positive_BD, micro.negatives_BMD, micro.old_logp_BGS, micro.advantages_BG]
    for constant in constants:
        constant.requires_grad_(True)
    Step(ReaLVR(backbone, configured()))(micro)[0].backward()
    assert vision and all(p.grad is None for p in vision)
    assert all(p.grad is not None for p in backbone.decoder.norm.parameters())
    assert all(c.grad is None or float(c.grad.abs().max()) == 0 for c in constants)


@ONE_FAMILY
def test_the_step_registers_every_parameter_once(exact: Pair) -> None:
    step = Step(ReaLVR(exact.ours, configured()))
    assert len(list(step.parameters())) == len(list(exact.ours.model.parameters()))
