"""The configuration of a JupyterHub for the course. Edit hub.toml, not this file.

    DLO_HUB=/etc/dlo/hub.toml jupyterhub --config deploy/hub/jupyterhub_config.py

README.md in this folder describes hub.toml. On Kubernetes, `dlo course --hub` writes Helm values instead.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # dlo_lib of this copy; it needs no PyTorch here

from dlo_lib.base.errors import UserError
from dlo_lib.hub import accounts, local_server, lti, rights, slurm_server
from dlo_lib.hub.read_settings import read_settings

c = get_config()  # noqa: F821
try:
    settings = read_settings(os.environ.get("DLO_HUB") or Path(__file__).with_name("hub.toml"))
    accounts.require_accounts(settings)
    if settings.kind == "slurm":
        slurm_server.configure_slurm(c, settings)
    else:
        local_server.configure_local(c, settings.limits.processes)
except UserError as error:
    sys.exit(f"jupyterhub_config: {error}")

# The Hub and its proxy. The proxy and the servers of users survive a restart of the Hub.
state = settings.folder / "state"
state.mkdir(mode=0o700, parents=True, exist_ok=True)
c.JupyterHub.bind_url = settings.address
c.JupyterHub.upgrade_db = True  # a new JupyterHub may need it; the database is copied before
c.JupyterHub.db_url = f"sqlite:///{state / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(state / "cookie_secret")
c.ConfigurableHTTPProxy.command = settings.proxy.split()
c.ConfigurableHTTPProxy.pid_file = str(state / "proxy.pid")
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = False

# Users: those of the machine (PAM), or those of a Moodle. Accounts of courses do not log in.
if settings.lti is not None:
    c.JupyterHub.authenticator_class = "dlo_lib.hub.lti_login.UnixAccounts"
    c.JupyterHub.tornado_settings = lti.in_a_frame(settings)
    for key, value in lti.authenticator(settings)["LTI13Authenticator"].items():
        setattr(c.LTI13Authenticator, key, value)
c.Authenticator.allow_all = True
c.Authenticator.admin_users = set(settings.admins)
c.Authenticator.blocked_users = {"root", *(course.account for course in settings.courses)}

# Courses: who may open what.
c.JupyterHub.load_groups = rights.groups(settings)
c.JupyterHub.load_roles = rights.roles(settings)
c.JupyterHub.services = rights.services(settings)
c.Spawner.server_token_scopes = list(rights.SERVER_SCOPES)


# Servers of users: dlo-hub-server opens the user's copy of the labs at lab 00.
def prepare(spawner):
    groups = {group.name for group in spawner.user.groups}
    spawner.environment |= rights.user_environment(settings, spawner.user.name, groups)


c.Spawner.cmd = [str(settings.environment / "bin" / "dlo-hub-server")]
c.Spawner.pre_spawn_hook = prepare
c.Spawner.mem_limit = settings.limits.memory
c.Spawner.cpu_limit = settings.limits.processors
c.Spawner.start_timeout = 300
c.Spawner.http_timeout = 120
