"""The hostile class: what students have handed in, could hand in, and should not. Each case is one student.

Whole notebooks, in modules of functions:
    damaged   files that are no notebook        edited    frames changed: test cells, points, metadata, order
    clumsy    honest work from clumsy hands     loud      output without end
One answer, in ``cells/``:
    results   values that are no results        escapes   code that reaches for the judge
    endings   code that does not end            ranks     collectives hung, forged, unused; the library's own answer
"""

from __future__ import annotations

from pathlib import Path

from hostile.case import Family
from hostile.clumsy import HONEST
from hostile.damaged import FILES
from hostile.edited import FRAMES
from hostile.loud import LOUD

ANSWERS = Family()
for file in ("results", "escapes", "endings", "ranks"):
    ANSWERS.read(Path(__file__).parent / "cells" / f"{file}.py")
CASES = [case for family in (FILES, FRAMES, HONEST, LOUD, ANSWERS) for case in family.cases]
