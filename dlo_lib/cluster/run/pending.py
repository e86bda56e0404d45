"""The sentence for each reason for which SLURM lets a job wait.

SLURM names hundreds of limits by a pattern: whose limit it is (``Assoc``: the project or user, ``QOS``), what
it limits, and for what (``PerJob``, ``PerUser``). Reference: https://slurm.schedmd.com/job_reason_codes.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dlo_lib.base.text import tr
from dlo_lib.cluster.slurm.states import ElementStatus, State

_SENTENCES = {
    "AccountingPolicy": "A limit of the accounting is reached.",
    "AccountNotAllowed": "The account may not use this partition: name another account or partition.",
    "BadConstraints": "No node has what the job asks for: change the constraint, the GPUs or the cores.",
    "BeginTime": "It begins later: at the time that it asks for, or some minutes after it was requeued.",
    "BlockFreeAction": "The nodes are being freed.",
    "BlockMaxError": "The nodes had too many errors: tell the support of the centre.",
    "BurstBufferOperation": "The burst buffer has failed: tell the support of the centre.",
    "BurstBufferResources": "The burst buffer is full: it starts when there is room.",
    "BurstBufferStageIn": "Its files are being copied to the burst buffer.",
    "Cleaning": "Its previous turn is being cleaned up.",
    "DeadLine": "It cannot end before its deadline.",
    "Dependency": "It waits for another job.",
    "DependencyNeverSatisfied": "The job that it waits for did not complete: cancel it, and submit it again.",
    "FedJobLock": "The clusters of the federation decide which of them runs it.",
    "FrontEndDown": "The front end is down: it starts when it is back.",
    "InvalidAccount": "The account does not exist or has ended: name another account.",
    "InvalidQOS": "The QOS does not exist for this account: name another QOS.",
    "JobArrayTaskLimit": "As many elements of its array run as it allows.",
    "JobHeldAdmin": "An administrator holds it: ask the support of the centre.",
    "JobHeldUser": "You hold it: scontrol release lets it start.",
    "JobHoldMaxRequeue": "It was requeued too often and is held: read its log, then use scontrol release.",
    "JobLaunchFailure": "It could not be started, and is held: scontrol release lets it try again.",
    "Licenses": "All licences are in use.",
    "MaxMemPerLimit": "It asks for more memory for a core or a node than the limit: ask for less.",
    "NodeDown": "A node that it needs is down.",
    "PartitionConfig": "The partition does not allow it: change the partition, the time or the nodes.",
    "PartitionDown": "The partition is closed: it starts when it is opened again.",
    "PartitionInactive": "The partition is inactive: it starts when it is opened again.",
    "PartitionNodeLimit": "It asks for more or fewer nodes than the partition allows.",
    "PartitionTimeLimit": "It asks for more time than the partition allows: ask for less.",
    "PowerNotAvail": "There is not enough power for its nodes now.",
    "PowerReserved": "The power for its nodes is reserved for later.",
    "Priority": "Other jobs come first. A shorter time limit or fewer nodes may start it earlier.",
    "Prolog": "The nodes are being prepared: it starts in moments.",
    "QOSJobLimit": "As many jobs of the QOS run as it allows.",
    "QOSNotAllowed": "The QOS may not be used here: name another QOS or partition.",
    "QOSResourceLimit": "A limit of the QOS is reached.",
    "QOSTimeLimit": "The time of the QOS is used up.",
    "QOSUsageThreshold": "The project has used too much of its share for this QOS.",
    "ReqNodeNotAvail": "Its nodes are down, reserved or in maintenance: it starts when they are back.",
    "Reservation": "Its reservation has not begun.",
    "ReservationDeleted": "Its reservation was deleted: submit it without one.",
    "Resources": "It is next, and waits until its nodes are free.",
    "SchedDefer": "The controller is busy and decides later.",
    "AssociationJobLimit": "As many jobs of the project or user run as allowed.",
    "AssociationResourceLimit": "A limit of the project or user is reached.",
    "AssociationTimeLimit": "The time of the project or user is used up.",
}
_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS|)(?P<kind>Grp|Max|Min)(?P<what>WallDuration|Wall|SubmitJobs?|Jobs?|[A-Za-z]+?)"
    r"(?P<minutes>RunMinutes|Minutes)?(?P<scope>Per(?:Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)
_WHOSE = {"Assoc": "your project or account", "QOS": "the QOS", "": "an account in this QOS"}
_WHAT = {
    "BB": "burst buffer",
    "Billing": "billing units",
    "Cpu": "cores",
    "CPU": "cores",
    "Energy": "energy",
    "GRES": "GPUs",
    "Job": "running jobs",
    "Jobs": "running jobs",
    "License": "licences",
    "Mem": "memory",
    "Memory": "memory",
    "Node": "nodes",
    "SubmitJob": "submitted jobs",
    "SubmitJobs": "submitted jobs",
    "Unknown": "resources",
    "Wall": "time",
    "WallDuration": "time",
}
_SCOPE = {
    "PerJob": "of one job",
    "PerNode": "of one node",
    "PerUser": "of one user",
    "PerAccount": "of one account",
}


def explain(reason: str) -> str:
    """Return a sentence on a reason of SLURM, such as ``QOSMaxGRESPerUser``; empty for one that is unknown.

    >>> explain("QOSMaxGRESPerUser")
    'The limit of the QOS on the GPUs of one user is reached: it starts when your other jobs end.'
    """
    name = reason.split(",")[0].split("(")[0].strip()
    if name in _SENTENCES:
        return tr(_SENTENCES[name])
    found = _LIMIT.fullmatch(name)
    if found is None or found["what"] not in _WHAT:
        return ""
    what = tr(_WHAT[found["what"]])
    if found["minutes"]:
        what = tr("hours of {what}", what=what)
    if found["scope"]:
        what = f"{what} {tr(_SCOPE[found['scope']])}"
    whose = tr(_WHOSE[found["whose"]])
    if found["kind"] == "Min":
        text = "It asks for less than the least {what} of {whose}: ask for more, or choose another QOS."
    elif found["scope"] in ("PerJob", "PerNode"):
        text = "It asks for more than the limit of {whose} on the {what}: ask for less."
    elif found["minutes"]:
        text = "The limit of {whose} on the {what} is reached: ask who manages the project for more."
    else:
        text = "The limit of {whose} on the {what} is reached: it starts when your other jobs end."
    return tr(text, whose=whose, what=what)


def explanations(statuses: Iterable[ElementStatus]) -> list[str]:
    """Return a line for each reason for which elements wait, in order: ``Priority: Other jobs ...``."""
    reasons = dict.fromkeys(status.reason for status in statuses if status.state is State.PENDING)
    return [f"{reason}: {text}" for reason in reasons if (text := explain(reason))]
