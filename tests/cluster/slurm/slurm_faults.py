"""SLURM's commands with faults: wrappers that come first in ``PATH`` and spoil the answer of one command.

A command without a fault runs undisturbed. *Done* below means that the real command has run and that the
controller has done what it asks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sacct", "sacctmgr", "sinfo")
FAULTS = {
    "before": "it never answers, and nothing is done",
    "after": "it never answers, and all is done",
    "error": "an error about the connection, and nothing is done",
    "error-after": "an error about the connection, and all is done",
    "empty": "status 0 without output, and nothing is done",
    "mute": "status 0 without output, and all is done",
    "slow": "it answers after half of the waiting time, as 30 s of 60 s",
}
WAITING_S = 1.0
_WRAPPER = """\
#!/usr/bin/env bash
name="${0##*/}"
here="${0%/*}"
real="$here/real/$name"
fault="" gone=()
[[ ! -e "$here/fault-$name" ]] || read -r fault < "$here/fault-$name"
[[ ! -e "$here/forgotten" ]] || mapfile -t gone < "$here/forgotten" # the jobs that SLURM no longer lists
forgotten() {
  [[ " ${gone[*]} " == *" $1 "* ]]
}
answer() {
  if [[ "$name" == scontrol && "$*" == *"show job"* ]] && forgotten "${@: -1}"; then
    echo "slurm_load_jobs error: Invalid job id specified" >&2
    return 1
  elif [[ "$name" != squeue || ${#gone[@]} == 0 ]]; then
    exec "$real" "$@"
  fi
  local rows status=0
  rows="$("$real" "$@")" || status=$?
  while IFS= read -r row; do
    [[ -z "$row" ]] || forgotten "${row%%|*}" || printf '%s\\n' "$row"
  done <<< "$rows"
  return "$status"
}
case "$fault" in
  "") answer "$@" ;;
  before) exec sleep 1000 ;;
  after) setsid "$real" "$@" < /dev/null &> /dev/null; exec sleep 1000 ;;
  error) echo "$name: error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
  error-after)
    "$real" "$@" &> /dev/null
    echo "$name: error: Socket timed out on send/recv operation" >&2
    exit 1 ;;
  empty) exit 0 ;;
  mute) "$real" "$@" &> /dev/null; exit 0 ;;
  slow) sleep {half}; answer "$@" ;;
esac
"""


class Faults:
    """The wrappers of one test, and the real commands beside them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        (folder / "real").mkdir(parents=True)
        for name in COMMANDS:
            found = shutil.which(name)
            assert found is not None
            (folder / "real" / name).symlink_to(found)
            self._program(name, _WRAPPER.replace("{half}", str(WAITING_S / 2)))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def _program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def spoil(self, command: str, fault: str) -> None:
        """Give a command a fault, and all commands a short waiting time."""
        assert fault in FAULTS
        (self.folder / f"fault-{command}").write_text(f"{fault}\n")
        self._monkeypatch.setenv("DLO_ANSWER_S", str(WAITING_S))

    def mend(self) -> None:
        """Remove all faults."""
        for command in COMMANDS:
            (self.folder / f"fault-{command}").unlink(missing_ok=True)
        self._monkeypatch.delenv("DLO_ANSWER_S", raising=False)

    def forget(self, *numbers: int) -> None:
        """Let the controller forget jobs, as it does some minutes after their end."""
        with (self.folder / "forgotten").open("a") as file:
            file.writelines(f"{number}\n" for number in numbers)

    def real(self, command: str, *words: str) -> str:
        """Return the output of a real command."""
        program = self.folder / "real" / command
        return subprocess.run(
            [program, *words], capture_output=True, text=True, check=True, timeout=120
        ).stdout

    def of_folder(self, folder: Path) -> dict[int, str]:
        """Return the numbers and states of the jobs whose script is in ``folder``, as SLURM knows them."""
        rows = self.real("squeue", "-h", "-t", "all", "-o", "%F|%T|%o").splitlines()
        parts = [row.split("|", 2) for row in rows]
        return {int(number): state for number, state, command in parts if str(folder) in command}
