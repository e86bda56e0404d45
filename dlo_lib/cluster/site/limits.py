"""Limits of a QOS: the time and the GPUs of a job, and the jobs of a user."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.description import Qos, Site
from dlo_lib.cluster.site.duration import short_duration, slurm_duration


@dataclass(frozen=True)
class Demand:
    """What a QOS limits: the time and the GPUs of one job, and the number of jobs."""

    time: timedelta
    gpus: int
    jobs: int


def qos_of(site: Site, name: str) -> Qos | None:
    """Return the QOS whose limits apply, the site's first one if none is named; None if the site has none.

    Raises:
        UserError: the site has no QOS of this name.
    """
    if not site.qos:
        return None
    known = {qos.name: qos for qos in site.qos}
    if name and name not in known:
        raise unknown_name(f"QOS of {site.name}", name, known)
    return known[name] if name else site.qos[0]


def check_limits(site: Site, qos: Qos, want: Demand) -> None:
    """Check a demand against the limits of a QOS.

    Raises:
        UserError: it is beyond one of them; the message names what the site allows.
    """
    others = [other for other in site.qos if other is not qos and not _exceeded(other, want)]
    cures = [f'qos="{other.name}" ({_limits(other)})' for other in others]
    for what in _exceeded(qos, want):
        if what == "time":
            said = tr(
                "{time} is more than {qos} allows", time=short_duration(want.time), qos=_with_limits(qos)
            )
            cures.append(
                tr(
                    'requeue=True with time="{most}" (stops with a checkpoint and resumes)',
                    most=slurm_duration(qos.time),
                )
            )
        elif what == "gpus":
            said = tr("{gpus} GPUs are more than {qos} allows", gpus=want.gpus, qos=_with_limits(qos))
            cures.append(tr("at most {most} GPUs", most=qos.gpus))
        else:
            said = tr("{jobs} jobs are more than {qos} allows", jobs=want.jobs, qos=_with_limits(qos))
            cures.append(tr("a smaller sweep"))
        raise UserError(f"{said}: {tr('use')} {tr(' or ').join(cures)}")


def time_of_site(site: Site, wanted: timedelta, qos: str = "") -> timedelta:
    """Return ``wanted``, or the longest time of a job of the site if that is less."""
    limit = qos_of(site, qos)
    return wanted if limit is None else min(wanted, limit.time)


def _exceeded(qos: Qos, want: Demand) -> list[str]:
    asked = {
        "time": (want.time, qos.time),
        "gpus": (want.gpus, qos.gpus),
        "jobs": (want.jobs, qos.jobs),
    }
    return [name for name, (value, most) in asked.items() if most is not None and value > most]  # type: ignore[operator]


def _with_limits(qos: Qos) -> str:
    return f"{qos.name} ({_limits(qos)})"


def _limits(qos: Qos) -> str:
    parts = [short_duration(qos.time)]
    parts += [tr("at most {gpus} GPUs", gpus=qos.gpus)] * (qos.gpus is not None)
    parts += [tr("at most {jobs} jobs", jobs=qos.jobs)] * (qos.jobs is not None)
    return ", ".join(parts)
