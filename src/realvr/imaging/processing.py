"""From an image on disk to what the vision tower reads, with the Pillow backend only.

One backend for training and evaluation: the torchvision backends differ in pixels by up to 3.5e-2 (see
``docs/backbone.md``), and the development machines have no torchvision.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from realvr.errors import UserError
from realvr.families import Stock
from realvr.imaging.types import Grid, ImageInput

if TYPE_CHECKING:
    from realvr.families import Family

MAX_IMAGE_PIXELS = 178_956_970
"""Largest image we decode, in pixels: twice Pillow's default warning limit, which is where Pillow itself refuses.
Between one and two times that default Pillow only warns; such images are ordinary in high-resolution benchmarks, so we
do not."""


_ORIENTATION = 0x0112


def open_image(source: str | Path | bytes | Image.Image) -> Image.Image:
    """The image of a file, of encoded bytes or of a Pillow image: upright (EXIF), RGB on white, fully decoded.

    Raises ``UserError`` naming the file for anything that cannot be read. No Pillow setting is changed.
    """
    if isinstance(source, Image.Image):
        return _decode(source, image_name(source))
    if isinstance(source, bytes):
        if not source:
            raise UserError("image data is empty (0 bytes)")
        return _open(io.BytesIO(source), image_name(source))
    if not isinstance(source, (str, Path)):
        raise UserError(f"an image is a path, bytes or a Pillow image, not {type(source).__name__}")
    name, path = image_name(source), Path(source)
    try:
        if path.is_dir():
            raise UserError(f"{name} is a directory, not an image file")
        if not path.exists():
            raise UserError(f"{name} does not exist")
        if path.stat().st_size == 0:
            raise UserError(f"{name} is empty (0 bytes)")
        with path.open("rb") as file:
            image = _open(file, name)
            image.filename = str(source)  # type: ignore[attr-defined]  # so that a later error can name it
            return image
    except (OSError, ValueError) as error:  # permissions, NUL bytes in the path, a disk that went away
        raise UserError(f"{name} cannot be read: {_one_line(error)}") from error


def picture_hash(image: Image.Image) -> str:
    """Identity of a picture: SHA-256 of its size and pixels, upright and RGB, as `open_image` decodes it.

    The one answer to "is this the same picture?": neither the file's encoding nor the resizing of a model matters.
    """
    ready = image.mode == "RGB" and image.getexif().get(_ORIENTATION, 1) == 1
    rgb = image if ready else open_image(image)  # an 8K photograph takes 100 MB: no copy without need
    digest = hashlib.sha256(f"{rgb.width}x{rgb.height} RGB\n".encode())
    digest.update(rgb.tobytes())
    return digest.hexdigest()


def image_name(source: object) -> str:
    """How an image is named in an error message."""
    if isinstance(source, bytes):
        return f"image data ({len(source)} bytes)"
    if isinstance(source, Image.Image):
        return f"image {getattr(source, 'filename', '') or 'in memory'} ({source.width}x{source.height})"
    return f"image {source}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_header(file: str | Path | BinaryIO) -> Image.Image:
    """An image of which only the header has been read. No other code opens images with Pillow.

    Pillow only warns between half of `MAX_IMAGE_PIXELS` and all of it; those sizes are allowed here.
    """
    with _without_size_warning():
        return Image.open(file)


@contextmanager
def _without_size_warning() -> Iterator[None]:
    """Takes back its own filter alone: `warnings.catch_warnings` puts all filters back as it has met them, and in a
    thread may leave those behind with which the main thread silenced a few lines."""
    own: Any = ("ignore", None, Image.DecompressionBombWarning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, own)
    try:
        yield
    finally:
        with suppress(ValueError):  # another thread has emptied the list meanwhile
            filters.remove(own)


def _open(file: str | Path | BinaryIO, name: str) -> Image.Image:
    try:
        image = read_header(file)
    except Image.DecompressionBombError as error:
        raise UserError(f"{name} is too large: {_one_line(error)}") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name} is not an image that Pillow can read") from error
    except Exception as error:  # decoders raise many types (struct.error, SyntaxError, …) on damaged headers
        raise UserError(f"{name} cannot be read: {_one_line(error)}") from error
    with image:
        return _decode(image, name)


def _decode(image: Image.Image, name: str) -> Image.Image:
    """Check the size before any pixel is decoded, then decode."""
    width, height = image.size
    if width < 1 or height < 1:
        raise UserError(f"{name} has no pixels: {width}x{height}")
    if width * height > MAX_IMAGE_PIXELS:
        raise UserError(f"{name} is too large: {width}x{height} is over {MAX_IMAGE_PIXELS} pixels; scale it down first")
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        return _to_rgb(upright, name)
    except UserError:
        raise
    except Exception as error:  # truncated or damaged data: again many types
        raise UserError(f"{name} is damaged or truncated: {_one_line(error)}") from error


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Pillow clips wide greyscale to 255, which turns a 16-bit scan white: scale it instead. It also shows the colour
    below transparent pixels, which is black in most drawings: lay them on white, as viewers and transformers do."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        import numpy as np

        values = np.asarray(image)
        low, high = float(values.min()), float(values.max())
        if image.mode.startswith("I;16") or (image.mode == "I" and 255 < high <= 65535 and low >= 0):
            return Image.fromarray((values // 256).astype("uint8")).convert("RGB")
        if not (low >= 0 and high <= 255):
            raise UserError(f"{name} has greyscale values {low:g}..{high:g}: save it with 8 or 16 bits per channel")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")  # which would be one more copy of 150 MB at 8K


@dataclass(frozen=True)
class Limits:
    """How many visual tokens an image may take; None leaves a limit to the next best source. A checkpoint keeps those
    of its training, see `realvr.backbone.loading`."""

    min_tokens: int | None = None
    max_tokens: int | None = None
    tiles: bool | None = None
    max_tiles: int | None = None

    @classmethod
    def from_note(cls, note: object, where: str) -> Limits:
        """What a checkpoint has kept; ``where`` names it in errors."""
        if not isinstance(note, dict):
            raise UserError(f"{where} is {note!r}: an object is expected; copy it from the original checkpoint")
        for name, value in note.items():
            right = isinstance(value, bool) if name == "tiles" else type(value) is int and value >= 1
            if name in cls.__dataclass_fields__ and not right:
                raise UserError(f"{where}.{name} is {value!r}: correct it, or remove it to use the family's own")
        return cls(**{name: value for name, value in note.items() if name in cls.__dataclass_fields__})

    def note(self) -> dict[str, Any]:
        """The limits that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def then(self, given: Limits) -> Limits:
        """These, except where ``given`` says otherwise. A bound given alone moves the other one out of its way."""
        merged = {**self.note(), **given.note()}
        low, high = merged.get("min_tokens"), merged.get("max_tokens")
        if low is not None and high is not None and low > high:
            if given.max_tokens is None:
                merged["max_tokens"] = low
            elif given.min_tokens is None:
                merged["min_tokens"] = high
        return Limits(**merged)


class ImageProcessor:
    """The family's stock Pillow processor, for one image at a time, with the grid of its visual tokens.

    ``min_tokens`` and ``max_tokens`` bound the visual tokens of an image where the family lets the count follow the
    image size (Qwen). The bounds are the stock ones and can be missed by its rounding: the short side of an image much
    longer than wide becomes at least one token, and bounds close to each other may leave no grid between them.
    ``tiles`` lets InternVL cut the image into at most ``max_tiles`` tiles plus a thumbnail; without it the image is one
    tile.
    """

    def __init__(
        self,
        family: Family,
        stock: Stock,
        tokens_per_tile: int | None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        tiles: bool | None = None,
        *,
        max_tiles: int | None = None,
        merge: int = 1,
    ) -> None:
        self.family = family
        self.stock = stock
        self.tokens_per_tile = tokens_per_tile
        self.tiles = tiles is not False
        self.max_tiles = self._most_tiles(tiles, max_tiles)
        self.min_tokens: int | None = None
        self.max_tokens: int | None = None
        self.merge = merge
        if family.variable_grid:
            self.merge = int(stock.merge_size)
            self._set_budget(min_tokens, max_tokens)
            return
        if tokens_per_tile is None or math.isqrt(tokens_per_tile) ** 2 != tokens_per_tile:
            raise UserError(f"{family.name}: visual tokens per tile must be a square number, not {tokens_per_tile}")
        if min_tokens is not None or max_tokens is not None:
            warnings.warn(f"{family.name} ignores a visual-token budget: {self.describe()}", stacklevel=2)

    @classmethod
    def load(
        cls,
        path: str | Path,
        family: Family,
        config: Stock,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        tiles: bool | None = None,
        max_tiles: int | None = None,
    ) -> ImageProcessor:
        """From a local directory or a hub id; ``config`` is the model's, which fixes the tokens per tile."""
        module, name = family.image_processor.split(":")
        stock_class = getattr(importlib.import_module(module), name)
        try:
            stock = stock_class.from_pretrained(str(path))
            if family.variable_grid:
                return cls(family, stock, None, min_tokens, max_tokens, tiles, max_tiles=max_tiles)
            tokens, merge = _fixed_grid(config, stock)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # whatever a damaged file leads to
            raise UserError(f"{path}: the image processor configuration cannot be used ({_one_line(error)})") from error
        return cls(family, stock, tokens, min_tokens, max_tokens, tiles, max_tiles=max_tiles, merge=merge)

    def _most_tiles(self, tiles: bool | None, max_tiles: int | None) -> int:
        """Most tiles of an image, its thumbnail not counted; 1 where the family has none."""
        if max_tiles is not None and max_tiles < 1:
            raise UserError(f"an image has at least 1 tile, so max_tiles cannot be {max_tiles}")
        if hasattr(self.stock, "max_patches"):
            return int(self.stock.max_patches) if max_tiles is None else max_tiles
        if given := [name for name, value in (("tiles", tiles), ("max_tiles", max_tiles)) if value is not None]:
            warnings.warn(
                f"{self.family.name} ignores {' and '.join(given)}: it cuts no image into tiles", stacklevel=4
            )
        return 1

    @property
    def limits(self) -> Limits:
        """Those that this family has, as they are in force."""
        if self.family.variable_grid:
            return Limits(min_tokens=self.min_tokens, max_tokens=self.max_tokens)
        if hasattr(self.stock, "max_patches"):
            return Limits(tiles=self.tiles, max_tiles=self.max_tiles)
        return Limits()

    def _set_budget(self, min_tokens: int | None, max_tokens: int | None) -> None:
        """Tokens to pixels: the stock ``size`` counts pixels, and one visual token covers (patch*merge)^2 of them."""
        side = int(self.stock.patch_size) * self.merge
        low, high = int(self.stock.size["shortest_edge"]), int(self.stock.size["longest_edge"])
        for bound in (min_tokens, max_tokens):
            if bound is not None and bound < 1:
                raise UserError(f"a visual-token budget is at least 1, not {bound}")
        if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
            raise UserError(f"visual-token budget: minimum {min_tokens} is over maximum {max_tokens}")
        # Stock bounds need not be whole tokens: one that is asked for as it is stays exactly as it is.
        if min_tokens is not None and min_tokens != math.ceil(low / side**2):
            low = min_tokens * side**2
            high = max(high, low)
        if max_tokens is not None and max_tokens != high // side**2:
            high = max_tokens * side**2
            low = min(low, high)
        self.min_tokens, self.max_tokens = math.ceil(low / side**2), high // side**2
        self._size = {"shortest_edge": low, "longest_edge": high}

    def describe(self) -> str:
        """One sentence about how many visual tokens an image takes."""
        if self.family.variable_grid:
            return f"{self.min_tokens} to {self.max_tokens} visual tokens per image, following its size"
        if self._tiled():
            most = self.max_tiles + 1
            return f"{self.tokens_per_tile} visual tokens per tile, up to {most} tiles per image (thumbnail included)"
        unit = "tile, one tile per image" if hasattr(self.stock, "max_patches") else "image"
        return f"{self.tokens_per_tile} visual tokens per {unit}"

    def _tiled(self) -> bool:
        return self.tiles and self.max_tiles > 1

    def __call__(self, image: str | Path | bytes | Image.Image, picture: str | None = None) -> ImageInput:
        """Process one image: ``pixels`` (patches, C*time*patch*patch) for Qwen, (tiles, 3, H, W) for the others.

        ``picture`` is its `picture_hash` where that is known already.
        """
        name, rgb = image_name(image), open_image(image)
        make = self._variable if self.family.variable_grid else self._fixed
        try:
            pixels, grid = make(rgb)
        except ValueError as error:  # smart_resize refuses aspect ratios over 200
            size = f"{rgb.width}x{rgb.height}"
            raise UserError(f"{name}: size {size} cannot be processed: {_one_line(error)}; crop or pad it") from error
        # The grid is part of the key: flat images of different shapes can have equal patches in equal number.
        digest = hashlib.sha256(repr((tuple(pixels.shape), str(pixels.dtype), grid)).encode())
        digest.update(pixels.numpy())
        return ImageInput(pixels, grid, digest.hexdigest(), picture or picture_hash(rgb))

    def _variable(self, rgb: Image.Image) -> tuple[Any, Grid]:
        stock = self.stock
        if stock.do_resize and stock.do_rescale and stock.do_normalize and isinstance(stock.resample, int):
            pixels, rows, cols = self._patches(rgb)
        else:
            out = stock(images=[rgb], size=dict(self._size), return_tensors="pt")
            pixels, (_, rows, cols) = out["pixel_values"].contiguous(), (int(n) for n in out["image_grid_thw"][0])
        return pixels, Grid(rows // self.merge, cols // self.merge, merge=self.merge)

    def _patches(self, rgb: Image.Image) -> tuple[Any, int, int]:
        """What the stock class makes of an image, by its own steps, in a third of the time.

        A number depends on its shade and channel alone: the stock arithmetic on the 256 shades is looked up instead of
        done again, by way of float64, for each of millions of pixels. What has the right size is not resized.
        """
        import numpy as np
        import torch

        stock, side = self.stock, int(self.stock.patch_size) * self.merge
        bounds = self._size["shortest_edge"], self._size["longest_edge"]
        resize = importlib.import_module(type(stock).__module__).smart_resize
        height, width = resize(rgb.height, rgb.width, side, *bounds)
        shades = np.asarray(rgb.resize((width, height), stock.resample))
        steps = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        numbers = stock.rescale(steps, stock.rescale_factor)
        numbers = stock.normalize(numbers, stock.image_mean, stock.image_std)[:, 0]
        image = np.empty((3, height, width), dtype=np.float32)
        for top in range(0, height, side):  # a band at a time stays in the processor's cache
            for channel in range(3):
                image[channel, top : top + side] = numbers[channel][shades[top : top + side, :, channel]]
        patches, rows, cols = stock.patchify(image, stock.patch_size, stock.merge_size, stock.temporal_patch_size)
        return torch.from_numpy(patches), rows, cols

    def _fixed(self, rgb: Image.Image) -> tuple[Any, Grid]:
        tile_rows = tile_cols = 1
        options: dict[str, Any] = {}
        if hasattr(self.stock, "max_patches"):
            options["crop_to_patches"] = self._tiled()
            if self._tiled():
                options["min_patches"], options["max_patches"] = self._tile_bounds()
                tile_rows, tile_cols = self._tile_layout(rgb)
        else:
            options["do_pan_and_scan"] = False  # Gemma's stock default; its crops would be further images
        pixels = self.stock(images=[rgb], return_tensors="pt", **options)["pixel_values"].contiguous()
        side = math.isqrt(self.tokens_per_tile or 0)
        grid = Grid(side, side, tile_rows, tile_cols, thumbnail=tile_rows * tile_cols > 1, merge=self.merge)
        if pixels.shape[0] * side * side != grid.tokens:
            raise RuntimeError(f"{self.family.name}: stock processor gave {pixels.shape[0]} tiles, expected {grid}")
        return pixels, grid

    def _tile_layout(self, rgb: Image.Image) -> tuple[int, int]:
        """(rows, columns) of the canvas; the stock helper answers (columns, rows). Tiles come in raster order, and the
        thumbnail, absent when there is one tile only, comes last."""
        canvas = importlib.import_module(type(self.stock).__module__).get_optimal_tiled_canvas
        tile = (int(self.stock.size["height"]), int(self.stock.size["width"]))
        cols, rows = canvas((rgb.height, rgb.width), tile, *self._tile_bounds())
        return rows, cols

    def _tile_bounds(self) -> tuple[int, int]:
        return min(int(self.stock.min_patches), self.max_tiles), self.max_tiles


def _fixed_grid(config: Stock, stock: Stock) -> tuple[int, int]:
    """(visual tokens per tile, side in patches of one token) of a family with a fixed count.

    The count the configuration declares must be the one the vision tower gives, or features and placeholders would not
    match at the first forward pass, with an error that names neither.
    """
    image_size, patch_size = (_side(getattr(config.vision_config, key)) for key in ("image_size", "patch_size"))
    if (ratio := getattr(config, "downsample_ratio", None)) is not None:
        declared, merge = int(config.image_seq_length), round(1 / ratio)
    else:
        declared = int(config.mm_tokens_per_image)
        merge = image_size // patch_size // math.isqrt(declared)
    if merge < 1 or (image_size // patch_size // merge) ** 2 != declared:
        raise UserError(
            f"model configuration: {declared} visual tokens per tile do not fit an image size of {image_size}, "
            f"patches of {patch_size} and {merge} patches per token side"
        )
    tile = (int(stock.size["height"]), int(stock.size["width"]))
    if tile != (image_size, image_size):
        raise UserError(f"image processor makes {tile[0]}x{tile[1]} tiles, the vision tower expects {image_size}")
    return declared, merge


def _side(value: int | list[int] | tuple[int, ...]) -> int:
    """Sizes are a number (Gemma) or a pair (InternVL) in the configurations; only squares are supported."""
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)
