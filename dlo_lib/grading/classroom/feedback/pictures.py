"""Make the plots of a student's notebook safe for the feedback page.

Only PNG and SVG are accepted. Pillow decodes a PNG, within limits on bytes and pixels, and writes only its
pixels, without texts, profiles and other data. An SVG is rebuilt from an allow-list of shapes: no scripts,
events, links, fonts or external files, and no nested ``use`` elements, whose size grows exponentially. Pillow
does not read SVG, and we know no library that cleans SVG as strictly. The page includes both as ``<img>``,
where browsers run no scripts.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

# what Pillow raises
DAMAGED = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
MOST_PIXELS = 16_000_000
MOST_BYTES = 3 << 20  # of one picture
MOST_ELEMENTS = 60_000
MOST_LEVELS = 100
MOST_PICTURES, MOST_TOTAL = 24, 12 << 20  # of one page

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}href"
SHAPES = {"path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan"}
ELEMENTS = SHAPES | {
    "svg",
    "g",
    "defs",
    "use",
    "clipPath",
    "linearGradient",
    "radialGradient",
    "stop",
    "style",
    "image",
    "title",
}
NAMES = (
    "id class style d x y x1 y1 x2 y2 cx cy r rx ry fx fy dx dy width height viewBox version points "
    "transform clip-path clip-rule fill fill-opacity fill-rule stroke stroke-width stroke-opacity "
    "stroke-linecap stroke-linejoin stroke-dasharray stroke-dashoffset stroke-miterlimit opacity offset "
    "stop-color stop-opacity gradientUnits gradientTransform clipPathUnits preserveAspectRatio font-size "
    "font-family font-weight font-style text-anchor dominant-baseline display visibility"
)
ATTRIBUTES = set(NAMES.split())
PLAIN_STYLE = re.compile(r"[\w\s*{}:;.,#%()'\"-]*")
OUTSIDE = re.compile(r"url\s*\((?!\s*['\"]?#)|@|\\|expression|javascript|import", re.IGNORECASE)
OWN = re.compile(r"#[\w.:-]+")


@dataclass(frozen=True)
class Plot:
    """A plot: the id of its cell, and a ``data:`` address for ``<img src>``."""

    cell: str
    address: str


@dataclass(frozen=True)
class Plots:
    """The plots of a notebook in order, and the number left out: of another kind, damaged, or above the
    limits.
    """

    shown: tuple[Plot, ...]
    left_out: int


def pictures_of(notebook: Mapping[str, Any]) -> Plots:
    """Return the plots among the outputs of a parsed notebook with any content."""
    shown: list[Plot] = []
    left_out = total = 0
    for cell, data in _outputs(notebook):
        png, svg = data.get("image/png"), data.get("image/svg+xml")
        address = (_png_address(_text(png)) if png is not None else None) or (
            _svg_address(_text(svg)) if svg is not None else None
        )
        if address is not None and len(shown) < MOST_PICTURES and total + len(address) <= MOST_TOTAL:
            shown.append(Plot(cell, address))
            total += len(address)
        else:
            left_out += 1
    return Plots(tuple(shown), left_out)


def _outputs(notebook: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for cell in _list(notebook.get("cells")):
        identity = _dict(_dict(_dict(cell).get("metadata")).get("nbgrader")).get("grade_id") or _dict(
            cell
        ).get("id")
        for output in _list(_dict(cell).get("outputs")):
            data = _dict(_dict(output).get("data"))
            if any(type(kind) is str and kind.startswith("image/") for kind in data):
                yield identity if type(identity) is str else "", data


# -- PNG


def _png_address(text: str) -> str | None:
    try:
        content = base64.b64decode("".join(text[: 2 * MOST_BYTES].split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    clean = clean_png(content)
    return None if clean is None else f"data:image/png;base64,{base64.b64encode(clean).decode()}"


def clean_png(content: bytes) -> bytes | None:
    """Return the pixels of a PNG as a new PNG; None if it is damaged, too large, or of another format."""
    if len(content) > MOST_BYTES:
        return None
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                return None
            picture.verify()  # checks checksums without decoding; the file must be reopened afterwards
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            plain = picture.convert(_plain_mode(picture))
    except DAMAGED:
        return None
    plain.info.clear()
    written = io.BytesIO()
    plain.save(written, "PNG")
    return written.getvalue()


def _plain_mode(picture: Image.Image) -> str:
    """Return a mode without palette and transparent colour that represents the picture exactly."""
    if "transparency" in picture.info or picture.mode in ("LA", "PA", "RGBA"):
        return "RGBA"
    if picture.mode in ("1", "L"):
        return "L"
    return picture.mode if picture.mode.startswith("I") else "RGB"  # I: 16 bits per pixel


# -- SVG


def _svg_address(text: str) -> str | None:
    clean = clean_svg(text)
    return None if clean is None else f"data:image/svg+xml;base64,{base64.b64encode(clean).decode()}"


def clean_svg(text: str) -> bytes | None:
    """Return the SVG rebuilt from the allow-list; None if it is damaged, too large, or no SVG."""
    if len(text) > MOST_BYTES or "<!ENTITY" in text:
        return None
    try:
        root = ET.fromstring(text)
        if root.tag != f"{SVG}svg" or sum(1 for _ in root.iter()) > MOST_ELEMENTS:
            return None
        if _too_deep(root):
            return None
        nested = {
            element.get("id")
            for element in root.iter()
            if any(below.tag == f"{SVG}use" for below in element.iter())
        }
        ET.register_namespace("", SVG[1:-1])
        ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        return ET.tostring(_clean(root, nested), encoding="utf-8")
    except (ET.ParseError, ValueError):
        return None


def _too_deep(root: ET.Element) -> bool:
    """Return whether elements are nested more than ``MOST_LEVELS`` times: cleaning and writing recurse."""
    level = [root]
    for _ in range(MOST_LEVELS):
        level = [below for element in level for below in element]
    return bool(level)


def _clean(element: ET.Element, nested: set[str | None]) -> ET.Element:
    copy = ET.Element(element.tag)
    copy.text, copy.tail = element.text, element.tail
    for name, value in element.attrib.items():
        if name in ATTRIBUTES and not OUTSIDE.search(value):
            copy.set(name, value)
    target = element.get(XLINK) or element.get("href")
    kind = element.tag.removeprefix(SVG)
    if kind == "image" and target is not None:
        head, _, data = target.partition(",")
        if head == "data:image/png;base64" and (address := _png_address(data)):
            copy.set(XLINK, address)
    elif target is not None and OWN.fullmatch(target) and (kind != "use" or target[1:] not in nested):
        copy.set(XLINK, target)
    for below in element:
        if (
            not isinstance(below.tag, str)
            or not below.tag.startswith(SVG)
            or below.tag.removeprefix(SVG) not in ELEMENTS
        ):
            continue
        style = below.text or ""
        if below.tag == f"{SVG}style" and (OUTSIDE.search(style) or not PLAIN_STYLE.fullmatch(style)):
            continue
        copy.append(_clean(below, nested))
    return copy


def _text(value: object) -> str:
    return "".join(part for part in (value if type(value) is list else [value]) if type(part) is str)


def _dict(value: object) -> dict[str, Any]:
    return value if type(value) is dict else {}


def _list(value: object) -> list[Any]:
    return value if type(value) is list else []
