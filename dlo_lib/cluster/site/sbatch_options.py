"""Options of sbatch that a user or a site adds, checked before SLURM sees them.

A job script sets some options itself, from the arguments of ``submit`` and the site. Those are refused here,
with the argument to use, because sbatch takes the last of two values without a word. The names are those of
SLURM 22.05 to 25.05: https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.quoting import check_text

Options = Mapping[str, str | int | bool | None]
"""Long names of options and their values: True for an option without a value; None or False takes it out."""


class _Takes(enum.Enum):
    VALUE = "a value"
    NOTHING = "no value"
    EITHER = "a value or none"


def _table() -> dict[str, _Takes]:
    valued = """acctg-freq batch bb bbf begin comment constraint container container-id
    core-spec cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot distribution exclude extra
    extra-node-info gid gpu-bind gpu-freq gres-flags hint licenses mail-type mail-user mcs-label mem
    mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist ntasks-per-core ntasks-per-socket
    power prefer priority profile segment sockets-per-node switches thread-spec threads-per-core
    time-min tmp tres-bind tres-per-job tres-per-task uid wait-all-nodes wckey consolidate-segments
    resv-ports oom-kill-step"""
    bare = """contiguous hold ignore-pbs no-requeue overcommit oversubscribe reboot requeue spread-job
    stepmgr use-min-nodes"""
    either = "exclusive get-user-env nice propagate resv-ports"
    # Of plug-ins: pyxis, uenv, shifter, and the container engine of CSCS. SLURM refuses them where they lack.
    valued += """ container-env container-image container-mounts container-name container-save
    container-workdir environment image module repo uenv view volume"""
    bare += """ container-entrypoint container-mount-home container-readonly container-remap-root
    container-writable no-container-entrypoint no-container-mount-home no-container-remap-root"""
    table = dict.fromkeys(valued.split(), _Takes.VALUE)
    table |= dict.fromkeys(bare.split(), _Takes.NOTHING)
    return table | dict.fromkeys(either.split(), _Takes.EITHER)


KNOWN = _table()

_OURS = {
    "account": "account=",
    "array": "sweep= and at_once=",
    "clusters": "SLURM_CLUSTERS in the environment, which every command of SLURM reads",
    "chdir": "the working directory of this process",
    "cpus-per-task": "cores=",
    "dependency": "after= and after_kind=",
    "error": "job.logs()",
    "export": "env= or setup=",
    "gpus": "gpus=",
    "gpus-per-node": "gpus= and nodes=",
    "gpus-per-task": "gpus=",
    "gres": "gpus=, and gpu_type of the site",
    "job-name": "name=",
    "kill-on-invalid-dep": "after= and after_kind=",
    "nodes": "nodes=",
    "ntasks": "gpus= or ranks=",
    "ntasks-per-gpu": "gpus=",
    "ntasks-per-node": "gpus= or ranks=, with nodes=",
    "open-mode": "job.logs()",
    "output": "job.logs()",
    "partition": "partition=",
    "qos": "qos=",
    "reservation": "reservation=",
    "signal": "warning=",
    "test-only": "dry_run=",
    "time": "time=",
    "umask": "the umask of this process",
    "wait": "job.wait()",
    "wrap": "a command as a list",
}
"""Options that ``submit`` sets, and what sets them."""

_DROPPABLE = (
    "account",
    "cpus-per-task",
    "gpus-per-node",
    "gres",
    "open-mode",
    "partition",
    "qos",
    "reservation",
    "signal",
)
"""Options of the job that a centre may refuse, and that None takes out."""

_HETEROGENEOUS = ("het-group", "het-job", "hetjob", "pack-group", "packjob")

_ONE_OF = (
    ("mem", "mem-per-cpu", "mem-per-gpu"),
    ("exclusive", "oversubscribe"),
    ("requeue", "no-requeue"),
)
_AGAINST_HINT = ("threads-per-core", "ntasks-per-core", "cores-per-socket", "sockets-per-node")
_MEMORY = re.compile(r"\d+[KMGT]?")


def _long_name(given: object) -> str:
    return str(given).removeprefix("--").replace("_", "-")


def normal(options: Options) -> dict[str, str | bool]:
    """Return options by their long names, without those that are off, after a check of each of them.

    >>> normal({"--mem": "64G", "mail_type": "END", "exclusive": True, "hold": False})
    {'mem': '64G', 'mail-type': 'END', 'exclusive': True}

    Raises:
        UserError: an option is unknown, set by an argument of ``submit``, or has a value of a wrong kind.
    """
    if isinstance(options, (list, tuple)) and any(isinstance(part, Mapping) for part in options):
        refuse_heterogeneous(_HETEROGENEOUS[0])
    if not isinstance(options, Mapping):
        text = 'options is {given!r}: write a dict, such as options={{"mem": "64G", "exclusive": True}}'
        raise UserError(tr(text, given=options))
    found: dict[str, str | bool] = {}
    for given, value in options.items():
        name, off = _long_name(given), value is None or value is False
        refuse_heterogeneous(name)
        if name in _OURS and not (off and name in _DROPPABLE):
            raise UserError(tr("options: the job sets --{name}: use {ours}", name=name, ours=_OURS[name]))
        if name not in KNOWN and name not in _OURS:
            raise unknown_name("option of sbatch", name, KNOWN)
        if off:
            continue
        _check(name, value)
        found[name] = True if value is True else str(value)
    return found


def off(options: Options) -> frozenset[str]:
    """Return the long names of the options that are None or False: neither the site nor the job sets them."""
    return frozenset(_long_name(name) for name, value in options.items() if value is None or value is False)


def refuse_heterogeneous(name: str) -> None:
    """Refuse an option that makes a heterogeneous job.

    Raises:
        UserError: ``name`` is such an option.
    """
    if name in _HETEROGENEOUS:
        text = "a heterogeneous job ({name}) is not supported: submit each of its parts as a job, with after="
        raise UserError(tr(text, name=name))


def _check(name: str, value: object) -> None:
    takes = KNOWN[name]
    if not isinstance(value, (str, int)):
        text = "options: {name} is {value!r}: it must be a text, a whole number, true or false"
        raise UserError(tr(text, name=name, value=value))
    if takes is _Takes.VALUE and value is True:
        raise UserError(tr('options: {name} needs a value: write "{name}": "..."', name=name))
    if takes is _Takes.NOTHING and value is not True:
        raise UserError(tr('options: {name} takes no value: write "{name}": True', name=name))
    if value is not True:
        check_text(f"options: {name}", str(value))
    if name.startswith("mem") and name in _ONE_OF[0]:
        check_memory(name, str(value))


def check_memory(name: str, value: str) -> str:
    """Return an amount of memory in the form of SLURM.

    Raises:
        UserError: it has another form.
    """
    if not _MEMORY.fullmatch(value):
        text = '{name} is "{value}": write a number and a unit, such as "64G" (K, M, G or T; none: M)'
        raise UserError(tr(text, name=name, value=value))
    return value


def merged(
    of_site: Options, asked: Options, memory: str, set_by_job: Collection[str]
) -> dict[str, str | bool]:
    """Return the additional options of a job: the site's, replaced by those that the user asks for.

    Args:
        memory: memory of a node, "" for the default of the partition.
        set_by_job: options that the script sets from the site and the arguments.

    Raises:
        UserError: two of them contradict each other, or one is not valid.
    """
    own = normal(asked)
    if memory:
        for name in _ONE_OF[0]:
            if name in own:
                raise UserError(tr("memory= and options {name} contradict each other: use one", name=name))
        own["mem"] = check_memory("memory", memory)
    site = normal(of_site)
    for group in _ONE_OF:
        asked_here = [name for name in group if name in own]
        if asked_here:  # the user's choice replaces that of the site
            site = {name: value for name, value in site.items() if name not in group}
    found = {name: value for name, value in site.items() if name not in off(asked)} | own
    for group in _ONE_OF:
        both = [name for name in group if name in found]
        if len(both) > 1:
            raise UserError(tr("options: {names} contradict each other: use one", names=" and ".join(both)))
    if "requeue" in set_by_job:
        found.pop("requeue", None)
        if "no-requeue" in found:
            raise UserError(tr("requeue=True and options no-requeue contradict each other: use one"))
    for name in sorted(found):
        if name in set_by_job:
            text = "options: the site sets --{name}: change it in a file that extends the site"
            raise UserError(tr(text, name=name))
        if name in _AGAINST_HINT and ("hint" in set_by_job or "hint" in found):
            text = "options: {name} contradicts --hint, which the site sets: change one of them"
            raise UserError(tr(text, name=name))
    return found
