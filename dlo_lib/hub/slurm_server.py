"""Servers of users as SLURM jobs: the form in which a user selects partition, time and GPUs, and the job.

What a user sends is compared with what the form offers, because the Hub's REST API accepts any text, and the
text becomes part of the job's script. A job that reaches a limit ends the server, and the form of the next
start names the limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from typing import Any

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.script.head import gpu_option, gpus_of
from dlo_lib.cluster.site.description import Site, site
from dlo_lib.cluster.site.duration import parse_duration, short_duration, slurm_duration
from dlo_lib.cluster.site.quoting import directive
from dlo_lib.hub.settings import HubLimits, HubSettings, SlurmServers

BATCH_SCRIPT = """#!/bin/bash
#SBATCH --job-name=jupyterhub
#SBATCH --output={{homedir}}/.jupyterhub-%j.log
#SBATCH --chdir={{homedir}}
#SBATCH --export={{keepvars}}
#SBATCH --time={{runtime}}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task={{nprocs}} --mem={{memory}}
{{options}}
set -euo pipefail
unset XDG_RUNTIME_DIR
{{prologue}}
srun --export=ALL {{cmd}}
"""


@dataclass(frozen=True)
class Offer:
    """What a user can select: each list begins with the selected value."""

    partitions: tuple[str, ...]
    times: tuple[timedelta, ...]
    gpus: tuple[int, ...]

    def form(self, ended: str = "") -> str:
        """Return the form of the Hub's page that starts a server.

        Args:
            ended: why the last server ended, if not by its user.
        """
        partitions = [(name, name or tr("the default one")) for name in self.partitions]
        times = [(slurm_duration(time), short_duration(time)) for time in self.times]
        gpus = [(str(count), str(count) if count else tr("none")) for count in self.gpus]
        rows = (
            ("partition", tr("Partition"), partitions),
            ("time", tr("Time"), times),
            ("gpus", "GPUs", gpus),
        )
        note = tr("Your server stops when this time is over. Your files stay.")
        above = [f'<div class="alert alert-warning">{escape(ended)}</div>'] if ended else []
        below = f'<p class="text-muted">{escape(note)}</p>'
        return "\n".join([*above, *(_select(*row) for row in rows), below])

    def chosen(self, options: dict[str, Any]) -> dict[str, str]:
        """Return the user's selection as partition, time and gpus; a missing one is the first of its list.

        Raises:
            UserError: a value is not offered.
        """
        offered = {
            "partition": list(self.partitions),
            "time": [slurm_duration(time) for time in self.times],
            "gpus": [str(count) for count in self.gpus],
        }
        if unknown := set(options) - set(offered):
            raise unknown_name("option of a server", sorted(unknown)[0], offered)
        picked = {}
        for name, values in offered.items():
            value = options.get(name, values[0])
            value = str(value[0] if isinstance(value, list) else value)
            if value not in values:
                raise unknown_name(name, value, values)
            picked[name] = value
        return picked


def _select(name: str, label: str, choices: list[tuple[str, str]]) -> str:
    lines = "".join(f'<option value="{escape(value)}">{escape(shown)}</option>' for value, shown in choices)
    return (
        f'<label for="{name}" class="form-label">{escape(label)}</label>'
        f'<select id="{name}" name="{name}" class="form-select mb-3">{lines}</select>'
    )


def offer_of(servers: SlurmServers, where: Site) -> Offer:
    """Return what the users of a site can select.

    Raises:
        UserError: a node of the site has fewer GPUs than offered.
    """
    if (most := max(servers.gpus)) > where.gpus_per_node:
        text = "gpus in [slurm] offers {most}, but a node of {site} has {number}: offer at most that"
        raise UserError(tr(text, most=most, site=where.name, number=where.gpus_per_node))
    return Offer(servers.partitions or (where.partition,), servers.times, servers.gpus)


def requests(where: Site, servers: SlurmServers, limits: HubLimits, picked: dict[str, str]) -> dict[str, str]:
    """Return batchspawner's ``req_`` values for a selection.

    A server with GPUs has the cores of its GPUs; the account has the suffix that the site requires.
    """
    gpus = int(picked["gpus"])
    options = {
        "partition": picked["partition"],
        "account": servers.account + where.account_suffix if servers.account else "",
        gpu_option(where): gpus_of(where, gpus) if gpus else "",
        "constraint": where.constraint,
        "hint": where.hint,
    }
    written = [directive(name, value) for name, value in options.items() if name and value]
    return {
        "runtime": picked["time"],
        "nprocs": str(gpus * where.cores_per_gpu if gpus else max(1, round(limits.processors))),
        "memory": limits.memory,
        "options": "".join(f"#SBATCH {option}\n" for option in written),
    }


def reason_of(said: str, limits: HubLimits) -> str:
    """Return why SLURM ended a job, from a line of ``scontrol show job``; "" if its user ended it.

    >>> reason_of("JobId=7 JobState=TIMEOUT TimeLimit=01:00:00", HubLimits())
    'Your last server ended at its time limit of 1 h. Saved files are in your folder.'
    """
    values = dict(word.partition("=")[::2] for word in said.split())
    state = values.get("JobState", "")
    saved = tr("Saved files are in your folder.")
    if state == "TIMEOUT":
        time = short_duration(parse_duration(values.get("TimeLimit", "0")))
        return tr("Your last server ended at its time limit of {time}. {saved}", time=time, saved=saved)
    if state == "OUT_OF_MEMORY":
        return tr("Your last server used more than {memory}. {saved}", memory=limits.memory, saved=saved)
    if state in ("NODE_FAIL", "PREEMPTED", "FAILED"):
        return tr("SLURM ended your last server ({state}). {saved}", state=state, saved=saved)
    return ""


def configure_slurm(c: Any, settings: HubSettings) -> None:
    """Set up the Hub's configuration ``c`` for servers in jobs.

    Raises:
        UserError: there is no such site, or the form offers what the site does not have.
    """
    servers = settings.slurm
    assert servers is not None
    where = site(servers.site)
    offer = offer_of(servers, where)
    from tornado.web import HTTPError

    from dlo_lib.hub.slurm_spawner import JobSpawner  # needs batchspawner

    c.JupyterHub.spawner_class = JobSpawner
    if servers.address:
        c.JupyterHub.hub_ip, c.JupyterHub.hub_connect_ip = "0.0.0.0", servers.address
    spawner = c.JobSpawner
    spawner.batch_script = BATCH_SCRIPT
    spawner.environment = {"SLURM_CONF": conf} if (conf := os.environ.get("SLURM_CONF")) else {}
    spawner.exec_prefix = servers.run_as
    spawner.batchspawner_singleuser_cmd = str(settings.environment / "bin" / "batchspawner-singleuser")
    spawner.req_srun = ""
    spawner.req_prologue = "\n".join([*(f"module load {name}" for name in where.modules), *where.setup])
    spawner.options_form = lambda spawner: offer.form(
        reason_of(spawner.endings.get(spawner.user.name, ""), settings.limits)
    )
    spawner.options_from_form = lambda form: _or_refuse(offer, form)

    def apply(spawner: Any, options: dict[str, Any]) -> None:
        try:
            spawner.user_options = picked = _or_refuse(offer, options)
        except HTTPError:
            # The Hub stores a selection before it is examined, and uses it again for a start without one.
            spawner.orm_spawner.user_options = {}
            spawner.db.commit()
            raise
        for name, value in requests(where, servers, settings.limits, picked).items():
            setattr(spawner, f"req_{name}", value)

    spawner.apply_user_options = apply


def _or_refuse(offer: Offer, options: dict[str, Any]) -> dict[str, str]:
    from tornado.web import HTTPError

    try:
        return offer.chosen(options)
    except UserError as error:
        raise HTTPError(400, str(error), reason="the form does not offer this") from error
