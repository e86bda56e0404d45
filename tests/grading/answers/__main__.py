"""The points of hostile and odd answers: earned / deserved / of the question.

The command ends with 1 if an answer earns other points than it must.
"""

from __future__ import annotations

import argparse
import sys

from dlo_lib.grading.lab.course import source_labs
from tests.grading.answers import Kind
from tests.grading.answers.generated import all_answers
from tests.grading.answers.judging import OpenLabs, table


def main() -> int:
    """Print the table; return 1 if an answer earns other points than it must."""
    parser = argparse.ArgumentParser(prog="python -m tests.grading.answers", description=__doc__)
    parser.add_argument("labs", nargs="*", help="numbers of labs; all without")
    parser.add_argument("--only", default="", help="answers with this text in their name")
    parser.add_argument("--by", default="", help="answers of this generator")
    parser.add_argument("--kind", choices=[kind.value for kind in Kind], help="hostile or odd ones")
    chosen = parser.parse_args()
    labs, unexpected = OpenLabs(), 0
    names = [lab.directory for lab in source_labs() if lab.directory.startswith(tuple(chosen.labs) or ("",))]
    try:
        for name in names:
            own = [
                answer
                for kind in Kind
                if chosen.kind in (None, kind.value)
                for answer in all_answers(labs.lab(name), kind)
                if chosen.only in answer.name and chosen.by in answer.by
            ]
            for line, good in table(labs, own):
                unexpected += not good
                print(line, flush=True)
    finally:
        labs.close()
    print(f"{unexpected} answers earn other points than they deserve")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
