"""The last few decoded images, for samples in a row that share theirs, such as the four option cycles of HR-Bench."""

from __future__ import annotations

from collections import OrderedDict

from PIL import Image

from realvr.imaging.reference import ImageRef


class ImageCache:
    """``open`` decodes an image unless it is one of the last ``keep`` that were opened. Not shared between threads.

    The images are shared too: copy one before drawing on it.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self.decoded = 0
        """How many images had to be decoded."""
        self._images: OrderedDict[ImageRef, Image.Image] = OrderedDict()

    def open(self, image: ImageRef) -> Image.Image:
        """The image, upright and RGB."""
        found = self._images.pop(image, None)
        if found is None:
            found = image.open()
            self.decoded += 1
        self._images[image] = found
        while len(self._images) > self.keep:
            self._images.popitem(last=False)
        return found
