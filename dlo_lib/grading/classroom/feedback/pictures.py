"""Make the plots of a student's notebook safe for the feedback page.

Only PNG and SVG are accepted. Pillow decodes a PNG, within limits on bytes and pixels, and writes only its
pixels, without texts, profiles and other data. An SVG is rebuilt from an allow-list of shapes: no scripts,
events, links, fonts or external files, and no nested ``use`` elements, whose size grows exponentially. Pillow
does not read SVG, and we know no library that cleans SVG as strictly. The page includes both as ``<img>``,
where browsers run no scripts.

All pictures of a page share one :class:`Budget` of bytes, pixels and elements, and memory is limited while
one is decoded. A picture that exceeds a limit or is damaged is left out, and the others are shown.
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

from dlo_lib.grading.sandbox.limits import limit_growth

# what Pillow raises
DAMAGED = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
SPENT = (MemoryError, RecursionError)
MOST_PIXELS = 16_000_000
MOST_BYTES = 3 << 20  # of one picture
MOST_ELEMENTS = 60_000
MOST_LEVELS = 100
MOST_PICTURES, MOST_TOTAL = 24, 12 << 20  # of one page, the last in bytes
MOST_MEMORY = 512 << 20  # bytes to decode one picture

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
PLAIN_DOCTYPE = re.compile(
    r"<!DOCTYPE\s+svg(\s+PUBLIC\s+\"[^\"<>\[]*\"\s+\"[^\"<>\[]*\")?\s*>"
)  # matplotlib's
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


@dataclass
class Budget:
    """What the pictures of a page may still cost, shown or left out.

    Attributes:
        pixels: of all PNGs, those inside an SVG too.
        elements: of all SVGs.
        bytes: of the text of all pictures in the notebook.
    """

    pixels: int = 8 * MOST_PIXELS
    elements: int = 4 * MOST_ELEMENTS
    bytes: int = 2 * MOST_TOTAL

    def take(self, pixels: int = 0, elements: int = 0, size: int = 0) -> bool:
        """Subtract the cost of a picture; return False, and subtract nothing, if less is left."""
        left = (self.pixels - pixels, self.elements - elements, self.bytes - size)
        if min(left) < 0:
            return False
        self.pixels, self.elements, self.bytes = left
        return True


def pictures_of(notebook: Mapping[str, Any]) -> Plots:
    """Return the plots among the outputs of a parsed notebook with any content."""
    shown: list[Plot] = []
    left_out = total = 0
    budget = Budget()
    for cell, data in _outputs(notebook):
        address = _address(data, budget) if len(shown) < MOST_PICTURES else None
        if address is not None and total + len(address) <= MOST_TOTAL:
            shown.append(Plot(cell, address))
            total += len(address)
        else:
            left_out += 1
    return Plots(tuple(shown), left_out)


def _address(data: Mapping[str, Any], budget: Budget) -> str | None:
    """Return the address of an output with a picture, or None if it cannot be shown."""
    for kind, clean in (("image/png", _png_address), ("image/svg+xml", _svg_address)):
        text = _text(data.get(kind))
        if not text or not budget.take(size=len(text)):
            continue
        try:
            with limit_growth(MOST_MEMORY):
                address = clean(text, budget)
        except SPENT:
            continue
        if address is not None:
            return address
    return None


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


def _png_address(text: str, budget: Budget) -> str | None:
    try:
        content = base64.b64decode("".join(text[: 2 * MOST_BYTES].split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    clean = clean_png(content, budget)
    return None if clean is None else f"data:image/png;base64,{base64.b64encode(clean).decode()}"


def clean_png(content: bytes, budget: Budget | None = None) -> bytes | None:
    """Return the pixels of a PNG as a new PNG; None if it is damaged, of another format, or costs more than a
    picture may or ``budget`` has.
    """
    budget = budget or Budget()
    if len(content) > MOST_BYTES:
        return None
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            pixels = picture.width * picture.height
            if pixels > MOST_PIXELS or not budget.take(pixels=pixels):
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


def _svg_address(text: str, budget: Budget) -> str | None:
    clean = clean_svg(text, budget)
    return None if clean is None else f"data:image/svg+xml;base64,{base64.b64encode(clean).decode()}"


def clean_svg(text: str, budget: Budget | None = None) -> bytes | None:
    """Return the SVG rebuilt from the allow-list; None if it is damaged, no SVG, or costs more than
    a picture may or ``budget`` has.
    """
    budget = budget or Budget()
    # Entities and default attributes make a document grow when it is parsed; only a DOCTYPE declares them.
    text = PLAIN_DOCTYPE.sub("", text, count=1) if len(text) <= MOST_BYTES else ""
    tags = text.count("<")
    if "<!DOCTYPE" in text or tags > 3 * MOST_ELEMENTS:  # opening, closing, and a comment
        return None
    try:
        root = ET.fromstring(text)
        elements = sum(1 for _ in root.iter())
        if root.tag != f"{SVG}svg" or elements > MOST_ELEMENTS or not budget.take(elements=elements):
            return None
        if _too_deep(root):
            return None
        nested: set[str | None] = set()
        _holds_use(root, nested)
        ET.register_namespace("", SVG[1:-1])
        ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        return ET.tostring(_clean(root, nested, budget), encoding="utf-8")
    except (ET.ParseError, ValueError):
        return None


def _holds_use(element: ET.Element, found: set[str | None]) -> bool:
    """Return whether the element is or contains a ``use``; add the ids of all such elements to ``found``."""
    inside = [_holds_use(below, found) for below in element]
    holds = element.tag == f"{SVG}use" or any(inside)
    if holds:
        found.add(element.get("id"))
    return holds


def _too_deep(root: ET.Element) -> bool:
    """Return whether elements are nested more than ``MOST_LEVELS`` times: cleaning and writing recurse."""
    level = [root]
    for _ in range(MOST_LEVELS):
        level = [below for element in level for below in element]
    return bool(level)


def _clean(element: ET.Element, nested: set[str | None], budget: Budget) -> ET.Element:
    copy = ET.Element(element.tag)
    copy.text, copy.tail = element.text, element.tail
    for name, value in element.attrib.items():
        if name in ATTRIBUTES and not OUTSIDE.search(value):
            copy.set(name, value)
    target = element.get(XLINK) or element.get("href")
    kind = element.tag.removeprefix(SVG)
    if kind == "image" and target is not None:
        head, _, data = target.partition(",")
        if head == "data:image/png;base64" and (address := _png_address(data, budget)):
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
        copy.append(_clean(below, nested, budget))
    return copy


def _text(value: object) -> str:
    return "".join(part for part in (value if type(value) is list else [value]) if type(part) is str)


def _dict(value: object) -> dict[str, Any]:
    return value if type(value) is dict else {}


def _list(value: object) -> list[Any]:
    return value if type(value) is list else []
