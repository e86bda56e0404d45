"""Servers of users on the Hub's machine: processes of the user's Unix account, with limits of the kernel.

JupyterHub's LocalProcessSpawner only passes limits on as variables. Here the process enters a control group
of the user, which limits memory, processor time and the number of processes of everything that it starts,
before it gives up root's rights. SimpleLocalProcessSpawner is not for a class: all its servers, and therefore
all submissions, belong to one account.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

from jupyterhub.spawner import LocalProcessSpawner
from traitlets import Integer

from dlo_lib.hub.user_group import user_group


class UserProcessSpawner(LocalProcessSpawner):
    """Start the server of a user as a process of the user's account, within the limits of ``hub.toml``."""

    process_limit = Integer(512, help="the most processes and threads of a user").tag(config=True)

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return what the new process runs before the server's program: limits first, then the account."""
        become_user = super().make_preexec_fn(name)
        files = user_group(name, self.mem_limit or 0, self.cpu_limit or 0.0, self.process_limit)
        if not files:
            self.log.warning("no control groups here: memory and processors of %s are not limited", name)
        processes = self.process_limit

        def prepare() -> None:
            for file in files:
                file.write_text(str(os.getpid()))
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            become_user()

        return prepare


def configure_local(c: Any, processes: int) -> None:
    """Set up the Hub's configuration ``c`` for servers on this machine."""
    c.JupyterHub.spawner_class = UserProcessSpawner
    c.UserProcessSpawner.process_limit = processes
    c.LocalProcessSpawner.shell_cmd = []
