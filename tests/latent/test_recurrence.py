"""The differentiable trajectory in float64: values and gradients against cache-free stock recomputation.

Measured on the CPU: gradients agree with the reference to 1e-14 relative in every family, the memory modes bit for bit.
That holds for the MoE family once its router's float32 softmax is widened on both sides; with the stock router 2e-7.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, ask
from pair import gradients, relative
from realvr.backbone import Backbone, Batch, Matrix, Probe
from realvr.errors import UserError
from realvr.latent import extend, prefill, score, think, trajectory

MODES = ("cached", "checkpointed-prefill", "checkpointed")
K = 3
TOLERANCE = 1e-10
ROUTER_TOLERANCE = 1e-6  # the stock MoE router computes its softmax in float32


@pytest.fixture(autouse=True)
def _wide_softmax(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.function is test_gradients_with_the_stock_router:
        yield
        return
    with reference.wide_softmax():
        yield


def prompts_of(pair: Any) -> list[Any]:
    """Two prompts of different length and image size, so that the batch is padded."""
    return [pair.ours.prompt(ask(0)), pair.ours.prompt(ask(1, text="Which of the two shapes is larger, and why?"))]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def answer(rows: int, length: int = 4, seed: int = 1) -> Tensor:
    return torch.randint(5, 200, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def value(z_BKD: Tensor, logp_BS: Tensor) -> Tensor:
    """A scalar of the latents and of an answer after them. Smooth, and different in every entry."""
    return (z_BKD * noise(*z_BKD.shape)).sum() + (logp_BS * noise(*logp_BS.shape, seed=2)).sum()


def our_value(backbone: Backbone, batch: Batch, memory: str = "cached") -> tuple[Tensor, Tensor]:
    _, after, z_BKD = trajectory(backbone, batch, latents=K, memory=memory)
    logp, _, _ = score(backbone, after, answer(len(batch))[:, None], checkpointed=memory == "checkpointed")
    return value(z_BKD, logp[:, 0]), z_BKD


def reference_value(pair: Any, prompts: list[Any]) -> tuple[Tensor, Tensor]:
    sequence, z_BKD = pair.think(pair.begin(prompts), K)
    return value(z_BKD, reference.answer_logprobs(pair.stock, sequence, answer(len(prompts)))), z_BKD


@pytest.fixture(scope="module")
def right(exact: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Value, latents and gradients of the reference."""
    with reference.wide_softmax():
        scalar, z_BKD = reference_value(exact, prompts_of(exact))
        return scalar.detach(), z_BKD.detach(), gradients(exact.stock, scalar)


# ---------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("memory", MODES)
def test_latents_and_gradients_equal_cache_free_recomputation(exact: Any, right: Any, memory: str) -> None:
    scalar, z_BKD = our_value(exact.ours, exact.ours.batch(prompts_of(exact)), memory)
    found = gradients(exact.ours.model, scalar)
    expected_scalar, expected_z, expected = right
    assert float((z_BKD.detach() - expected_z).norm() / expected_z.norm()) <= TOLERANCE
    assert float((scalar.detach() - expected_scalar).abs() / expected_scalar.abs()) <= TOLERANCE
    assert relative(found, expected) <= TOLERANCE
    used = [name for name, gradient in expected.items() if float(gradient.norm()) > 0]
    assert len(used) > 0.9 * len(expected), "the scalar must reach (nearly) every decoder parameter"
    assert any(name.startswith("model.language_model.layers.0.self_attn.k_proj") for name in used)


def test_memory_modes_agree(exact: Any) -> None:
    batch = exact.ours.batch(prompts_of(exact))
    results = []
    for memory in MODES:
        scalar, z_BKD = our_value(exact.ours, batch, memory)
        results.append((z_BKD.detach(), gradients(exact.ours.model, scalar)))
    for z_BKD, found in results[1:]:
        assert float((z_BKD - results[0][0]).abs().max()) <= 1e-12
        assert relative(found, results[0][1]) <= 1e-12


def test_gradients_with_the_stock_router(exact: Any, family: str) -> None:
    """Nothing widened but the norms: what the float32 router of the MoE family allows."""
    if family != "qwen3-vl-moe":
        pytest.skip("only the MoE family has a router")
    scalar, _ = our_value(exact.ours, exact.ours.batch(prompts_of(exact)), "checkpointed")
    found = gradients(exact.ours.model, scalar)
    expected, _ = reference_value(exact, prompts_of(exact))
    assert relative(found, gradients(exact.stock, expected)) <= ROUTER_TOLERANCE


def test_detached_latents_give_another_gradient(exact: Any, right: Any) -> None:
    """The comparison above can fail: the same values without the recurrence in the graph have other gradients."""
    backbone = exact.ours
    state, _ = prefill(backbone, backbone.batch(prompts_of(exact)))
    state, _ = extend(backbone, state, exact.column(2, backbone.markers.start))
    latents = []
    for _ in range(K):
        latents.append(state.last_BD)
        state, _ = extend(backbone, state, embeds_BSD=state.last_BD.detach()[:, None])
    state, _ = extend(backbone, state, exact.column(2, backbone.markers.end))
    logp, _, _ = score(backbone, state, answer(2)[:, None])
    scalar = value(torch.stack(latents, 1), logp[:, 0])
    expected_scalar, _, expected = right
    assert float((scalar.detach() - expected_scalar).abs() / expected_scalar.abs()) <= TOLERANCE
    assert relative(gradients(backbone.model, scalar), expected) > 1e-2


# ---------------------------------------------------------------------- finite differences


def _directions(backbone: Backbone, batch: Batch) -> dict[str, dict[str, Tensor]]:
    """Random directions in parameter space: everything, a key and a value projection, a prompt token's embedding."""
    parameters = {n: p for n, p in backbone.model.named_parameters() if p.requires_grad}
    embedding = next(n for n, p in parameters.items() if p is backbone.core.get_input_embeddings().weight)
    row = torch.zeros_like(parameters[embedding])
    text = batch.ids_BT[0][batch.real_BT[0] & ~batch.image_BT[0]]
    row[text[3]] = noise(row.shape[1], seed=7)
    last = backbone.layers - 1

    def one(ending: str) -> dict[str, Tensor]:
        name = next(n for n in parameters if n.endswith(ending))
        return {name: noise(*parameters[name].shape, seed=8)}

    return {
        "all": {n: noise(*p.shape, seed=i) for i, (n, p) in enumerate(parameters.items())},
        "first key projection": one("layers.0.self_attn.k_proj.weight"),
        "last value projection": one(f"layers.{last}.self_attn.v_proj.weight"),
        "embedding of a prompt token": {embedding: row},
    }


@pytest.mark.parametrize("memory", ["cached", "checkpointed"])
def test_gradients_equal_finite_differences(fresh_exact: Any, memory: str) -> None:
    backbone = fresh_exact.ours
    batch = backbone.batch(prompts_of(fresh_exact))
    scalar, _ = our_value(backbone, batch, memory)
    found = gradients(backbone.model, scalar)
    parameters = dict(backbone.model.named_parameters())
    step = 1e-5
    for what, direction in _directions(backbone, batch).items():
        length = sum(float(d.norm()) ** 2 for d in direction.values()) ** 0.5
        slope = sum(float((found[n] * d).sum()) for n, d in direction.items()) / length

        def moved(by: float, direction: dict[str, Tensor] = direction, length: float = length) -> float:
            with torch.no_grad():
                for n, d in direction.items():
                    parameters[n].add_(d, alpha=by / length)
                result = float(our_value(backbone, batch)[0])
                for n, d in direction.items():
                    parameters[n].sub_(d, alpha=by / length)
            return result

        # Fourth-order central difference: its error is far below the tolerance, rounding is about 1e-15 / step.
        near, far = moved(step) - moved(-step), moved(2 * step) - moved(-2 * step)
        numeric = (8 * near - far) / (12 * step)
        assert abs(numeric - slope) <= 1e-6 * max(abs(slope), 1e-2), what
        assert abs(slope) > 1e-4, f"{what}: a direction without a slope shows nothing"


# ---------------------------------------------------------------------- what gradients reach


def test_gradients_flow_through_the_prompts_keys_and_values(exact: Any) -> None:
    """z of a later pass reads the prompt through its keys and values only."""
    backbone = exact.ours
    prompts = prompts_of(exact)
    batch = backbone.batch(prompts)
    prompt, _, z_BKD = trajectory(backbone, batch, latents=K)
    scalar = (z_BKD * noise(*z_BKD.shape)).sum()
    pieces = [tensor for layer in prompt.kv for piece in layer for tensor in piece]
    for gradient in torch.autograd.grad(scalar, pieces, retain_graph=True):
        assert float(gradient.abs().max()) > 1e-6
        assert float(gradient[~batch.real_BT[:, None, :, None].expand_as(gradient)].abs().sum()) == 0, "padding"
    # A token that stands in the prompt only gets the gradient that the reference gives it.
    sequence, expected_z = exact.think(exact.begin(prompts), K)
    expected = (expected_z * noise(*expected_z.shape)).sum()
    token = int(prompts[0].ids[3])
    ours, right = (
        torch.autograd.grad(s, m.model.get_input_embeddings().weight)[0][token]
        for s, m in ((scalar, backbone.model), (expected, exact.stock))
    )
    assert float(right.norm()) > 1e-4
    assert float((ours - right).norm() / right.norm()) <= TOLERANCE


@pytest.mark.parametrize("memory", MODES)
def test_vision_has_no_gradient(fresh_exact: Any, memory: str) -> None:
    backbone = fresh_exact.ours
    vision = [p for module in backbone.vision_modules() for p in module.parameters()]
    assert vision and not any(p.requires_grad for p in vision)
    for parameter in vision:  # even where someone unfreezes them, a pass does not build their graph
        parameter.requires_grad_(True)
    our_value(backbone, backbone.batch(prompts_of(fresh_exact)), memory)[0].backward()
    assert all(p.grad is None for p in vision)
    assert all(p.grad is not None for p in backbone.decoder.norm.parameters())


def test_branches_have_the_gradients_of_separate_passes(exact: Any) -> None:
    """score() of G branches of unequal length: log-probabilities and gradients of G passes of the stock model each."""
    backbone = exact.ours
    prompts = prompts_of(exact)
    group, size = 3, 5
    ids = answer(2 * group, size).view(2, group, size)
    lengths = torch.tensor([[5, 3, 1], [2, 5, 4]], device=DEVICE)
    real = torch.arange(size, device=DEVICE) < lengths[..., None]
    weight = noise(2, group, size, seed=4)
    _, after, _ = trajectory(backbone, backbone.batch(prompts), latents=K)
    logp, _, _ = score(backbone, after, ids, real)
    found = gradients(backbone.model, (logp * weight).sum())
    expected = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for row, prompt in enumerate(prompts):
        sequence, _ = exact.think(exact.begin([prompt]), K)
        for branch in range(group):
            count = int(lengths[row, branch])
            alone = reference.answer_logprobs(exact.stock, sequence, ids[row, branch, None, :count])[0]
            assert float((alone - logp[row, branch, :count]).detach().abs().max()) <= TOLERANCE
            expected = expected + (alone * weight[row, branch, :count]).sum()
    assert bool((logp[~real] == 0).all())
    assert relative(found, gradients(exact.stock, expected)) <= TOLERANCE


# ---------------------------------------------------------------------- gradient checkpointing


def _flags(backbone: Backbone) -> list[tuple[Any, ...]]:
    """Modes, switches and the number of hooks of every module, without those that transformers hangs on a vision tower
    when it is first asked for hidden states."""

    def hooks(module: Any) -> int:
        return sum("output_capturing" not in hook.__module__ for hook in module._forward_hooks.values())

    modules = backbone.model.named_modules()
    return [(n, m.training, getattr(m, "gradient_checkpointing", None), hooks(m)) for n, m in modules]


def test_a_cached_pass_refuses_gradient_checkpointing(fresh_exact: Any, right: Any) -> None:
    backbone = fresh_exact.ours
    batch = backbone.batch(prompts_of(fresh_exact))
    backbone.model.gradient_checkpointing_enable()
    backbone.model.train()
    for memory in ("cached", "checkpointed-prefill"):  # the second has cached steps
        with pytest.raises(UserError, match=r"gradient checkpointing is enabled.*gradient_checkpointing_disable"):
            trajectory(backbone, batch, latents=K, memory=memory)
    with torch.no_grad():  # nothing to checkpoint, nothing to refuse
        _, _, z_BKD = trajectory(backbone, batch, latents=K)
    assert float((z_BKD - right[1]).abs().max()) <= TOLERANCE
    scalar, _ = our_value(backbone, batch, "checkpointed")
    assert relative(gradients(backbone.model, scalar), right[2]) <= TOLERANCE
    backbone.model.gradient_checkpointing_disable()
    scalar, _ = our_value(backbone, batch, "cached")
    assert relative(gradients(backbone.model, scalar), right[2]) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_of_the_model_loses_no_gradient(fresh_exact: Any, right: Any) -> None:
    """Reentrant checkpointing runs layers without a graph: keys and values kept from there would carry no gradient."""
    backbone = fresh_exact.ours
    batch = backbone.batch(prompts_of(fresh_exact))
    backbone.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    backbone.model.train()
    function = vars(backbone.decoder.layers[0])["_gradient_checkpointing_func"]
    scalar, _ = our_value(backbone, batch, "checkpointed")
    assert vars(backbone.decoder.layers[0])["_gradient_checkpointing_func"] is function
    assert relative(gradients(backbone.model, scalar), right[2]) <= TOLERANCE


@pytest.mark.parametrize("enabled", [False, True])
def test_a_share_of_the_layers_is_recomputed(fresh_exact: Any, enabled: bool) -> None:
    """The first ones, rounded up; the others run once, and everything is as it was."""
    backbone = fresh_exact.ours
    batch = backbone.batch(prompts_of(fresh_exact))
    layers = list(backbone.decoder.layers)
    if enabled:
        backbone.model.gradient_checkpointing_enable()
        backbone.model.train()
    before, found = _flags(backbone), []
    runs: list[int] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda *_, number=number: runs.append(number))
        for number, layer in enumerate(layers)
    ]
    for share, again in ((1.0, len(layers)), (0.5, -(-len(layers) // 2)), (1e-9, 1)):
        runs.clear()
        _, hidden = prefill(backbone, batch, checkpointed=share)
        found.append(gradients(backbone.model, hidden.square().sum()))
        assert [runs.count(number) for number in range(len(layers))] == [2] * again + [1] * (len(layers) - again)
    for hook in hooks:
        hook.remove()
    assert _flags(backbone) == before
    assert all(relative(each, found[0]) <= 1e-12 for each in found[1:])


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_checkpointed_passes_restore_all_flags(fresh_exact: Any, enabled: bool, training: bool) -> None:
    backbone = fresh_exact.ours
    batch = backbone.batch(prompts_of(fresh_exact))
    backbone.model.train(training)
    if enabled:
        backbone.model.gradient_checkpointing_enable()
    before = _flags(backbone)
    our_value(backbone, batch, "checkpointed")[0].backward()
    assert _flags(backbone) == before
    too_many = torch.zeros(len(batch) + 1, 1, dtype=torch.long, device=DEVICE)  # more rows than the batch has
    with pytest.raises((IndexError, RuntimeError)):
        prefill(backbone, batch, probes=[Probe(rows=too_many)], checkpointed=True)
    assert _flags(backbone) == before


@pytest.mark.parametrize("memory", MODES)
def test_nothing_outlives_a_step(fresh_exact: Any, memory: str) -> None:
    """A circle through the graph would keep every step's activations, unseen by Python's collector."""
    backbone = fresh_exact.ours
    batch = backbone.batch(prompts_of(fresh_exact))
    alive: list[weakref.ref[Tensor]] = []
    watch = backbone.decoder.layers[0].register_forward_hook(lambda _m, _i, out: alive.append(weakref.ref(out)))
    _, after, z = trajectory(backbone, batch, latents=K, memory=memory)
    probe, matrix = Probe(columns=after.slots, gradient=True), Matrix()
    ids = torch.zeros(len(batch), 2, dtype=torch.long, device=DEVICE)
    probed, _ = extend(backbone, after, ids, probes=[probe], checkpointed=memory == "checkpointed")
    full, hidden = extend(backbone, after, ids, matrix=matrix, checkpointed=memory == "checkpointed")
    (z.sum() + probe.mean().sum() + hidden.sum()).backward()
    watch.remove()
    assert alive
    del after, z, probe, matrix, probed, full, hidden, _
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_unknown_memory_mode(exact: Any) -> None:
    with pytest.raises(UserError, match=r"'nonsense'.*cached.*checkpointed-prefill.*checkpointed"):
        trajectory(exact.ours, exact.ours.batch(prompts_of(exact)), latents=K, memory="nonsense")


def _saved_bytes(run: Callable[[], Tensor], parameters: set[int]) -> int:
    """Bytes of the distinct tensors, parameters aside, that autograd keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(kept.values())


def test_checkpointed_modes_save_memory(exact: Any) -> None:
    backbone = exact.ours
    batch = backbone.batch([backbone.prompt(ask(0, text="Count the red circles left of the cube. " * 20))])
    visual = backbone.encode_images(batch.images)
    parameters = {p.untyped_storage().data_ptr() for p in backbone.model.parameters()}
    saved = [
        _saved_bytes(lambda m=memory: trajectory(backbone, batch, visual, latents=K, memory=m)[2].sum(), parameters)
        for memory in MODES
    ]
    cached, prefill_checkpointed, checkpointed = saved
    assert prefill_checkpointed < 0.5 * cached
    assert checkpointed < 0.5 * prefill_checkpointed


def test_no_latents_is_no_span(exact: Any) -> None:
    batch = exact.ours.batch(prompts_of(exact))
    prompt, after, z_BKD = trajectory(exact.ours, batch, latents=0)
    assert after is prompt and z_BKD.shape == (2, 0, exact.ours.width)
    with pytest.raises(UserError, match="negative"):
        think(exact.ours, prompt, -1)
