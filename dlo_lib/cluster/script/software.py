"""What makes a job's software available: modules, a conda or virtual environment, or a container.

A site or the call names it, and the lines of bash go into the job script before the program. The scripts of
modules and of conda read variables that may not be set, so ``set -u`` is off while they run.
"""

from __future__ import annotations

import shlex

from dlo_lib.cluster.site.description import Site
from dlo_lib.cluster.site.quoting import expanded

_INIT = (
    '"${MODULESHOME:-}/init/bash"',
    '"${LMOD_PKG:-}/init/bash"',
    "/etc/profile.d/modules.sh",
    "/etc/profile.d/lmod.sh",
    "/usr/share/lmod/lmod/init/bash",
    "/usr/share/modules/init/bash",
)


_COURSE = (
    "",
    "# Created on a login node by `make setup`.",
    'source "${DLO_ENV:-${SLURM_SUBMIT_DIR:-.}/.venv}/bin/activate"',
)


def lines(site: Site, setup: tuple[str, ...] = (), course: bool = False) -> list[str]:
    """Return the lines that load the site's software, then run the site's and the user's ``setup`` lines.

    Args:
        course: activate the environment of the course if the site names none.
    """
    found: list[str] = []
    if site.modules or site.conda or site.venv:
        found = ["", "set +u # these scripts read variables that may not be set"]
        found += [*_modules(site), *_environment(site), "set -u"]
    found += _COURSE if course and not site.has_software else ()
    own = (*site.setup, *setup)
    return [*found, *(["", "# Lines of the site or of the call.", *own] if own else [])]


def _modules(site: Site) -> list[str]:
    if not site.modules:
        return []
    init = expanded(site.modules_init) if site.modules_init else " ".join(_INIT)
    return [
        "if ! command -v module > /dev/null; then # a shell that is not a login shell may lack the function",
        f"  for init in {init}; do",
        "    # shellcheck source=/dev/null",
        '    [[ -r "$init" ]] && { source "$init" || true; } && break',
        "  done",
        "fi",
        "if ! command -v module > /dev/null; then",
        '  echo "no command module on $(hostname): set modules_init in the file of the site" >&2',
        "  exit 1",
        "fi",
        "module purge",
        f"module load {shlex.join(site.modules)}",
    ]


def _environment(site: Site) -> list[str]:
    if site.conda:
        base = expanded(site.conda_base) if site.conda_base else '"$("${CONDA_EXE:-conda}" info --base)"'
        return [
            f"conda_base={base}",
            "# shellcheck source=/dev/null",
            'source "$conda_base/etc/profile.d/conda.sh"',
            f"conda activate {expanded(site.conda)}",
        ]
    return (
        ["# shellcheck source=/dev/null", f"source {expanded(site.venv + '/bin/activate')}"]
        if site.venv
        else []
    )


def container(site: Site, gpus: bool, folder: bool) -> str:
    """Return the words that start a program in the site's container, with a space at the end; "" without one.

    The container sees the working directory, the folder of the job, and the copies of the library.
    """
    if not site.container:
        return ""
    options = site.container_options or (("--nv",) if gpus else ())
    binds = '--bind "$PWD" --bind "$job" --bind "${job%/jobs/*}/library"' if folder else '--bind "$PWD"'
    words = " ".join([site.container_runtime, "exec", *map(shlex.quote, options), binds])
    return f"{words} {expanded(site.container)} "
