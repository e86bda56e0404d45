"""The start of a job's Python, which keeps to the copy of the code where a program changes ``sys.path``.

``sys.path.insert(0, "src")`` in a program puts a folder of the user before the copies in ``PYTHONPATH``. The
job would then import the modules of today. The file ``sitecustomize.py``, which Python runs when it starts,
makes the import system look in the copy instead of the original, whichever name the folder has in
``sys.path``. A ``sitecustomize`` of the environment runs as well.
"""

from __future__ import annotations

from collections.abc import Mapping

_TEXT = '''"""Modules of these folders come from the copy of the code that the job was submitted with."""
import importlib.machinery as machinery
import importlib.util
import os
import sys

COPIES = {copies!r}
IN_FOLDER = machinery.FileFinder.path_hook(
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)


def copied(entry):
    copy = COPIES.get(os.path.realpath(entry or "."))
    if copy is None:
        raise ImportError
    return IN_FOLDER(copy)


sys.path_hooks.insert(0, copied)
sys.path_importer_cache.clear()

HERE = os.path.dirname(os.path.realpath(__file__))
OTHERS = [entry for entry in sys.path if os.path.realpath(entry) != HERE]
spec = machinery.PathFinder.find_spec("sitecustomize", OTHERS)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
'''


def text(copies: Mapping[str, str]) -> str:
    """Return the content of ``sitecustomize.py``.

    Args:
        copies: folders of the copy by the folders of the user.
    """
    return _TEXT.format(copies=dict(copies))
