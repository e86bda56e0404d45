"""The part of `dlo doctor --hub` for files: accounts, folders, modes and owners, tried as each user."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis, fault, passed
from dlo_lib.cli.doctor_hub_work import examine_work
from dlo_lib.hub.folders import COURSE_MODES, EXCHANGE_MODE, account_of, as_account, as_user
from dlo_lib.hub.membership import roster_of
from dlo_lib.hub.settings import HubCourse, HubSettings

PATH = "/usr/local/bin:/usr/bin:/bin"
_OPEN_COURSE = """\
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.lab.course import source_labs
course = open_course('.')
with course.gradebook as gradebook:
    print(course.coursedir.course_id, len(gradebook.students), len(source_labs()))
"""


def examine_files(settings: HubSettings) -> list[Diagnosis]:
    """Check the files of all courses and of the exchange; the caller is root."""
    prepare = tr("as root, run: dlo course --hub {file}", file=settings.file)
    found = [_mode("exchange", settings.exchange, EXCHANGE_MODE, None, prepare)]
    for course in settings.courses:
        try:
            account = account_of(course)
        except UserError as error:
            problem, _, cure = str(error).rpartition(": ")
            found.append(Diagnosis(f"account of {course.name}", False, problem, cure, required=True))
            continue
        people = students_with_account(course)
        found += [
            *_exchange_of(settings, course, account, prepare),
            *_closed(course, people),
            _gradebook(settings, course, prepare),
            *([_submission(settings, course, people), examine_work(course, people)] if people else []),
            *_roster_names(settings, course),
        ]
    return found


def students_with_account(course: HubCourse) -> list[pwd.struct_passwd]:
    """Return the Unix accounts of the students of a course; none without a readable roster."""
    try:
        names = roster_of(course)
    except UserError:
        return []
    known = {person.pw_name: person for person in pwd.getpwall()}
    return [known[name] for name in sorted(names) if name in known]


def _mode(name: str, folder: Path, mode: int, owner: pwd.struct_passwd | None, cure: str) -> Diagnosis:
    try:
        state = folder.stat()
    except OSError as error:
        return Diagnosis(name, False, f"{folder}: {error.strerror}", cure, required=True)
    if (is_now := state.st_mode & 0o7777) != mode:
        text = "{folder} has the mode {is_now:o} instead of {mode:o}"
        return fault(name, f"chmod {mode:o} {folder}", text, folder=folder, is_now=is_now, mode=mode)
    if owner is not None and state.st_uid != owner.pw_uid:
        names = {one.pw_uid: one.pw_name for one in pwd.getpwall()}
        text, now = "{folder} belongs to {now} instead of {owner}", names.get(state.st_uid, state.st_uid)
        cure = f"chown {owner.pw_name}: {folder}"
        return fault(name, cure, text, folder=folder, now=now, owner=owner.pw_name)
    return Diagnosis(name, True, f"{folder}: {mode:o}")


def _exchange_of(
    settings: HubSettings, course: HubCourse, account: pwd.struct_passwd, cure: str
) -> list[Diagnosis]:
    """Return what is wrong in the course's part of the exchange, or one line that all is right."""
    name = f"exchange of {course.name}"
    looks = [
        _mode(name, settings.exchange / course.name / part, mode, account, cure)
        for part, mode in COURSE_MODES.items()
    ]
    wrong = [look for look in looks if not look.ok]
    return wrong or [passed(name, "owners and modes of {number} folders", number=len(looks))]


def _closed(course: HubCourse, people: Iterable[pwd.struct_passwd]) -> list[Diagnosis]:
    """Try to enter the folders of the course as a student."""
    found = []
    for what, folder in ((tr("course"), course.folder), (tr("solutions"), course.checkout)):
        name = f"{what} of {course.name}"
        entered = [person.pw_name for person in people if _tried(person, "/bin/ls", str(folder))]
        if entered:
            text = "{student} can read {folder}"
            found.append(fault(name, f"chmod 700 {folder}", text, student=entered[0], folder=folder))
        elif not folder.is_dir():
            cure = f"git clone URL {folder}" if folder == course.checkout else "dlo course --hub"
            found.append(fault(name, cure, "there is no {folder}", folder=folder))
        else:
            found.append(passed(name, "no student can read {folder}", folder=folder))
    return found


def _tried(person: pwd.struct_passwd, *command: str) -> bool:
    """Run a command as a user; return whether it succeeded."""
    return as_user(person, list(command), Path("/"), {"PATH": PATH}).returncode == 0


def _gradebook(settings: HubSettings, course: HubCourse, cure: str) -> Diagnosis:
    """Open the course as its account: environment, checkout, configuration and gradebook."""
    name = f"gradebook of {course.name}"
    account, own = course.account, f"chown -R {course.account}: {course.checkout}"
    try:
        os.stat(course.folder / "gradebook.db")
    except OSError:
        text = "{account} has no gradebook in {folder}"
        return fault(name, cure, text, account=account, folder=course.folder)
    done = as_account(settings, course, "-c", _OPEN_COURSE)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [tr("no output")])[-1]
        if "cannot run" in said:
            cure = tr("let all users enter {folder} and the folders above it", folder=settings.environment)
        elif str(course.checkout) in said:
            cure = own
        return fault(name, cure, "{account} cannot open the course: {said}", account=account, said=said)
    course_id, students, labs = done.stdout.split()
    if course_id != course.name:
        text, file = '{file} names the course "{found}"', course.folder / "nbgrader_config.py"
        cure = tr('write course="{name}" in its call of configure', name=course.name)
        return fault(name, cure, text, file=file, found=course_id)
    if labs == "0":
        text = "{account} finds no labs in {folder}"
        return fault(name, own, text, account=account, folder=course.checkout / "solutions")
    return passed(name, "{students} students, {labs} labs with solutions", students=students, labs=labs)


def _submission(settings: HubSettings, course: HubCourse, people: list[pwd.struct_passwd]) -> Diagnosis:
    """Submit an empty folder as a student; try to list the submissions and to rename it as another one."""
    name = f"submissions of {course.name}"
    inbound = settings.exchange / course.name / "inbound"
    student, cure = people[0].pw_name, f"chmod {COURSE_MODES['inbound']:o} {inbound}"
    mine = inbound / f"{student}+doctor+{os.getpid()}"
    if not _tried(people[0], "/bin/mkdir", str(mine)):
        return fault(name, cure, "{student} cannot submit to {folder}", student=student, folder=inbound)
    try:
        other = people[1] if len(people) > 1 else pwd.getpwnam("daemon")
        if _tried(other, "/bin/ls", str(inbound)):
            return fault(name, cure, "students can list the submissions in {folder}", folder=inbound)
        if _tried(other, "/bin/mv", str(mine), f"{mine}-moved"):
            mine = mine.with_name(f"{mine.name}-moved")
            text = "students can rename the submissions of others in {folder}"
            return fault(name, cure, text, folder=inbound)
    finally:
        mine.rmdir()
    return passed(name, "{student} can submit; no student sees the others", student=student)


def _roster_names(settings: HubSettings, course: HubCourse) -> list[Diagnosis]:
    """Find students whose id is no Unix account, or no name as the Hub writes it."""
    try:
        names = roster_of(course)
    except UserError:
        return []  # reported by _gradebook
    name = f"roster of {course.name}"
    if wrong := sorted(one for one in names if one != one.lower()):
        text = 'the id "{id}" has capital letters, and the Hub calls this user "{lower}"'
        text = tr(text, id=wrong[0], lower=wrong[0].lower())
        return [Diagnosis(name, False, text, tr("write ids in lower case in the file of dlo roster import"))]
    known = {person.pw_name for person in pwd.getpwall()}
    if absent := sorted(names - known):
        text = tr("{number} students have no account here, first {id}", number=len(absent), id=absent[0])
        return [Diagnosis(name, False, text, f"useradd --create-home {absent[0]}")]
    return [passed(name, "{number} students, all with an account", number=len(names))]
