"""Draws the pictures of this folder with Pillow 13.0: in each way that encoders store pixels, and beside each its pixels as
Pillow reads them, red, green and blue of 9 x 7 pixels (`.rgb`)."""

import numpy
from PIL import Image

WIDTH, HEIGHT = 9, 7
y, x = numpy.mgrid[0:HEIGHT, 0:WIDTH]
rgb = numpy.stack([40 + 15 * x, 60 + 20 * y, 90 + 5 * (x + y)], axis=2).astype(numpy.uint8)
picture = Image.fromarray(rgb)
gray = Image.fromarray((20 + 12 * x + 15 * y).astype(numpy.uint8))
alpha = Image.fromarray((255 - 20 * x).astype(numpy.uint8))
rgba = picture.copy()
rgba.putalpha(alpha)
gray_alpha = gray.copy()
gray_alpha.putalpha(alpha)
palette = picture.quantize(16)

PNG = {
    "bits": (gray.convert("1"), {}),
    "gray": (gray, {}),
    "gray16": (Image.fromarray((1000 * x + 9000 * y).astype(numpy.uint16)), {}),
    "gray-alpha": (gray_alpha, {}),
    "palette": (palette, {}),
    "palette-transparent": (palette, {"transparency": 3}),
    "gray-transparent": (gray, {"transparency": 20}),
    "rgb-transparent": (picture, {"transparency": (40, 60, 90)}),
    "rgb": (picture, {}),
    "rgba": (rgba, {}),
}
JPEG = {
    "gray": (gray, {}),
    "full-chroma": (picture, {"subsampling": 0}),
    "half-chroma": (picture, {"subsampling": 2}),
    "progressive": (picture, {"progressive": True, "subsampling": 0}),
}


def right(name):
    read = Image.open(name)
    if read.mode.startswith("I"):
        values = numpy.asarray(read).astype(numpy.uint32)
        read = Image.fromarray(((values + 128) // 257).astype(numpy.uint8))
    return read.convert("RGBA").convert("RGB") if "transparency" in read.info else read.convert("RGB")


for kind, all_of_kind in (("png", PNG), ("jpg", JPEG)):
    for name, (image, options) in all_of_kind.items():
        image.save(f"{name}.{kind}", **({"quality": 95} if kind == "jpg" else {}), **options)
        with open(f"{name}.{kind}.rgb", "wb") as file:
            file.write(right(f"{name}.{kind}").tobytes())
