"""A picture with few colours, at a fifth of its size: the browser counts the colours, this writes the PNG."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

# The most frequent colours that are not near one another, so that rare hues stay; each other one becomes the nearest.
REDUCE = """async ([picture, most, near]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${picture}`;
  await image.decode();
  const { width, height } = image;
  const canvas = Object.assign(document.createElement('canvas'), { width, height });
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  const far = (a, b) => { // a hue that is lost is seen more than a shade
    const [red, green, blue] = [0, 8, 16].map((by) => ((a >> by) & 255) - ((b >> by) & 255));
    return red ** 2 + green ** 2 + blue ** 2 + 2 * ((red - green) ** 2 + (green - blue) ** 2);
  };
  const some = [];
  for (const [pixel] of [...counts].sort((a, b) => b[1] - a[1])) {
    if (some.length < most && some.every((other) => far(other, pixel) > near)) some.push(pixel);
  }
  const place = new Map(some.map((pixel, i) => [pixel, i]));
  for (const pixel of counts.keys()) {
    if (place.has(pixel)) continue;
    place.set(pixel, some.reduce((best, one, i) => (far(one, pixel) < far(some[best], pixel) ? i : best), 0));
  }
  const bytes = Uint8Array.from(pixels, (pixel) => place.get(pixel));
  let text = '';
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return { width, height, colours: some, indices: btoa(text) };
}"""


MOST, NEAR = 96, 160  # colours; of two of them, at least: squared, of channels and of hues


def reduced(page: Any, png: bytes) -> bytes:
    """A PNG with a palette. `page`: of a browser, without a policy of its own."""
    found = page.evaluate(REDUCE, [base64.b64encode(png).decode(), MOST, NEAR])
    width, height, data = found["width"], found["height"], base64.b64decode(found["indices"])
    lines = b"".join(b"\0" + data[y * width : (y + 1) * width] for y in range(height))
    colours = b"".join(struct.pack("<I", colour)[:3] for colour in found["colours"])
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", colours), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    name, data = part
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
