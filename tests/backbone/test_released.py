"""Checkpoints in the style of the released files: their configurations, weight names and layouts, with small random
weights. What is loaded is held against a model that was never loaded, with the output layer that was stored."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from helpers import ask, stock_inputs
from realvr.backbone import FAMILIES, Backbone
from realvr.latent import prefill
from released_files import FILES, RELEASED, released_config, write_weights

TIE = "tie_word_embeddings"
QUIETLY_TIED = ("gemma3",)
"""Families whose released files hold no output layer."""


Make = Callable[..., tuple[Path, Any]]


@pytest.fixture
def make(build_tiny: Callable[[str], Path], tmp_path: Path) -> Make:
    """``(checkpoint, model)``: a directory in the released style and the model whose weights it holds."""

    def build(family: str, style: str, *, head: str = "own", shards: int = 1, **stated: bool) -> tuple[Path, Any]:
        directory = Path(shutil.copytree(build_tiny(family), tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"))
        small = json.loads((directory / "config.json").read_text())
        fields = small if style == "small" else released_config(family, small)
        (directory / "config.json").write_text(json.dumps(fields | stated))
        config = AutoConfig.from_pretrained(directory)
        config.tie_word_embeddings = head == "none"
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(0.0, 0.1)
                if head == "equal":
                    model.lm_head.weight.copy_(model.get_input_embeddings().weight)
        write_weights(directory, family, model, head != "none", shards)
        return directory, model

    return build


@torch.no_grad()
def agree(backbone: Backbone, model: Any) -> None:
    """Logits of ours are those of the model's hidden states times its output layer, for every stored row."""
    prompts = [backbone.prompt(ask(0))]
    inputs = {name: value.cpu() for name, value in stock_inputs(backbone, prompts).items()}  # as both models are
    hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
    expected = hidden.float() @ model.lm_head.weight.float().T
    _, mine = prefill(backbone, backbone.batch(prompts))
    logits = backbone.logits(mine)[..., : expected.shape[-1]]
    known = min(expected.shape[-1], backbone.markers.start)  # the rows of the markers are new
    assert (expected.std() > 0.1).item()
    assert (logits[..., :known] - expected[..., :known]).abs().max() < 1e-4


def loaded(directory: Path) -> tuple[Backbone, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backbone = Backbone.load(directory, dtype="float32", device="cpu")
    return backbone, [str(one.message) for one in caught]


def train(backbone: Backbone) -> None:
    """Two steps on the language model; both matrices move, and differently where they are two."""
    table, head = backbone.model.get_input_embeddings().weight, backbone.model.lm_head.weight
    before = table.detach().clone(), head.detach().clone()
    optimizer = torch.optim.SGD([p for p in backbone.model.parameters() if p.requires_grad], lr=0.5)
    batch = backbone.batch([backbone.prompt(ask(0))])
    for _ in range(2):
        optimizer.zero_grad()
        _, hidden = prefill(backbone, batch)
        logits = backbone.logits(hidden)[0, :-1]
        torch.nn.functional.cross_entropy(logits, batch.ids_BT[0, 1:]).backward()
        optimizer.step()
    moved = [new.detach() - old for new, old in zip((table, head), before, strict=True)]
    assert all(change.abs().max() > 1e-3 for change in moved)
    assert torch.equal(*moved) == tied(backbone.model)


def same(first: Any, second: Any) -> bool:
    mine, theirs = first.state_dict(), second.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def tied(model: Any) -> bool:
    return model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("style", ["small", "released"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_released_checkpoint_keeps_its_output_layer(make: Make, tmp_path: Path, family: str, style: str) -> None:
    """Through loading, new markers, saving, loading, a training step on both matrices, and saving again."""
    head = "none" if family in QUIETLY_TIED else "own"
    directory, model = make(family, style, head=head, shards=2)
    backbone, notes = loaded(directory)
    assert notes == []
    agree(backbone, model)
    assert tied(backbone.model) == (head == "none") == backbone.model.config.tie_word_embeddings
    again, _ = loaded(backbone.save(tmp_path / "saved"))
    agree(again, model)
    train(again)
    after = again.save(tmp_path / "after")
    assert same(loaded(after)[0].model, again.model)
    stock, found = AutoModelForImageTextToText.from_pretrained(after, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(stock, again.model)
    before = again.model.lm_head.weight.clone()
    stock.resize_token_embeddings(len(before) + 5)  # what ties, where the saved configuration says nothing
    assert torch.equal(stock.lm_head.weight[: len(before)], before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_statement_gives_way_to_the_weights(make: Make, tmp_path: Path, family: str) -> None:
    directory, model = make(family, "small", **{TIE: True})
    backbone, notes = loaded(directory)
    assert [note for note in notes if "tie_word_embeddings is true, but the stored output layer differs" in note]
    agree(backbone, model)
    backbone, notes = loaded(backbone.save(tmp_path / "one"))
    assert notes == [] and not tied(backbone.model)

    directory, model = make(family, "small", head="none", **{TIE: False})
    backbone, notes = loaded(directory)
    assert [note for note in notes if "tie_word_embeddings is false, but the weights hold no output layer" in note]
    agree(backbone, model)
    backbone, notes = loaded(backbone.save(tmp_path / "two"))
    assert notes == [] and tied(backbone.model)


def test_a_statement_inside_the_text_configuration(make: Make) -> None:
    """As files of transformers 4 have it: tied, said only there."""
    directory, model = make("qwen3-vl", "small", head="none")
    fields = json.loads((directory / "config.json").read_text())
    del fields[TIE]
    fields["text_config"][TIE] = True
    (directory / "config.json").write_text(json.dumps(fields))
    backbone, notes = loaded(directory)
    assert notes == [] and tied(backbone.model)
    agree(backbone, model)


def test_an_output_layer_stored_twice_is_tied_where_the_class_says_so(make: Make) -> None:
    directory, model = make("internvl3", "small", head="equal")
    backbone, notes = loaded(directory)
    assert notes == [] and tied(backbone.model)
    agree(backbone, model)


def test_loading_twice_gives_the_same_new_rows(make: Make) -> None:
    """InternVL's tokenizer has an entry without a row; the row that it gets is no random one."""
    directory, model = make("internvl3", "small")
    rows = model.lm_head.out_features
    assert len(AutoTokenizer.from_pretrained(directory)) == rows + 1
    first, second = loaded(directory)[0], loaded(directory)[0]
    assert first.model.lm_head.out_features == rows + 4
    assert same(first.model, second.model)


# ---------------------------------------------------------------------- names and layouts


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"])
def test_saved_names_are_the_released_ones(family: str, build_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Every name we write, apart from layer numbers, is in the released index, and the other way round."""
    index = RELEASED / Path(FILES[family]).parent / "model.safetensors.index.json"
    if not index.is_file():
        pytest.skip(f"the released files are not here ({RELEASED})")

    def kinds(names: Any) -> set[str]:
        return {".".join("N" if part.isdigit() else part for part in name.split(".")) for name in names}

    backbone, _ = loaded(build_tiny(family))
    written = load_file(backbone.save(tmp_path / "saved") / "model.safetensors")
    assert kinds(written) == kinds(json.loads(index.read_text())["weight_map"])
    assert kinds(load_file(build_tiny(family) / "model.safetensors")) == kinds(written)


def test_experts_are_stored_as_released(make: Make, tmp_path: Path) -> None:
    """Released files hold (expert, in, out): x @ gate_up, then @ down. The layer is computed here from the file."""
    directory, _ = make("qwen3-vl-moe", "small")
    backbone, _ = loaded(directory)
    tensors = load_file(backbone.save(tmp_path / "saved") / "model.safetensors")
    original = load_file(directory / "model.safetensors")
    config = backbone.text_config
    experts, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    for layer in range(config.num_hidden_layers):
        prefix = f"model.language_model.layers.{layer}.mlp."
        gate_up, down = tensors[prefix + "experts.gate_up_proj"], tensors[prefix + "experts.down_proj"]
        assert tuple(gate_up.shape) == (experts, width, 2 * inner)
        assert tuple(down.shape) == (experts, inner, width)
        assert torch.equal(gate_up, original[prefix + "experts.gate_up_proj"])
        assert torch.equal(down, original[prefix + "experts.down_proj"])
        x = torch.randn(5, width)
        expected = sparse_layer(x, tensors[prefix + "gate.weight"], gate_up, down, config.num_experts_per_tok)
        got = backbone.decoder.layers[layer].mlp(x[None])
        got = got[0] if isinstance(got, tuple) else got
        assert (got.reshape(5, width) - expected).abs().max() < 1e-5
    assert same(AutoModelForImageTextToText.from_pretrained(tmp_path / "saved"), backbone.model)


def sparse_layer(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, active: int) -> Tensor:
    """Routed experts, one token at a time: softmax over all, the best ``active``, weights normalised to 1."""
    rows = []
    for token in x:
        weights, chosen = torch.topk((token @ router.T).softmax(0), active)
        total = torch.zeros_like(token)
        for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
            gate, up = (token @ gate_up[expert]).chunk(2)
            total += weight * ((torch.nn.functional.silu(gate) * up) @ down[expert])
        rows.append(total)
    return torch.stack(rows)
