"""The plots of a student's notebook, made safe to be shown to the student and to whoever opens the page.

Only PNG and SVG are taken. A PNG is copied chunk by chunk: what describes pixels stays, texts, profiles and what follows the end do not;
nothing is decoded here. An SVG is rebuilt from an allow-list of shapes: no script, no event, no link, no font, nothing from outside, and no
``use`` of a ``use``, which would grow without end. Both go into the page as ``<img>``, where browsers run nothing either.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"gAMA", b"cHRM", b"sRGB", b"pHYs"}
MOST_PIXELS = 16_000_000
MOST_BYTES = 3 << 20  # of one picture
MOST_ELEMENTS = 60_000
MOST_PICTURES, MOST_TOTAL = 24, 12 << 20  # of one page

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}href"
SHAPES = {"path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan"}
ELEMENTS = SHAPES | {"svg", "g", "defs", "use", "clipPath", "linearGradient", "radialGradient", "stop", "style", "image", "title"}
NAMES = (
    "id class style d x y x1 y1 x2 y2 cx cy r rx ry fx fy dx dy width height viewBox version points transform clip-path clip-rule fill "
    "fill-opacity fill-rule stroke stroke-width stroke-opacity stroke-linecap stroke-linejoin stroke-dasharray stroke-dashoffset "
    "stroke-miterlimit opacity offset stop-color stop-opacity gradientUnits gradientTransform clipPathUnits preserveAspectRatio "
    "font-size font-family font-weight font-style text-anchor dominant-baseline display visibility"
)
ATTRIBUTES = set(NAMES.split())
PLAIN_STYLE = re.compile(r"[\w\s*{}:;.,#%()'\"-]*")
OUTSIDE = re.compile(r"url\s*\((?!\s*['\"]?#)|@|\\|expression|javascript|import", re.IGNORECASE)
OWN = re.compile(r"#[\w.:-]+")


@dataclass(frozen=True)
class Picture:
    """A plot: the id of its cell, and a ``data:`` address for ``<img src>``."""

    cell: str
    address: str


@dataclass(frozen=True)
class Pictures:
    """The plots of a notebook in order, and how many were not taken: of another kind, damaged, or too many."""

    shown: tuple[Picture, ...]
    left_out: int


def pictures_of(notebook: Mapping[str, Any]) -> Pictures:
    """The plots among the outputs of a notebook as it was parsed, whatever else is in it."""
    shown: list[Picture] = []
    left_out = total = 0
    for cell, data in _outputs(notebook):
        png, svg = data.get("image/png"), data.get("image/svg+xml")
        address = (_png_address(_text(png)) if png is not None else None) or (_svg_address(_text(svg)) if svg is not None else None)
        if address is not None and len(shown) < MOST_PICTURES and total + len(address) <= MOST_TOTAL:
            shown.append(Picture(cell, address))
            total += len(address)
        else:
            left_out += 1
    return Pictures(tuple(shown), left_out)


def _outputs(notebook: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for cell in _list(notebook.get("cells")):
        identity = _dict(_dict(_dict(cell).get("metadata")).get("nbgrader")).get("grade_id") or _dict(cell).get("id")
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
    """The PNG without what is no pixel; None when it is damaged, too large, or none."""
    if not content.startswith(SIGNATURE) or len(content) > MOST_BYTES:
        return None
    kept, place, first = [SIGNATURE], len(SIGNATURE), True
    while place + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, place)
        kind, end = content[place + 4 : place + 8], place + 12 + length
        if end > len(content) or struct.unpack_from(">I", content, end - 4)[0] != zlib.crc32(content[place + 4 : end - 4]):
            return None
        if first != (kind == b"IHDR"):
            return None
        if first:
            if length != 13:
                return None
            width, height = struct.unpack_from(">II", content, place + 8)
            if not 0 < width * height <= MOST_PIXELS:
                return None
        first = False
        if kind in CHUNKS:
            kept.append(content[place:end])
        elif kind[:1].isupper():
            return None  # a part that a reader must understand, and we do not
        if kind == b"IEND":
            return b"".join(kept) if any(chunk[4:8] == b"IDAT" for chunk in kept[1:]) else None
        place = end
    return None


# -- SVG


def _svg_address(text: str) -> str | None:
    clean = clean_svg(text)
    return None if clean is None else f"data:image/svg+xml;base64,{base64.b64encode(clean).decode()}"


def clean_svg(text: str) -> bytes | None:
    """The SVG rebuilt from what is allowed; None when it is damaged, too large, or none."""
    if len(text) > MOST_BYTES or "<!ENTITY" in text:
        return None
    try:
        root = ET.fromstring(text)
        if root.tag != f"{SVG}svg" or sum(1 for _ in root.iter()) > MOST_ELEMENTS:
            return None
        nested = {element.get("id") for element in root.iter() if any(below.tag == f"{SVG}use" for below in element.iter())}
        ET.register_namespace("", SVG[1:-1])
        ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        return ET.tostring(_clean(root, nested), encoding="utf-8")
    except (ET.ParseError, ValueError, RecursionError):
        return None


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
        if not isinstance(below.tag, str) or not below.tag.startswith(SVG) or below.tag.removeprefix(SVG) not in ELEMENTS:
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
