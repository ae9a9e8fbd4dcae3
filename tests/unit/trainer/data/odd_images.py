"""Images that readers decode otherwise than one another, and a few that all decode alike: (image, how it is saved)."""

import numpy as np
from PIL import Image

SIDES = (23, 17)
ORIENTATION = 274


def noise(mode, seed=0):
    shape = (SIDES[1], SIDES[0], len(Image.new(mode, (1, 1)).getbands()))
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).squeeze(), mode)


def turned(orientation):
    image = noise("RGB")
    exif = image.getexif()
    exif[ORIENTATION] = orientation
    return image, {"exif": exif}


def sixteen_bits():
    values = np.random.default_rng(1).integers(0, 2**16, (SIDES[1], SIDES[0]), dtype=np.uint16)
    return Image.fromarray(values), {}


def palette_with_a_hole():
    image = noise("RGB").quantize(16)
    return image, {"transparency": 3}


def animation():
    return noise("RGB").quantize(16), {"save_all": True, "append_images": [noise("RGB", 1).quantize(16)]}


FILES = {
    "plain.png": (noise("RGB"), {}),
    "plain.jpg": (noise("RGB"), {}),
    "grey.png": (noise("L"), {}),
    "turned.jpg": turned(6),
    "mirrored.png": turned(2),
    "turned.webp": turned(8),
    "alpha.png": (noise("RGBA"), {}),
    "grey-alpha.png": (noise("LA"), {}),
    "palette.png": (noise("RGB").quantize(16), {}),
    "hole.png": palette_with_a_hole(),
    "hole.gif": palette_with_a_hole(),
    "bilevel.png": (noise("L").convert("1"), {}),
    "sixteen.png": sixteen_bits(),
    "sixteen.tif": sixteen_bits(),
    "cmyk.jpg": (noise("CMYK"), {}),
    "animated.gif": animation(),
    "animated.webp": animation(),
    "plain.webp": (noise("RGB"), {"lossless": True}),
    "alpha.webp": (noise("RGBA"), {"lossless": True}),
    "plain.bmp": (noise("RGB"), {}),
}
