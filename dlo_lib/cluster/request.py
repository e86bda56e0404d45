"""The resources of a job (nodes, ranks, cores, limits), checked against the site before the job is submitted.

SLURM accepts most wrong requests and lets them wait forever, or refuses them with a code. Here each becomes
one line with its cure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from dlo_lib.cluster.duration import parse_duration, short_duration, slurm_duration
from dlo_lib.cluster.site import Qos, Scheduler, Site
from dlo_lib.errors import UserError, unknown_name
from dlo_lib.text import tr


@dataclass(frozen=True)
class Request:
    """What a user requests from a site.

    Attributes:
        gpus: GPUs of one job on all its nodes, one rank each; 0: one task without a GPU.
        nodes: None: as few as hold the GPUs.
        cores: cores of a task; None: the share of one GPU.
        time: time limit of each job.
        account, qos, reservation: "" for the site's value or the user's default.
        elements: number of jobs in the array; 1 without a sweep.
    """

    gpus: int = 1
    nodes: int | None = None
    cores: int | None = None
    time: timedelta = timedelta(minutes=20)
    account: str = ""
    qos: str = ""
    reservation: str = ""
    elements: int = 1


@dataclass(frozen=True)
class Allocation:
    """The resources of a job: one rank per GPU, the same on every node; ``cores`` are those of a rank."""

    site: Site
    nodes: int
    gpus_per_node: int
    cores: int
    time: timedelta
    account: str
    qos: str
    reservation: str

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return max(1, self.gpus_per_node)


def make_request(time: str | timedelta, **wanted: object) -> Request:
    """Return a request, with ``time`` in any form that :func:`parse_duration` accepts."""
    return Request(time=parse_duration(time), **wanted)  # type: ignore[arg-type]


def allocate(site: Site, request: Request) -> Allocation:
    """Return the resources of the job.

    Raises:
        UserError: the site cannot provide them; the message says what it can provide.
    """
    nodes = _nodes(site, request)
    qos = _qos(site, request)
    if qos is not None:
        _check_limits(site, qos, request)
    return Allocation(
        site,
        nodes,
        request.gpus // nodes,
        request.cores or site.cores_per_gpu,
        request.time,
        _account(site, request.account),
        request.qos,
        request.reservation or site.reservation,
    )


def _nodes(site: Site, request: Request) -> int:
    gpus, most = request.gpus, site.gpus_per_node
    if (
        gpus < 0
        or (request.nodes is not None and request.nodes < 1)
        or (request.cores is not None and request.cores < 1)
    ):
        raise UserError(
            tr(
                "gpus={gpus}, nodes={nodes}, cores={cores}: use 1 or more",
                gpus=gpus,
                nodes=request.nodes,
                cores=request.cores,
            )
        )
    if gpus == 0 and (request.nodes or 1) > 1:
        text = "nodes={nodes} with gpus=0: a job without GPUs is one process on one node"
        raise UserError(tr(text, nodes=request.nodes))
    if site.scheduler is Scheduler.LOCAL or gpus == 0:
        return 1
    if most == 0:
        raise UserError(tr("{site} has no GPUs: use gpus=0 there, or another site", site=site.name))
    nodes = request.nodes or -(-gpus // most)
    whole_nodes = request.nodes is not None or nodes == 1 or gpus % most == 0
    if whole_nodes and gpus % nodes == 0 and gpus // nodes <= most:
        return nodes
    if request.nodes is None:
        whole = gpus // most
        fewer = (
            tr("{gpus} (one node)", gpus=most)
            if whole == 1
            else tr("{gpus} ({nodes} nodes)", gpus=whole * most, nodes=whole)
        )
        more = tr("{gpus} ({nodes} nodes)", gpus=(whole + 1) * most, nodes=whole + 1)
        raise UserError(
            tr(
                "{gpus} GPUs do not fill nodes of {most} on {site}: "
                "use {fewer} or {more}, or set nodes= to spread them evenly",
                gpus=gpus,
                most=most,
                site=site.name,
                fewer=fewer,
                more=more,
            )
        )
    if gpus > nodes * most:
        enough = tr(
            "nodes of {site} have {most} GPUs: use nodes={enough}",
            site=site.name,
            most=most,
            enough=-(-gpus // most),
        )
        raise UserError(tr("{gpus} GPUs on {nodes} nodes: {cure}", gpus=gpus, nodes=nodes, cure=enough))
    below, above = gpus // nodes * nodes, -(-gpus // nodes) * nodes
    either = " or ".join(f"gpus={count}" for count in (below, above) if 0 < count <= nodes * most)
    raise UserError(
        tr(
            "{gpus} GPUs cannot be spread evenly over {nodes} nodes: use {either}",
            gpus=gpus,
            nodes=nodes,
            either=either,
        )
    )


def _qos(site: Site, request: Request) -> Qos | None:
    """Return the QOS whose limits apply; None if the site names none."""
    if not site.qos:
        return None
    known = {qos.name: qos for qos in site.qos}
    if request.qos and request.qos not in known:
        raise unknown_name(f"QOS of {site.name}", request.qos, known)
    return known[request.qos] if request.qos else site.qos[0]


def _check_limits(site: Site, qos: Qos, request: Request) -> None:
    others = [other for other in site.qos if other is not qos and not _exceeded(other, request)]
    cures = [f'qos="{other.name}" ({_limits(other)})' for other in others]
    for what in _exceeded(qos, request):
        if what == "time":
            said = tr(
                "{time} is more than {qos} allows", time=short_duration(request.time), qos=_with_limits(qos)
            )
            cures.append(
                tr(
                    'requeue=True with time="{most}" (stops with a checkpoint and resumes)',
                    most=slurm_duration(qos.time),
                )
            )
        elif what == "gpus":
            said = tr("{gpus} GPUs are more than {qos} allows", gpus=request.gpus, qos=_with_limits(qos))
            cures.append(tr("at most {most} GPUs", most=qos.gpus))
        else:
            said = tr("{jobs} jobs are more than {qos} allows", jobs=request.elements, qos=_with_limits(qos))
            cures.append(tr("a smaller sweep"))
        raise UserError(f"{said}: {tr('use')} {tr(' or ').join(cures)}")


def _exceeded(qos: Qos, request: Request) -> list[str]:
    asked = {
        "time": (request.time, qos.time),
        "gpus": (request.gpus, qos.gpus),
        "jobs": (request.elements, qos.jobs),
    }
    return [name for name, (want, most) in asked.items() if most is not None and want > most]  # type: ignore[operator]


def _with_limits(qos: Qos) -> str:
    return f"{qos.name} ({_limits(qos)})"


def _limits(qos: Qos) -> str:
    parts = [short_duration(qos.time)]
    parts += [tr("at most {gpus} GPUs", gpus=qos.gpus)] * (qos.gpus is not None)
    parts += [tr("at most {jobs} jobs", jobs=qos.jobs)] * (qos.jobs is not None)
    return ", ".join(parts)


def _account(site: Site, given: str) -> str:
    """Return the account (``given``, ``$DLO_ACCOUNT`` or the site's variable) with the site's suffix."""
    account = given or os.environ.get("DLO_ACCOUNT", "") or os.environ.get(site.account_variable or "-", "")
    if not account or not site.account_suffix:
        return account
    project, at, _ = account.partition("@")
    right = project + site.account_suffix
    if at and account != right:
        raise UserError(
            tr(
                'account "{account}" is not valid on {site}: use "{right}"',
                account=account,
                site=site.name,
                right=right,
            )
        )
    return right
