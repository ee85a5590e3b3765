"""Frozen vision weights padded to a multiple of 8: the same numbers, and a model that nobody sees changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from helpers import load_stock, picture
from host_syncs import HostSyncs
from realvr.backbone import Backbone, padded_vision, vision
from realvr.backbone.notices import notice_once
from realvr.imaging.types import ImageInput

WIDE, ODD = 48, 44  # what 3,424 and 3,420 are at full size


@pytest.fixture(scope="module")
def odd(build_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL checkpoint whose vision MLP is 44 wide."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    torch.manual_seed(0)
    backbone.model.config.vision_config.intermediate_size = ODD
    for block in backbone.core.visual.blocks:
        block.mlp = type(block.mlp)(backbone.model.config.vision_config, bias=True)
        for parameter in block.mlp.parameters():
            nn.init.normal_(parameter, std=0.2)
    return backbone.save(tmp_path_factory.mktemp("odd"))


def loaded(path: Path, dtype: torch.dtype = torch.float64) -> Backbone:
    return Backbone.load(path, dtype=dtype, device="cpu", fast_vision=True, announce=False)


def pictures(backbone: Backbone) -> list[ImageInput]:
    return [backbone.processor(picture(number)) for number in range(3)]


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in 16 bits; a CPU has no pinned memory."""
    monkeypatch.setattr(padded_vision, "pays", lambda device, dtype: True)
    monkeypatch.setattr(vision, "staged", lambda pixels, dtype: pixels.to(dtype))


@contextmanager
def widths(found: list[int]) -> Iterator[None]:
    """The widths that products into the vision MLP really have."""
    original = nn.functional.linear

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(weight.shape[0])
        return original(x, weight, bias)

    nn.functional.linear = spy
    try:
        yield
    finally:
        nn.functional.linear = original


def encode(backbone: Backbone, images: list[ImageInput], **options: Any) -> tuple[Tensor, list[int]]:
    """Visual tokens, and the widths of the products; the copies are there by then."""
    backbone.encode_images(images, **options)
    found: list[int] = []
    with widths(found):
        return backbone.encode_images(images, **options).features_ND, found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.usefixtures("pays")
def test_padded_equals_plain(odd: Path, dtype: torch.dtype, tolerance: float) -> None:
    """Against a stock model of the same file, whose products are 44 wide."""
    ours = loaded(odd, dtype)
    images = pictures(ours)
    padded, found = encode(ours, images)
    assert WIDE in found and ODD not in found
    stock = load_stock(odd).to(dtype)
    merge = stock.config.vision_config.spatial_merge_size
    grid = torch.tensor([[1, image.grid.rows * merge, image.grid.cols * merge] for image in images])
    with torch.no_grad():
        pixels = torch.cat([image.pixels for image in images]).to(dtype)
        expected = torch.cat(stock.model.get_image_features(pixels, grid, return_dict=True).pooler_output)
    assert float((padded - expected).abs().max() / expected.abs().max()) <= 1e-5  # stock: a softmax in float32
    ours.fast_vision = False
    with ours._fused_vision.running():  # what padding alone changes
        plain, found = encode(ours, images)
    assert ODD in found and WIDE not in found and not len(ours._padded_vision)
    torch.testing.assert_close(padded, plain, rtol=tolerance, atol=tolerance)


def test_off_on_a_cpu(odd: Path) -> None:
    ours = loaded(odd)
    assert WIDE not in encode(ours, pictures(ours))[1]


@pytest.mark.usefixtures("pays")
def test_model_and_file_keep_their_shapes(odd: Path, tmp_path: Path) -> None:
    ours = loaded(odd, torch.float32)
    before = {name: (tensor.shape, tensor.data_ptr()) for name, tensor in ours.model.state_dict().items()}
    modules = [id(module) for module in ours.model.modules()]
    encode(ours, pictures(ours))
    assert {name: (x.shape, x.data_ptr()) for name, x in ours.model.state_dict().items()} == before
    assert [id(module) for module in ours.model.modules()] == modules
    ours.save(tmp_path / "again")
    for file in odd.glob("*.safetensors"):
        with safe_open(file, "pt") as a, safe_open(tmp_path / "again" / file.name, "pt") as b:
            assert set(a.keys()) == set(b.keys())
            assert all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in a.keys())  # noqa: SIM118


@pytest.mark.usefixtures("pays")
def test_an_error_inside_leaves_the_stock_modules(odd: Path) -> None:
    ours = loaded(odd)
    images = pictures(ours)
    stock = [block.mlp for block in ours.core.visual.blocks]
    wrong = ImageInput(images[0].pixels[:, :-1], images[0].grid, "wrong", "wrong")
    with pytest.raises(RuntimeError):
        ours.encode_images([wrong])
    assert all(block.mlp is mlp for block, mlp in zip(ours.core.visual.blocks, stock, strict=True))


@pytest.mark.parametrize("change", ["in place", "to float32", "loaded"])
@pytest.mark.usefixtures("pays")
def test_changed_weights_are_seen(odd: Path, change: str) -> None:
    ours = loaded(odd)
    images = pictures(ours)
    before, _ = encode(ours, images)
    with torch.no_grad():
        if change == "in place":
            ours.core.visual.blocks[1].mlp.down_proj.weight.mul_(2)
        elif change == "to float32":
            ours.model.to(torch.float32)
        else:
            ours.model.load_state_dict({name: x * 1.5 for name, x in ours.model.state_dict().items()})
    padded, found = encode(ours, images)
    assert WIDE in found
    ours.fast_vision = False
    with ours._fused_vision.running():
        plain, _ = encode(ours, images)
    tolerance = 1e-13 if change != "to float32" else 1e-5
    torch.testing.assert_close(padded, plain, rtol=tolerance, atol=tolerance)
    assert padded.dtype == plain.dtype and not torch.equal(padded.double(), before)


@pytest.mark.usefixtures("pays")
def test_copies_are_made_once(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = loaded(odd), loaded(odd, torch.float32)
    made: list[nn.Module] = []
    original = padded_vision._padded
    monkeypatch.setattr(padded_vision, "_padded", lambda module: made.append(module) or original(module))
    images = pictures(ours)
    for _ in range(3):
        for backbone in (ours, other):
            assert encode(backbone, images)[0].dtype == backbone.dtype
    assert len(made) == 2 * len(ours.core.visual.blocks)


@pytest.mark.parametrize("why", ["trained", "one layer trained", "hook", "adapter", "own forward", "shards"])
@pytest.mark.usefixtures("pays")
def test_not_padded_where_it_would_matter(odd: Path, why: str) -> None:
    """Weights that are trained or not plainly there are left as they are, and get their gradient."""
    ours = loaded(odd)
    images = pictures(ours)
    encode(ours, images)
    blocks = ours.core.visual.blocks
    padded = len(blocks) - 1
    if why == "trained":
        ours.core.visual.requires_grad_(True)
        padded = 0
    elif why == "one layer trained":
        blocks[0].mlp.gate_proj.weight.requires_grad_(True)
    elif why == "hook":
        blocks[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    elif why == "adapter":
        blocks[0].mlp.up_proj = nn.Sequential(blocks[0].mlp.up_proj)
    elif why == "own forward":
        blocks[0].mlp.forward = type(blocks[0].mlp).forward.__get__(blocks[0].mlp)
    else:
        blocks[0].mlp.down_proj.weight.ds_id = 7
    notice_once.cache_clear()
    with pytest.warns(UserWarning, match="fast vision: weights of the tower are trained") as said:
        _, found = encode(ours, images)
    assert len(said) == 1 and found.count(WIDE) == 2 * padded and found.count(ODD) == 2 * (len(blocks) - padded)
    if why == "trained":
        with pytest.warns(UserWarning, match="fast vision: the vision tower is trained") as said:
            features, found = encode(ours, images, train=True)
        assert len(said) == 1
        assert WIDE not in found
        features.sum().backward()
        assert blocks[0].mlp.gate_proj.weight.grad is not None


def test_only_mlps_with_an_odd_width_count(backbone: Backbone) -> None:
    """No family's tiny tower has one, nor has a language model's MLP that is 64 wide."""
    copies = padded_vision.PaddedVision([backbone.model])
    with torch.no_grad(), copies.running():
        assert not len(copies)


def test_a_layer_between_that_sees_the_whole_width_is_left_alone() -> None:
    """Zeros under a softmax are not zeros behind it."""
    block = nn.Sequential(nn.Sequential(nn.Linear(8, 12), nn.Softmax(-1), nn.Linear(12, 8)))
    block.requires_grad_(False)
    copies = padded_vision.PaddedVision([block])
    with torch.no_grad(), copies.running():
        assert not len(copies)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl-moe"], indirect=True)
def test_index_tensors_of_a_size_are_made_once(backbone: Backbone) -> None:
    """The second call for a set of sizes asks for fewer operations, gives the same bits, and reads no number back."""
    images = pictures(backbone)
    backbone._tower_inputs = vision.TowerInputs(backbone.model.config.vision_config)
    with HostSyncs() as first:
        a = backbone.encode_images(images)
    with HostSyncs() as second:
        b = backbone.encode_images(images)
    assert torch.equal(a.features_ND, b.features_ND)
    assert second.operations < first.operations
    print(f"{backbone.family.name}: {first.operations} operations, then {second.operations}; {dict(second.found)}")
    assert not second.found


def test_kept_index_tensors_are_bounded(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    if not backbone.mrope:
        pytest.skip("this family's tower has no index tensors")
    monkeypatch.setattr(vision, "KEPT_PATCHES", 200)
    kept = vision.TowerInputs(backbone.model.config.vision_config)
    grids = [[(8, 8)], [(8, 12), (4, 4)], [(16, 16)], [(8, 8)]]
    made = [kept(grid, torch.device("cpu")) for grid in grids]
    assert len(kept._kept) == 1 and made[0] is not made[3]
    assert torch.equal(made[0]["image_position_ids"], made[3]["image_position_ids"])
    assert kept([(8, 8)], torch.device("cpu")) is made[3]


@pytest.mark.usefixtures("pays")
def test_dropped_copies_are_freed_at_once(odd: Path) -> None:
    """0.8 GiB at full size: they do not wait for the garbage collector."""
    ours = loaded(odd, torch.float32)
    gc.disable()
    try:
        encode(ours, pictures(ours))
        copies = [weakref.ref(each.padded) for each in ours._padded_vision._copies]
        assert copies
        ours._padded_vision.drop()
        assert not any(copy() for copy in copies)
    finally:
        gc.enable()
