"""The resources of a job (nodes, ranks, cores, limits), checked against the site before the job is submitted.

SLURM accepts most wrong requests and lets them wait forever, or refuses them with a code. Here each becomes
one line with its cure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.base.text import tr
from dlo_lib.cluster.site import sbatch_options, srun_options
from dlo_lib.cluster.site.description import Scheduler, Site
from dlo_lib.cluster.site.duration import parse_duration
from dlo_lib.cluster.site.job_variables import variables
from dlo_lib.cluster.site.limits import Demand, check_limits, qos_of
from dlo_lib.cluster.site.sbatch_options import Options


@dataclass(frozen=True)
class Request:
    """What a user requests from a site.

    Attributes:
        gpus: GPUs of one job on all its nodes, one rank each; 0: ranks without a GPU. None: 0 if ``ranks``
            is given or the site has no GPUs, else 1.
        ranks: ranks of one job without GPUs; None: one.
        nodes: None: as few as hold the GPUs or the ranks.
        cores: cores of a task; None: the share of one GPU.
        time: time limit of each job.
        account, qos, reservation: "" for the site's value or the user's default.
        memory: memory of a node, such as ``64G``; "": the default of the partition.
        options: further options of sbatch.
        setup: lines of bash before the program.
        partition: where SLURM chooses nodes, "" for the site's; several: ``"a,b"``.
        env: environment variables of the job.
        srun: further options of srun.
        elements: number of jobs in the array; 1 without a sweep.
    """

    gpus: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    cores: int | None = None
    memory: str = ""
    time: timedelta = timedelta(minutes=20)
    account: str = ""
    qos: str = ""
    reservation: str = ""
    options: Options = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    partition: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    srun: Options = field(default_factory=dict)
    elements: int = 1


@dataclass(frozen=True)
class Allocation:
    """The resources of a job: one rank per GPU, or ``cpu_ranks_per_node``, the same on every node.

    Attributes:
        cores: cores of a rank.
        options: further options of sbatch, of the request.
        partition: of the request; "": the site's.
        env: environment variables of the request.
        srun: further options of srun, of the site and of the request.
    """

    site: Site
    nodes: int
    gpus_per_node: int
    cores: int
    time: timedelta
    account: str
    qos: str
    reservation: str
    cpu_ranks_per_node: int = 1
    memory: str = ""
    options: Options = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    partition: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    srun: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def dropped(self) -> frozenset[str]:
        """Options of sbatch that the script leaves out, because the site or the call takes them out."""
        return sbatch_options.off(self.site.options) | sbatch_options.off(self.options)

    @property
    def requests_gpus(self) -> bool:
        """Whether SLURM is asked for the GPUs of a node, so that it tells their number to the job."""
        return self.gpus_per_node > 0 and self.site.gpu_option not in ("none", *self.dropped)

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.gpus_per_node or self.cpu_ranks_per_node


def make_request(time: str | timedelta, **wanted: object) -> Request:
    """Return a request, with ``time`` in any form that :func:`parse_duration` accepts."""
    return Request(time=parse_duration(time), **wanted)  # type: ignore[arg-type]


def allocate(site: Site, request: Request) -> Allocation:
    """Return the resources of the job.

    Raises:
        UserError: the site cannot provide them; the message says what it can provide.
    """
    request = _with_gpus(site, request)
    sbatch_options.normal(request.options)
    nodes = _nodes(site, request)
    qos = qos_of(site, request.qos)
    if qos is not None:
        check_limits(site, qos, Demand(request.time, request.gpus or 0, request.elements))
    return Allocation(
        site,
        nodes,
        (request.gpus or 0) // nodes,
        request.cores or site.cores_per_gpu,
        request.time,
        account_of(site, request.account),
        request.qos,
        request.reservation or site.reservation,
        (request.ranks or 1) // nodes,
        request.memory,
        request.options,
        request.setup,
        request.partition,
        variables(request.env),
        srun_options.merged(site.srun, request.srun),
    )


def _with_gpus(site: Site, request: Request) -> Request:
    """Return the request with its number of GPUs."""
    if isinstance(request.setup, str) or not all(isinstance(line, str) for line in request.setup):
        text = 'setup is {given!r}: give a list of lines, such as ["ulimit -n 65536"]'
        raise UserError(tr(text, given=request.setup))
    if request.ranks is not None:
        if request.gpus:
            text = "gpus={gpus} with ranks={ranks}: there is one rank per GPU, so leave ranks out"
            raise UserError(tr(text, gpus=request.gpus, ranks=request.ranks))
        require_count("ranks", request.ranks)
        return replace(request, gpus=0)
    if request.gpus is None:
        return replace(request, gpus=1 if site.gpus_per_node else 0)
    return request


def _nodes(site: Site, request: Request) -> int:
    gpus, most = request.gpus or 0, site.gpus_per_node
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
    if gpus == 0 and request.ranks is None and (request.nodes or 1) > 1:
        text = "nodes={nodes} with gpus=0: a job without GPUs is one process on one node; ranks= sets several"
        raise UserError(tr(text, nodes=request.nodes))
    if site.scheduler is Scheduler.LOCAL:
        return 1
    if gpus == 0:
        return _nodes_of_ranks(site, request)
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


def _nodes_of_ranks(site: Site, request: Request) -> int:
    """Return the number of nodes for ranks without GPUs."""
    ranks, cores = request.ranks or 1, request.cores or site.cores_per_gpu
    of_node = site.cores_per_node or site.gpus_per_node * site.cores_per_gpu
    most = max(1, of_node // cores) if of_node else ranks
    least = -(-ranks // most)
    nodes = request.nodes or least
    if ranks % nodes and request.nodes is None:
        text = (
            "{ranks} ranks of {cores} cores do not spread evenly over {least} nodes of {site}: "
            "use ranks={below} or ranks={above}, or nodes={even}"
        )
        even = next(count for count in range(least, ranks + 1) if ranks % count == 0)
        below, above = ranks // least * least, -(-ranks // least) * least
        raise UserError(
            tr(text, ranks=ranks, cores=cores, least=least, site=site.name,
               below=below, above=above, even=even)
        )  # fmt: skip
    if nodes < least:
        text = (
            "{ranks} ranks of {cores} cores on {nodes} nodes: a node of {site} holds {most} of them: "
            "use nodes={least}"
        )
        raise UserError(
            tr(text, ranks=ranks, cores=cores, nodes=nodes, site=site.name, most=most, least=least)
        )
    if ranks % nodes:
        text = "{ranks} ranks cannot be spread evenly over {nodes} nodes: use ranks={below} or ranks={above}"
        below, above = max(nodes, ranks // nodes * nodes), -(-ranks // nodes) * nodes
        raise UserError(tr(text, ranks=ranks, nodes=nodes, below=below, above=above))
    return nodes


def account_of(site: Site, given: str = "") -> str:
    """Return the account (``given``, ``$DLO_ACCOUNT`` or the site's variable) with the site's suffix.

    Raises:
        UserError: it has the suffix of other nodes.
    """
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
