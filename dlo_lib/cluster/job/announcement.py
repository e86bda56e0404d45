"""What a call prints before it submits: what the job may cost, when it may start, and what else applies.

SLURM plans the start with ``sbatch --test-only``, which refuses more than a submission does: a job that must
wait for nodes, a limit or a reservation counts as refused there. So the refusal is shown only without a
submission (``dry_run``), and only when a submission would be refused too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.cluster.run import array_parts
from dlo_lib.cluster.script.template import JobScript
from dlo_lib.cluster.script.work import Once, Work
from dlo_lib.cluster.site import user_environment
from dlo_lib.cluster.site.cost import estimate
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.site.duration import short_duration
from dlo_lib.cluster.site.request import Allocation
from dlo_lib.cluster.slurm import commands

SHELL_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")

_WAITS = (
    "accounting/qos policy",
    "reservation not usable",
    "reservation is busy",
    "reservation not available",
    "required node not available",
    "nodes required for job are down, drained or reserved",
    "qos resource threshold",
    "job is currently held",
    "requested nodes are busy",
    "requested partition configuration not available now",
    "burst buffer",
    "partition in inactive",
    "partition inactive",
    "partition is in down",
    "partition down",
    "licenses",
    "dependency",
    "unable to contact",
    "try again",
    "resource temporarily unavailable",
    "timed out",
)
"""Parts of SLURM's messages for which a submission is accepted and the job waits, or which are no verdict."""


def announcement(script: JobScript, program: Work, starts_alone: bool, dry_run: bool = False) -> str:
    """Return the lines to print about a job.

    Args:
        script: of the job.
        program: what the call named; the script runs a copy of it.
        starts_alone: whether it waits for no other job, so that SLURM can plan its start.
        dry_run: whether the job is not submitted, so that this is the only place where SLURM's refusal shows.
    """
    want = script.allocation
    said = f"{script.name}: {estimate(want, len(script.elements))}"
    if want.site.scheduler is not Scheduler.SLURM:
        return said
    text = script.text()
    lines = [said, *_of_user(os.environ, text), *_of_program(program)]
    if not commands.is_available():
        return "\n".join(lines)
    lines += _beyond_partition(want)
    if not starts_alone:
        return "\n".join(lines)
    try:
        most = array_parts.most_elements() if script.is_array else len(script.elements)
        start, refusal = commands.expected_start(array_parts.planned(text, script.elements, most))
    except commands.NoAnswer:  # the estimate is no reason to refuse the job
        lines[0] = tr("{said}; no expected start, because SLURM does not answer", said=said)
        return "\n".join(lines)
    if start:
        lines[0] = tr("{said}; expected start {start}", said=said, start=start)
    if dry_run and is_certain(refusal):
        lines.append(tr("SLURM would refuse the job: {why}", why=refusal))
    return "\n".join(lines)


def is_certain(refusal: str) -> bool:
    """Return whether SLURM would refuse the submission too, after it has refused to plan the start."""
    return bool(refusal) and not any(part in refusal.lower() for part in _WAITS)


def _of_program(work: Work) -> list[str]:
    """Return a line if a shell script of the user has options of sbatch, which are comments to the job."""
    words = work.command if isinstance(work, Once) else ()
    for file in (Path(word) for word in words if word.endswith(SHELL_SCRIPTS)):
        if file.is_file() and re.search(r"^#SBATCH ", file.read_text(errors="replace"), re.MULTILINE):
            text = "the #SBATCH lines of {file} do not apply: give their options to submit()"
            return [tr(text, file=file.name)]
    return []


def _beyond_partition(want: Allocation) -> list[str]:
    """Return a line if no partition of a job allows its time: SLURM lets it wait, and a QOS may allow it."""
    names = want.partition or want.site.partition
    most = commands.longest_time(names)
    if most is None or want.time <= most:
        return []
    text = "{partition} allows {most}, and the job asks for {time}: SLURM may accept it and never start it"
    where = tr("partition {names}", names=names) if names else tr("the default partition")
    return [tr(text, partition=where, most=short_duration(most), time=short_duration(want.time))]


def _of_user(environment: Mapping[str, str], script: str) -> list[str]:
    names = user_environment.honoured(environment, script)
    if not names:
        return []
    return [tr("options of your environment apply too: {names}", names=", ".join(names))]
