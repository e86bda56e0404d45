"""The answers of a lab's quiz and their reasons, for a person who works without a class.

``labs/`` and the kit hold them in ``quiz_answers.json``, encoded in base64, so that a reader of the file sees
no answer by accident. The encoding protects nothing, as in ``references``. The release in the exchange of a
class never has the file: there, grading gives the reasons, when the instructor decides.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.quiz_question import Answer
from dlo_lib.grading.lab.course import QUIZ_ANSWERS_FILE
from dlo_lib.grading.lab.declared import declared_answers


def quiz_answers_text(folder: Path) -> str:
    """Return the content of ``quiz_answers.json`` of the lab in ``folder`` (``solutions/NN_name``).

    Raises:
        UserError: the answers in ``hidden.py`` are no literals.
    """
    encoded = {
        question: base64.b64encode(json.dumps([answer.option, answer.why]).encode()).decode()
        for question, answer in declared_answers(folder).items()
    }
    return json.dumps(encoded, indent=1) + "\n"


def read_quiz_answers(folder: Path) -> dict[str, Answer]:
    """Return the answers by question, from ``quiz_answers.json`` in ``folder``; empty without that file.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / QUIZ_ANSWERS_FILE
    try:
        encoded = json.loads(file.read_text(encoding="utf-8"))
        decoded = {
            question: json.loads(base64.b64decode(text, validate=True)) for question, text in encoded.items()
        }
        return {question: Answer(str(option), str(why)) for question, (option, why) in decoded.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError, binascii.Error):
        raise UserError(tr("{file} is damaged: `dlo lab` restores it", file=file)) from None
