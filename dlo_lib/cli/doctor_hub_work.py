"""The part of `dlo doctor --hub` for the work of students: try to read each one's work as another student."""

from __future__ import annotations

import pwd
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis, fault, passed
from dlo_lib.hub.folders import as_user
from dlo_lib.hub.settings import HubCourse

FOLDERS = ("dlo-labs", ".local/state/dlo", ".local/share/jupyter/nbgrader_cache", ".ipython")
"""What this library, nbgrader and IPython create in a home, and what answers are in."""
_SYSTEM = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
_FIND = """\
for folder; do
  [ -d "$folder/" ] && find "$folder/" -name library -prune -o -type f \
    '(' -name '*.ipynb' -o -name '*.json' -o -name history.sqlite ')' -print
done
true"""
_READ = 'for file; do head -c 1 -- "$file" > /dev/null 2>&1 && echo "$file"; done; true'


def examine_work(course: HubCourse, people: list[pwd.struct_passwd]) -> Diagnosis:
    """Read the notebooks, submissions and cells of each student of ``people`` as the next one; the caller is
    root.
    """
    name = f"work of {course.name}"
    readers = [*people[1:], people[0]] if len(people) > 1 else [pwd.getpwnam("daemon")]
    read = {
        owner.pw_name: (reader.pw_name, files[0])
        for owner, reader in zip(people, readers, strict=True)
        if (files := _readable(owner, reader))
    }
    if not read:
        return passed(name, "no student can read the work of another ({number} tried)", number=len(people))
    owner, (other, file) = next(iter(read.items()))
    cure = tr("stop the server of {owner}: its next start closes the folders", owner=owner)
    text = "{reader} can read {file} ({number} of {all} students are open)"
    return fault(name, cure, text, reader=other, file=file, number=len(read), all=len(people))


def _readable(owner: pwd.struct_passwd, reader: pwd.struct_passwd) -> list[str]:
    """Return which files of ``owner`` another user can read. Root may not see them, if root is squashed."""
    home = Path(owner.pw_dir)
    places = [str(home / folder) for folder in FOLDERS]
    files = as_user(owner, ["/bin/sh", "-c", _FIND, "sh", *places], Path("/"), _SYSTEM).stdout.splitlines()
    return as_user(reader, ["/bin/sh", "-c", _READ, "sh", *files], Path("/"), _SYSTEM).stdout.splitlines()
