"""Helm values of Zero to JupyterHub from ``hub.toml``: ``dlo course --hub hub.toml`` writes them.

Servers are pods. Each user has a separate Unix id in them, because nbgrader recognises the owner of a
submission by it, and the mode of the exchange hides the files of others; the chart gives all pods the same
id. Exchange and courses are on one volume that all pods mount. Formgrader runs in the server of the course's
account, which the graders of the course open and start.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from dlo_lib.hub import lti
from dlo_lib.hub.rights import SERVER_SCOPES, groups, roles
from dlo_lib.hub.settings import HubSettings

MOUNT = "/srv/hub"
HOME = "/home/dlo"
"""Each pod has the volume of its user there."""
CONFIG = """\
COURSES = %(courses)s
FIRST_UID = %(first_uid)d
VARIABLES = %(variables)s

def uid(spawner):
    return FIRST_UID + spawner.user.id

def prepare(spawner):
    groups = {group.name for group in spawner.user.groups}
    mine = [name for name in COURSES if {f"nbgrader-{name}", f"formgrade-{name}"} & groups]
    course = next((name for name, account in COURSES.items() if account == spawner.user.name), None)
    graders = any(f"formgrade-{name}" in groups for name in COURSES)
    role = "course" if course else "grader" if graders else "student"
    spawner.environment |= VARIABLES | {
        "DLO_HUB_COURSES": " ".join(mine),
        "HOME": "%(home)s",
        "JUPYTER_CONFIG_PATH": f"%(mount)s/jupyter/{role}",
    }
    if course:
        spawner.cmd = ["dlo-hub-server", "course"]
        spawner.working_dir = f"%(mount)s/courses/{course}"

c.KubeSpawner.uid = uid
c.KubeSpawner.gid = 100
c.KubeSpawner.pre_spawn_hook = prepare
c.Spawner.server_token_scopes = %(scopes)s
"""
LTI = """

from ltiauthenticator.lti13.auth import LTI13Authenticator
from tornado.web import HTTPError

%(name_in)s

class Login(LTI13Authenticator):
    def get_username(self, token):
        if not (name := name_in(token, self.username_key)):
            raise HTTPError(403, "Moodle sent no %%s: see username in hub.toml", self.username_key)
        return name

c.JupyterHub.authenticator_class = Login
"""


def values(settings: HubSettings) -> dict[str, Any]:
    """Return the values, for ``helm upgrade --values``."""
    pods, limits = settings.kubernetes, settings.limits
    assert pods is not None
    image, _, tag = pods.image.rpartition(":")
    made = {role["name"]: {key: role[key] for key in role if key != "name"} for role in roles(settings)}
    code = CONFIG % {
        "courses": {course.name: course.account for course in settings.courses},
        "first_uid": pods.first_uid,
        "variables": settings.server_variables,
        "mount": MOUNT,
        "home": HOME,
        "scopes": list(SERVER_SCOPES),
    }
    if settings.lti is not None:
        code += LTI % {"name_in": inspect.getsource(lti.name_in)}
    return {
        "hub": {
            "config": _hub_config(settings),
            "extraConfig": {"dlo": code},
            "loadRoles": made,
        },
        "singleuser": {
            "image": {"name": image, "tag": tag},
            "cmd": ["dlo-hub-server"],
            "memory": {"limit": limits.memory, "guarantee": limits.memory},
            "cpu": {"limit": limits.processors},
            "startTimeout": 300,
            "storage": {
                "homeMountPath": HOME,  # names can hold an @, as in an address
                "extraVolumes": [{"name": "class", "persistentVolumeClaim": {"claimName": pods.volume}}],
                "extraVolumeMounts": [{"name": "class", "mountPath": MOUNT}],
            },
        },
        "cull": {"enabled": True, "timeout": int(limits.idle.total_seconds())},
    }


def _hub_config(settings: HubSettings) -> dict[str, Any]:
    return {
        "JupyterHub": {
            "load_groups": groups(settings),
            **({"tornado_settings": lti.in_a_frame(settings)} if settings.lti else {}),
        },
        "Authenticator": {
            "admin_users": list(settings.admins),
            "allow_all": True,
            # The pod of a course's account has its solutions and its gradebook: no login may have this name.
            "blocked_users": ["root", *(course.account for course in settings.courses)],
        },
        **lti.authenticator(settings),
    }


def values_text(settings: HubSettings) -> str:
    """Return the file. JSON is YAML too, and helm reads it."""
    return json.dumps(values(settings), indent=2) + "\n"
