"""The recorder of the operations that a function runs is in :mod:`dlo_lib.base.operation_capture`.

There the scenarios of a lab can import it without the models of the library, which a lab may teach.
"""

from __future__ import annotations

from dlo_lib.base.operation_capture import OperationRecorder as OperationRecorder
