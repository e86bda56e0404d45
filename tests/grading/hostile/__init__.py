"""The hostile class: submissions that students have made, could make, and should not make. One case per
student.

Whole notebooks, in modules of functions:
    damaged   files that are no notebooks        edited    frames changed: test cells, points, metadata, order
    clumsy    honest work in unusual files     loud      endless output
One answer, in ``tests/grading/answers/93_survival``, files ``hostile_*.py``:
    results   values that are no valid results        escapes   code that attacks the judge
    endings   code that does not end            ranks     blocked, forged, unused collectives; answers of the
    library

``CLASS`` is graded as a class: all whole notebooks, because what they change also reaches the gradebook and
the graded notebooks, and each tenth answer. All answers are judged without a class too, which costs a fifth
of the CPU time.
"""

from __future__ import annotations

from hostile.case import Family
from hostile.clumsy import HONEST
from hostile.damaged import FILES
from hostile.edited import FRAMES
from hostile.loud import LOUD

ANSWERS = Family()
for file in ("results", "escapes", "endings", "ranks"):
    ANSWERS.read(file)
JUDGED = ANSWERS.cases
CLASS = [case for family in (FILES, FRAMES, HONEST, LOUD) for case in family.cases] + JUDGED[::10]
