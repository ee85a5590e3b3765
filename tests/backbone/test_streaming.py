"""Loading one parameter at a time, held against ``from_pretrained`` on the same files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from realvr.backbone import FAMILIES, Backbone
from realvr.backbone.streaming import Stored, Weights, set_tensor
from realvr.errors import UserError
from realvr.zoo.presets import PRESETS, preset_config
from released_files import FILES, RELEASED, stored_name, write_weights

INDEX = "model.safetensors.index.json"
SHARDS = 17

Make = Callable[..., Path]


@pytest.fixture
def make(build_tiny: Callable[[str], Path], tmp_path: Path) -> Make:
    """A small checkpoint under released names, in many files; ``head`` says what is stored as output layer."""

    def build(family: str, head: str = "", shards: int = SHARDS, **stated: bool) -> Path:
        directory = Path(shutil.copytree(build_tiny(family), tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"))
        model = AutoModelForImageTextToText.from_pretrained(directory)
        head = head or ("none" if family == "gemma3" else "own")
        if head == "equal":
            model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
        elif head == "own" and model.lm_head.weight is model.get_input_embeddings().weight:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        fields = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(fields | stated))
        write_weights(directory, family, model, head != "none", shards)
        return directory

    return build


def copy(model: Any, weights: Weights) -> None:
    """Put everything into the model, whole."""
    for name, tensor in weights:
        set_tensor(model, name, tensor.clone())


def state(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers, those that no file holds included."""
    return model.state_dict() | dict(model.named_buffers())


def assert_same(mine: Any, theirs: Any) -> None:
    one, other = state(mine), state(theirs)
    assert list(one) == list(other)
    odd = [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]
    assert odd == []
    assert [name for name, _ in mine.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert mine.all_tied_weights_keys == theirs.all_tied_weights_keys
    assert mine.config == theirs.config
    assert mine.generation_config == theirs.generation_config


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "auto") for family in FAMILIES), ("qwen3-vl-moe", torch.bfloat16)]
)
def test_a_streamed_model_is_the_loaded_one(make: Make, family: str, dtype: Any) -> None:
    """Bit for bit, from many files, and the weights come in the model's order, each once."""
    directory = make(family)
    assert len(list(directory.glob("*.safetensors"))) == SHARDS
    stock = AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype)
    stored = Stored(str(directory), dtype)
    names = [name for name, _ in stored.model.named_parameters()]
    assert {p.device.type for p in stored.model.parameters()} == {"meta"}
    given = []
    for name, tensor in stored.weights():
        given.append(name)
        set_tensor(stored.model, name, tensor.clone())
    assert given == names
    assert_same(stored.model, stock)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "internvl3", "gemma3"])
def test_a_backbone_placed_is_the_backbone_loaded(make: Make, family: str) -> None:
    """With the rows of the markers, which are computed from the placed embeddings; from one file."""
    directory = make(family, shards=1)
    placed = Backbone.load(directory, device="cpu", place=copy)
    assert_same(placed.model, Backbone.load(directory, device="cpu").model)
    assert placed.markers_added


@pytest.mark.parametrize(("head", "tie"), [("own", True), ("equal", True), ("equal", False), ("none", False)])
def test_the_files_decide_what_is_tied(make: Make, head: str, tie: bool) -> None:
    """Whatever the configuration says and the files hold, as ``from_pretrained`` and our reading of it decide."""
    directory = make("qwen3-vl", head, tie_word_embeddings=tie)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed, loaded = Backbone.load(directory, device="cpu", place=copy), Backbone.load(directory, device="cpu")
    assert_same(placed.model, loaded.model)
    tied = placed.model.lm_head.weight is placed.model.get_input_embeddings().weight
    assert tied == (head == "none" or (tie and head == "equal"))


def refusal(directory: Path, place: Any) -> str:
    with pytest.raises(UserError) as caught:
        Backbone.load(directory, device="cpu", place=place)
    return str(caught.value)


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return directory


def test_files_that_do_not_fit_are_refused_alike(make: Make) -> None:
    """A tensor that is missing, one of another shape, one cut short: the lines of ``Backbone.load``, before anything is
    placed. A tensor that is left over is named in a warning."""
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    lacking = edit(make("qwen3-vl", shards=1), lambda tensors: tensors.pop(name))
    other = edit(make("qwen3-vl", shards=1), lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    cut = make("qwen3-vl", shards=1)
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    for directory in (lacking, other, cut):
        assert refusal(directory, copy) == refusal(directory, None)
    assert name in refusal(lacking, copy)
    more = edit(make("qwen3-vl", shards=1), lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.warns(UserWarning, match="1 stored tensors are not used, among them model.extra.weight"):
        Backbone.load(more, device="cpu", place=copy)


def hollow(directory: Path, shapes: dict[str, tuple[int, ...]], where: dict[str, str]) -> int:
    """Weights of real size under the given names, as files with holes that take no space; returns their bytes."""
    total = 0
    for file in sorted(set(where.values())):
        header, end = {}, 0
        for name in (name for name in where if where[name] == file):
            start, end = end, end + 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        total += end
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return total


def stored_shapes(family: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's tensors under released names, experts as (expert, in, out)."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tied = model.lm_head.weight is model.get_input_embeddings().weight or family == "gemma3"
    shapes = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if not (tied and name == "lm_head.weight"):
            experts = name.endswith(FAMILIES[family].transposed or ("none",))
            shapes[stored_name(family, name)] = (shape[0], shape[2], shape[1]) if experts else shape
    return shapes


def assert_covered(directory: Path, names: list[str]) -> None:
    """transformers' loader misses nothing and leaves nothing over; every stored name makes exactly one parameter."""
    stored = Stored(str(directory), "auto")
    assert not any(stored.found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sorted(key for keys in stored._sources.values() for key in keys) == sorted(names)
    assert all(len(keys) == 1 for keys in stored._sources.values())
    assert set(stored._sources) | {"lm_head.weight"} == set(stored.model.state_dict())
    first, tensor = next(stored.weights())
    assert tensor.shape == stored.model.get_parameter(first).shape
    assert tensor.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_backbone_of_the_paper_maps_at_full_size(tmp_path: Path, name: str) -> None:
    """Names in the released style, in files of about 5 GB as those are; values are never read."""
    preset = PRESETS[name]
    config = preset_config(name)
    config.save_pretrained(tmp_path)
    shapes = stored_shapes(preset.family, config)
    names, files = sorted(shapes), 1 + preset.parameters // 2_000_000_000
    size = hollow(tmp_path, shapes, {name: f"model-{i % files:05}.safetensors" for i, name in enumerate(names)})
    assert abs(size / 2 / preset.parameters - 1) < 0.02
    assert_covered(tmp_path, names)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"])
def test_every_released_name_maps_to_one_parameter(tmp_path: Path, family: str) -> None:
    """Names and distribution over files as released; that the bytes add up to the released ones checks the shapes."""
    released = RELEASED / Path(FILES[family]).parent
    if not (released / INDEX).is_file():
        pytest.skip(f"the released files are not here ({RELEASED})")
    shutil.copy(released / "config.json", tmp_path)
    index = json.loads((released / INDEX).read_text())
    shapes = stored_shapes(family, AutoConfig.from_pretrained(tmp_path))
    assert set(index["weight_map"]) == set(shapes)
    assert hollow(tmp_path, shapes, index["weight_map"]) == index["metadata"]["total_size"]
    assert_covered(tmp_path, list(index["weight_map"]))
