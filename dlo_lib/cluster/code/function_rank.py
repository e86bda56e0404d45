"""One rank of a job that is a function: the job script runs ``python -m`` with the name of this module."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

from dlo_lib.base.errors import EXIT_BAD_INPUT
from dlo_lib.base.files import write_aside
from dlo_lib.base.garbage import without_collector
from dlo_lib.base.text import tr
from dlo_lib.base.worker_start import start_workers_by_fork
from dlo_lib.cluster.code.function_job import CALL, CONTEXT, result_file

with without_collector():  # they import torch
    from dlo_lib.launch import explained, init_process_group, place
    from dlo_lib.launch.frames import register_sources, strip_library_frames
    from dlo_lib.launch.values import pack_result, unpack_call


def main() -> int:
    """Call the function on this rank; return the exit status."""
    folder, element = Path(os.environ["DLO_JOB"]), int(os.environ["DLO_ELEMENT"])
    context = json.loads((folder / CONTEXT).read_text(encoding="utf-8"))
    if context["python"] != list(sys.version_info[:2]):
        sent, running = (".".join(map(str, one)) for one in (context["python"], sys.version_info[:2]))
        print(
            tr(
                "the function was sent by Python {sent}, and the job runs Python {here}: "
                "use the same version, or submit a .py file",
                sent=sent,
                here=running,
            ),
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    sys.path[:0] = context["copies"]  # before the folders that the copies were made of
    sys.path += [entry for entry in context["path"] if entry not in sys.path]
    start_workers_by_fork()
    register_sources({name: tuple(lines) for name, lines in context["sources"].items()})
    fn, _, given = unpack_call((folder / CALL).read_bytes())
    here = place()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(explained(here))
            if here.world_size > 1:
                stack.enter_context(init_process_group(here))
            value = fn(**given["arguments"], **given["sweep"][element])
            if here.rank == 0:
                with write_aside(result_file(folder, element)) as aside:
                    aside.write_bytes(pack_result(value))
    except Exception as error:  # noqa: BLE001  the user's function may raise any error; show it from there
        traceback.print_exception(type(error), error, strip_library_frames(error.__traceback__))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
