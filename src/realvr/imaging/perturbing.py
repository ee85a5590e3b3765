"""Pictures that are changed a little: light, contrast, turn, cut, cover, blur. Pillow only; no torch.

Every change is a function of the picture, a strength and a `random.Random`, keeps the size of the picture, and returns
RGB. What a change uncovers has the mean colour of the picture.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from PIL import Image, ImageEnhance, ImageFilter, ImageStat

RGB = tuple[int, int, int]
Change = Callable[[Image.Image, float, random.Random], Image.Image]


def _mean(image: Image.Image) -> RGB:
    red, green, blue = (round(value) for value in ImageStat.Stat(image).mean)
    return red, green, blue


def _factor(strength: float, draw: random.Random) -> float:
    """At least half of the strength above or below 1."""
    return 1 + draw.choice((-1, 1)) * draw.uniform(0.5, 1) * strength


def brightness(image: Image.Image, strength: float, draw: random.Random) -> Image.Image:
    """Lighter or darker by at most ``strength``."""
    return ImageEnhance.Brightness(image).enhance(_factor(strength, draw))


def contrast(image: Image.Image, strength: float, draw: random.Random) -> Image.Image:
    """More or less contrast by at most ``strength``."""
    return ImageEnhance.Contrast(image).enhance(_factor(strength, draw))


def rotation(image: Image.Image, strength: float, draw: random.Random) -> Image.Image:
    """Turned about the centre by at most 45 degrees times ``strength``."""
    angle = 45 * strength * draw.choice((-1, 1)) * draw.uniform(0.5, 1)
    return image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=_mean(image))


def crop(image: Image.Image, strength: float, draw: random.Random) -> Image.Image:
    """A part of it, shorter on each side by at most ``strength``, enlarged to the size of the whole."""
    kept = 1 - strength * draw.uniform(0.5, 1)
    width, height = (max(1, round(side * kept)) for side in image.size)
    left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height)).resize(image.size, Image.Resampling.BICUBIC)


def mask(image: Image.Image, strength: float, draw: random.Random) -> Image.Image:
    """One rectangle, of ``strength`` of the area and between half and twice as wide as high, covered."""
    shape = math.exp(draw.uniform(-math.log(2), math.log(2)) / 2)
    side = math.sqrt(strength)
    width = min(image.width, max(1, round(image.width * side * shape)))
    height = min(image.height, max(1, round(image.height * side / shape)))
    left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
    changed = image.copy()
    changed.paste(_mean(image), (left, top, left + width, top + height))
    return changed


def blur_jitter(image: Image.Image, strength: float, draw: random.Random) -> Image.Image:
    """Gaussian blur with a radius of 2 % of the shorter side times ``strength``, then brightness, contrast and
    saturation, each by at most half of it."""
    changed = image.filter(ImageFilter.GaussianBlur(0.02 * strength * min(image.size)))
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        changed = kind(changed).enhance(_factor(strength / 2, draw))
    return changed


def affine(image: Image.Image, strength: float, draw: random.Random) -> Image.Image:
    """Turned by at most 45 degrees times ``strength``, scaled and moved by at most that share of its sides."""
    angle = math.radians(45 * strength * draw.uniform(-1, 1))
    scale = 1 + strength * draw.uniform(-1, 1)
    across, down = (strength * draw.uniform(-1, 1) * side for side in image.size)
    x, y = image.width / 2, image.height / 2
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    back = (cos, sin, x - cos * (x + across) - sin * (y + down), -sin, cos, y + sin * (x + across) - cos * (y + down))
    return image.transform(image.size, Image.Transform.AFFINE, back, Image.Resampling.BILINEAR, fillcolor=_mean(image))


def destroyed(image: Image.Image) -> bool:
    """Whether nothing is left to see: one colour, or narrower than two pixels."""
    return min(image.size) < 2 or all(low == high for low, high in image.convert("RGB").getextrema())  # type: ignore[misc]
