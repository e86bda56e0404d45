"""Test the README's commands on limited machines: `make machines`, or python3 tests/machines [CASE]...

Builds a minimal Debian root file system once, in a cache, and runs every case in it with separate namespaces.
Needs Linux, root, mmdebstrap, and a network for the set-up. On this machine only the cache changes.

Exit status 0: every command did what is expected. 1: some did not. 2: a requirement is missing, and one line
gives the cure.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

from cases import CASES, Stop, Trial, describe
from machine import CannotTry, Layers, say
from pip_settings import pip_settings

OWN_MOUNTS = "DLO_MACHINES_OWN_MOUNTS"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=describe()
    )
    parser.add_argument("case", nargs="*", help="cases to test; default: all")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="folder of root file systems and downloads (%(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.list:
        print(describe())
        return 0
    try:
        chosen = choose(arguments.case)
        require_means()
        with_own_mounts()
        return try_cases(chosen, arguments.cache.expanduser().resolve())
    except CannotTry as error:
        print(f"machines: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("machines: interrupted", file=sys.stderr)
        return 130


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dlo-machines"


def choose(names: list[str]) -> list[str]:
    for name in names:
        if name not in CASES:
            raise CannotTry(f'no case "{name}": there are {", ".join(CASES)}')
    return names or list(CASES)


def require_means() -> None:
    if not sys.platform.startswith("linux"):
        raise CannotTry(
            'this needs Linux: open this folder in its container (docs/install.md, "On macOS and Windows")'
        )
    if os.geteuid() != 0:
        raise CannotTry("mounting a root file system needs root: sudo make machines")
    if missing := [
        tool for tool in ("mmdebstrap", "unshare", "setpriv", "pivot_root") if shutil.which(tool) is None
    ]:
        raise CannotTry(f"no {' or '.join(missing)} here: apt-get install mmdebstrap util-linux")


def with_own_mounts() -> None:
    """Restart in a separate mount namespace, so that all later mounts end with this process."""
    if os.environ.get(OWN_MOUNTS) != "1":
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.orig_argv[1:]]
        os.execvpe(command[0], command, {**os.environ, OWN_MOUNTS: "1"})


def try_cases(names: list[str], cache: Path) -> int:
    folder, logs = cache / "run", cache / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotTry(f"another call uses {cache}: wait for it, or give another --cache") from None
        clear(folder, logs)
        begun = time.monotonic()
        trial = Trial(Layers(cache, pip_settings()), folder, logs)
        for name in names:
            trial.case = name
            try:
                CASES[name](trial)
            except Stop:
                say(f"      {name:<15} the rest of this case is skipped")
            trial.case = name
        clear(folder)
    bad = [row for row in trial.rows if not row[3]]
    print(
        f"{len(trial.rows)} steps on {len(names)} machines in {time.monotonic() - begun:.0f} s, "
        f"{len(bad)} failed; output in {logs}"
    )
    for case, label, result, _, _ in bad:
        print(f"FAILED  {case}: {label}: {result[:300]}")
    return 1 if bad else 0


def clear(*folders: Path) -> None:
    """Empty the folders, including files that a killed run left."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()


if __name__ == "__main__":
    sys.exit(main())
