"""Plots become safe pictures: only the pixels of a PNG and the shapes of an SVG are kept."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import matplotlib as mpl
import pytest

from dlo_lib.grading.classroom.feedback import pictures
from dlo_lib.grading.classroom.feedback.pictures import (
    MOST_ELEMENTS,
    MOST_PICTURES,
    Budget,
    clean_png,
    clean_svg,
    pictures_of,
)

mpl.use("agg")
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9" height="9">'
)


def plotted(kind: str) -> bytes:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(2, 2))
    axes.imshow([[0, 1], [1, 0]])
    axes.set_title("mine")
    content = io.BytesIO()
    figure.savefig(content, format=kind, metadata={"Title": "a secret"} if kind == "png" else None)
    plt.close(figure)
    return content.getvalue()


PNG, SVG = plotted("png"), plotted("svg").decode()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def pixels(content: bytes) -> Any:
    import matplotlib.image

    return matplotlib.image.imread(io.BytesIO(content))


def test_a_png_keeps_its_pixels_and_loses_its_texts() -> None:
    clean = clean_png(PNG + b"<script>alert(1)</script>")
    assert clean is not None
    assert (pixels(clean) == pixels(PNG)).all()
    assert b"a secret" in PNG
    assert b"a secret" not in clean
    assert b"script" not in clean


def test_data_other_than_pixels_is_removed() -> None:
    clean = clean_png(PNG[:33] + chunk(b"EVIL", b"x") + chunk(b"tEXt", b"Comment\0<script>") + PNG[33:])
    assert clean is not None
    assert (pixels(clean) == pixels(PNG)).all()
    assert b"EVIL" not in clean
    assert b"script" not in clean


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "I;16", "RGB", "RGBA"])
def test_every_kind_of_png_looks_the_same(mode: str) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(PNG)).convert(mode)
    content = io.BytesIO()
    picture.save(content, "PNG", transparency=3 if mode == "P" else None)
    clean = clean_png(content.getvalue())
    assert clean is not None
    before, after = (Image.open(io.BytesIO(png)).convert("RGBA") for png in (content.getvalue(), clean))
    assert before.tobytes() == after.tobytes()


def test_the_decoded_size_of_a_picture_is_limited() -> None:
    bomb = PNG[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 4000, 4001, 8, 0, 0, 0, 0))
    bomb += chunk(b"IDAT", zlib.compress(bytes(4001 * 4001))) + chunk(b"IEND", b"")
    assert clean_png(bomb) is None
    text = PNG[:33] + chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 23))) + PNG[33:]
    assert clean_png(text) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GIF89a",
        PNG[:-20],
        PNG[:40] + b"\xff" + PNG[41:],
        PNG[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)) + PNG[33:],
        PNG[:8] + chunk(b"IEND", b""),
    ],
    ids=["empty", "gif", "cut", "altered", "huge", "no pixels"],
)
def test_a_png_that_is_damaged_or_too_large_is_not_shown(content: bytes) -> None:
    assert clean_png(content) is None


def test_a_plot_as_svg_looks_the_same() -> None:
    clean = (clean_svg(SVG) or b"").decode()
    assert clean.count("<path") == SVG.count("<path")
    assert clean.count("<use") == SVG.count("<use")
    assert clean.count("data:image/png;base64,") == 1
    assert "metadata" not in clean


@pytest.mark.parametrize(
    "inside",
    [
        "<script>alert(1)</script>",
        '<rect width="1" height="1" onload="alert(1)"/>',
        '<a xlink:href="javascript:alert(1)"><text>click</text></a>',
        '<image href="http://evil.example/x.png"/>',
        '<image xlink:href="data:image/svg+xml;base64,PHN2Zy8+"/>',
        '<use href="http://evil.example/x.svg#a"/>',
        '<rect style="fill: url(http://evil.example/x)"/>',
        '<rect fill="url( &quot;http://evil.example&quot; )"/>',
        "<style>@import 'http://evil.example/x.css';</style>",
        "<style>rect { background: url(//evil.example) }</style>",
        '<foreignObject><iframe xmlns="http://www.w3.org/1999/xhtml" src="http://evil.example"/></foreignObject>',
        '<animate attributeName="href" values="javascript:alert(1)"/>',
        '<set xmlns="http://www.w3.org/2000/svg" attributeName="onload" to="alert(1)"/>',
        '<?xml-stylesheet href="http://evil.example"?>',
        '<rect style="b\\65havior: expression(alert(1))"/>',
    ],
)
def test_an_svg_keeps_no_script_and_no_external_reference(inside: str) -> None:
    clean = (clean_svg(f"{HEAD}<g>{inside}</g><circle r='3'/></svg>") or b"").decode().lower()
    assert "<circle" in clean
    assert not [
        word
        for word in ("evil", "alert", "script", "onload", "import", "foreign", "animate", "<set")
        if word in clean
    ]


def test_an_svg_with_nested_references_is_cut_or_refused() -> None:
    doubling = "".join(
        f'<g id="a{n}"><use xlink:href="#a{n - 1}"/><use xlink:href="#a{n - 1}"/></g>' for n in range(1, 40)
    )
    clean = (clean_svg(f'{HEAD}<path id="a0" d="M0 0"/>{doubling}</svg>') or b"").decode()
    assert clean.count("href") == 2  # those of the first level, whose targets have none
    entities = "<!DOCTYPE svg [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;'>]>"
    assert clean_svg(f"{entities}{HEAD}<text>&b;</text></svg>") is None
    for levels in (101, 3000):
        assert clean_svg(f"{HEAD}{'<g>' * levels}{'</g>' * levels}</svg>") is None
    assert clean_svg(f"{HEAD}{'<g>' * 99}{'</g>' * 99}</svg>") is not None
    assert clean_svg("<html/>") is None
    assert clean_svg("<svg") is None


def cell(*outputs: object) -> dict[str, object]:
    return {"cell_type": "code", "id": "c", "metadata": {}, "outputs": list(outputs)}


def output(**data: object) -> dict[str, object]:
    return {
        "output_type": "display_data",
        "data": {name.replace("_", "/", 1): value for name, value in data.items()},
    }


def test_the_pictures_of_a_notebook_are_taken_in_order() -> None:
    good, odd = (
        base64.b64encode(PNG).decode(),
        [None, 3, {"data": 5}, {"data": {"image/png": 7}}, {"data": {"image/png": "no base64!"}}],
    )
    found = pictures_of(
        {
            "cells": [
                7,
                cell(*odd),
                {"outputs": {}},
                cell(output(image_png=[good[:9], good[9:]])),
                cell(output(image_jpeg="a")),
            ]
        }
    )
    assert [picture.cell for picture in found.shown] == ["c"]
    assert base64.b64decode(found.shown[0].address.partition(",")[2]) == clean_png(PNG)
    assert found.left_out == 3


def test_the_number_of_pictures_of_a_page_is_limited() -> None:
    many = [output(image_png=base64.b64encode(PNG).decode()) for _ in range(MOST_PICTURES + 3)]
    assert (
        len(pictures_of({"cells": [cell(*many)]}).shown),
        pictures_of({"cells": [cell(*many)]}).left_out,
    ) == (MOST_PICTURES, 3)
    assert pictures_of({"cells": "none"}).shown == ()


def flat(side: int) -> str:
    """Return a PNG of one colour: a few kB that decode to ``side * side`` bytes."""
    content = PNG[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    content += chunk(b"IDAT", zlib.compress(bytes(side * (side + 1)))) + chunk(b"IEND", b"")
    return base64.b64encode(content).decode()


def test_an_svg_declares_no_attributes_and_no_entities() -> None:
    """50,000 elements with 2,000 default attributes each need gigabytes."""
    inside = f"{HEAD}<g/></svg>"
    assert clean_svg(f"<!DOCTYPE svg [<!ATTLIST g a CDATA 'x'>]>{inside}") is None
    assert clean_svg(f"<!DOCTYPE svg SYSTEM 'http://evil.example/x.dtd'>{inside}") is None
    assert clean_svg(f"<!DOCTYPE svg><!DOCTYPE svg [<!ATTLIST g a CDATA 'x'>]>{inside}") is None
    assert "<!DOCTYPE" in SVG, "matplotlib's, which declares nothing"


def test_a_picture_that_fails_costs_only_its_place() -> None:
    attributes = " ".join(f"a{number} CDATA 'x'" for number in range(3000))
    bomb = f"<!DOCTYPE svg [<!ATTLIST g {attributes}>]>{HEAD}{'<g/>' * 50_000}</svg>"
    good = output(image_png=base64.b64encode(PNG).decode())
    found = pictures_of({"cells": [cell({"data": {"image/svg+xml": bomb}}, good)]})
    assert (len(found.shown), found.left_out) == (1, 1)


def test_all_pictures_of_a_page_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    real = pictures.Budget.take

    def count(self: Budget, pixels: int = 0, elements: int = 0, size: int = 0) -> bool:
        taken = real(self, pixels, elements, size)
        decoded.append(pixels if taken else 0)
        return taken

    monkeypatch.setattr(pictures.Budget, "take", count)
    png = flat(1000)
    picture = f'<image href="data:image/png;base64,{png}"/>'
    inside = f"{HEAD}{picture * 140}</svg>"
    many = [{"data": {"image/png": flat(3900)}}] * 12
    for notebook in (cell({"data": {"image/svg+xml": inside}}), cell(*many)):
        decoded.clear()
        pictures_of({"cells": [notebook]})
        assert 100_000_000 < sum(decoded) <= Budget().pixels


def test_the_elements_of_an_svg_are_counted_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clean_svg(f"{HEAD}{'<g/>' * (MOST_ELEMENTS + 1)}</svg>") is None
    monkeypatch.setattr(pictures.ET, "fromstring", lambda _: pytest.fail("it is parsed"))
    assert clean_svg(f"{HEAD}{'<g/>' * (3 * MOST_ELEMENTS)}</svg>") is None
