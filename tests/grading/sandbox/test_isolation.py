"""The isolation of this host is found by running it; a host without isolation gives one line."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests are no package, so helpers are imported by path
from other_user import command_of

from dlo_lib.base.errors import UserError
from dlo_lib.grading.sandbox import isolation
from dlo_lib.grading.sandbox.isolation import (
    Apptainer,
    Bubblewrap,
    FoundIsolation,
    Unsandboxed,
    View,
    best_isolation,
    files_of,
    find_isolation,
    marked,
    required_isolation,
    system_view,
    why_not,
)

PLAIN_USER = "nobody"
GRADES = """
import os
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.remote_worker import deadline_after
from dlo_lib.grading.sandbox.isolation import required_isolation
with Zygote(isolation=required_isolation()) as zygote:
    worker = zygote.worker()
    source = "import os\\ndef seen(): return \
[os.getuid(), os.path.exists('/etc/passwd'), os.listdir('/dev/shm')]"
    worker.ask(deadline_after(60), do="load", cells=[{"id": "a", "own": True, "source": source}])
    answer = worker.ask(deadline_after(60), do="call", name="seen", args=[], kwargs={})
    print(os.getuid(), zygote.isolation.name, answer["value"])
    assert worker.usage().cpu > 0
"""


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without any isolation."""
    nothing = FoundIsolation(None, ("bubblewrap is not installed",))
    monkeypatch.setattr(isolation, "find_isolation", lambda: nothing)


def test_a_host_that_cannot_isolate_refuses_in_one_line_with_the_cure(nothing: None) -> None:
    with pytest.raises(
        UserError, match="cannot isolate.*not installed.*apt-get install bubblewrap.*--unsafe"
    ) as refusal:
        required_isolation()
    assert "\n" not in str(refusal.value)


def test_without_isolation_every_status_is_marked(nothing: None) -> None:
    assert marked("GRADED", best_isolation()) == "GRADED (UNSANDBOXED)"
    assert marked("GRADED", Bubblewrap("bwrap")) == "GRADED"


def test_a_working_isolation_is_found_by_running_it() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("NOT TESTED HERE: the sandbox (bubblewrap is not installed)")
    found = find_isolation()
    assert (found.isolation is not None) or found.reasons
    assert best_isolation() == (found.isolation or Unsandboxed())


def test_a_failing_program_is_refused_with_its_message(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    assert why_not(Bubblewrap(str(fake))) == "bubblewrap: setting up uid map: Permission denied"
    assert "No such file" in why_not(Bubblewrap(str(tmp_path / "absent")))


def test_the_view_is_the_interpreter_and_the_library_and_nothing_of_the_checkout() -> None:
    root = Path(__file__).parents[3]
    shown = system_view().shown
    assert root / "dlo_lib" in shown
    for hidden in (
        root,
        root / "solutions",
        root / "labs",
        Path.home(),
        Path("/etc"),
        Path("/usr"),
        Path("/usr/share"),
        Path("/"),
    ):
        assert not any(hidden == path or hidden.is_relative_to(path) for path in shown), hidden


def test_the_pycache_folder_is_masked_before_it_exists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    for name in ("__init__.py", "taught.py", "other.py"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert files_of(["some_package.taught"]) == (package / "taught.py", package / "__pycache__")
    assert files_of(["some_package.absent", "no_such_package.at_all"]) == (package / "__pycache__",)
    assert "some_package" not in sys.modules


VIEW = View(
    (Path("/usr/bin"), Path("/opt/venv/lib")),
    (Path("/opt/venv/lib/taught.py"),),
    {Path("/lab"): Path("/srv/lab")},
    {"LANG": "C"},
)


def test_bubblewraps_command_line_shares_nothing_with_the_machine() -> None:
    command = Bubblewrap("bwrap").command(["true"], VIEW)
    assert command[-2:] == ["--", "true"]
    for option in ("--unshare-all", "--die-with-parent", "--new-session", "--clearenv"):
        assert option in command
    text = " ".join(command)
    assert "--cap-drop ALL" in text
    assert "--ro-bind /dev/null /opt/venv/lib/taught.py" in text
    assert "--ro-bind /srv/lab /lab" in text
    assert "--setenv LANG C" in text
    assert text.index("--ro-bind /opt/venv/lib /opt/venv/lib") < text.index(
        "/dev/null /opt/venv/lib/taught.py"
    )


def test_root_is_dropped_before_the_namespaces_are_created() -> None:
    command = Bubblewrap("bwrap", as_root=True).command(["true"], VIEW)
    assert command.index("setpriv") < command.index("--unshare-all")
    assert "--no-new-privs" in command
    assert command.count("bwrap") == 2


def test_apptainers_command_line_shares_nothing_with_the_machine() -> None:
    """Only the command line is tested, because these tests' machine has no Apptainer."""
    command = Apptainer("apptainer", Path("/var/empty")).command(["true"], VIEW)
    assert command[-2:] == ["/var/empty", "true"]
    for option in ("--userns", "--containall", "--cleanenv", "--no-home", "--no-privs"):
        assert option in command
    text = " ".join(command)
    assert "--net --network none" in text
    assert "--bind /srv/lab:/lab:ro" in text
    assert "--bind /dev/null:/opt/venv/lib/taught.py:ro" in text
    assert "--env LANG=C" in text


def test_an_ordinary_user_grades_in_a_sandbox() -> None:
    """As another user of this machine, who can read the interpreter but owns no file."""
    if find_isolation().isolation is None or os.geteuid() != 0 or shutil.which("runuser") is None:
        pytest.skip("NOT TESTED HERE: a plain user's sandbox (needs root to become one, and bubblewrap)")
    command = command_of(PLAIN_USER, Path("/"), sys.executable, "-c", GRADES)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    uid = pwd.getpwnam(PLAIN_USER).pw_uid
    assert done.stdout.strip() == f"{uid} bubblewrap [{uid}, False, []]", done.stderr


@pytest.mark.parametrize("most", [1, 100], ids=["none are left", "some are left"])
def test_a_user_without_user_namespaces_gets_one_line(tmp_path: Path, most: int) -> None:
    """As an ordinary user of a kernel that gives no further user namespace. Where it gives some, the message
    is another, or there is none: so it is this limit that the first message names."""
    if find_isolation().isolation is None or os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: a host without user namespaces (needs root and bubblewrap)")
    notebook = tmp_path / "theirs.ipynb"
    notebook.write_text("{}", encoding="utf-8")
    tmp_path.chmod(0o755)
    check = [sys.executable, "-c", "from dlo_lib.cli import main; main()", "check", "13", "--notebook"]
    # The first of these namespaces sets the limit, the second is the user's own, which is within it.
    limited = 'echo "$0" > /proc/sys/user/max_user_namespaces && exec "$@"'
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000", *check, str(notebook)]
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", limited, str(most), *user]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    refused = "this host cannot isolate submissions (bubblewrap: bwrap: Creating new namespace failed"
    if most > 1:
        assert refused not in done.stderr
        return
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert refused in said
    assert said.endswith("or add --unsafe if you trust every submission with this account")
    assert "Traceback" not in said
