"""The same Hub with servers as jobs of a virtual SLURM cluster; `make hub` runs these tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.virtual_slurm import Cluster, Nodes, attached
from tests.hub.browser import CHROMIUM, LONG_MS, chromium, log_in, picture
from tests.hub.class_on_hub import ClassOnHub, class_on_hub, missing

CLUSTER = Cluster(
    "hub", (Nodes("hubnode", 1, cores=8, gpus=2, features="v100"),), {"lab": (("hubnode",), "4:00:00")}
)
SITE = 'title = "test"\nscheduler = "slurm"\ngpus_per_node = 2\ncores_per_gpu = 2\npartition = "lab"\n'
TABLE = '[slurm]\nsite = "{site}"\ntimes = ["0:30:00", "1:00:00"]\ngpus = [0, 1]\n'
SEE_NODES = ("unshare", "--mount", "--propagation", "private", "sh", "-c")


SQUASHED = """\
#!/bin/sh
# Root has the rights of any other user on the files of users, as where an NFS server squashes root.
exec setpriv --bounding-set -dac_override,-dac_read_search,-fowner {slurmd} "$@"
"""
SUBMIT = """\
from dlo_lib import cluster
job = cluster.submit(["cat", {file!r}], gpus=0, cores=1, site={site!r}, time=5)
print(job.wait(timeout=240).logs(), job.folder)
"""


def squash_root(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the daemons of the nodes that start next read only what root's own modes allow."""
    slurmd = shutil.which("slurmd")
    folder.mkdir()
    (folder / "slurmd").write_text(SQUASHED.format(slurmd=slurmd))
    (folder / "slurmd").chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClassOnHub]:
    if reason := missing() or CLUSTER.missing():
        pytest.skip(f"NOT TESTED HERE: a real JupyterHub on SLURM ({reason})")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "site.toml").write_text(SITE)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        squash_root(folder / "bin", patch)
        conf = stack.enter_context(attached(CLUSTER, folder / "cluster"))
        # The Hub connects to the servers by the names of the nodes.
        command = (*SEE_NODES, f'mount --bind {conf.parent}/hosts /etc/hosts && exec "$@"', "sh")
        more = TABLE.format(site=folder / "site.toml")
        variables = {"SLURM_CONF": str(conf.resolve())}  # pytest closes its folders to other users
        with class_on_hub(
            kind="slurm", more=more, variables=variables, command=command, second=False
        ) as running:
            running.enrol("deep", running.person("ada"), running.person("blaise"))
            yield running


def slurm_variables(hub: ClassOnHub) -> dict[str, str]:
    return {**os.environ, **hub.variables}


def jobs(hub: ClassOnHub) -> dict[str, str]:
    """The users of running jobs, with what they requested."""
    said = subprocess.run(
        ["squeue", "--noheader", "--format=%u %l %C %b"], env=slurm_variables(hub), text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    return dict(line.split(" ", 1) for line in said.stdout.splitlines())


@pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED HERE: a Hub in a browser (install chromium)")
def test_the_form_starts_a_job_of_the_user(hub: ClassOnHub, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    ada = hub.person("ada")
    with chromium() as browser:
        page = log_in(browser, hub, ada)
        expect(page.get_by_label("Time")).to_be_visible(timeout=LONG_MS)
        page.get_by_label("GPUs").select_option("1")
        picture(page, tmp_path, "slurm_form")
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_role("heading", name="00 · Start here")).to_be_visible(timeout=LONG_MS)
    time_limit, cores, gpus = jobs(hub)[ada].split()
    assert (time_limit, cores, gpus[-5:]) == ("30:00", "2", "gpu:1")
    assert hub.get(f"/user/{ada}/api/status", hub.person("blaise"))[0] in (403, 404)


def test_a_restart_of_the_hub_loses_no_job(hub: ClassOnHub) -> None:
    ada = hub.person("ada")
    hub.start_server(ada)
    started = json.loads(hub.get(f"/user/{ada}/api/status", ada)[1])["started"]
    hub.stop()
    hub.start()
    assert json.loads(hub.get(f"/user/{ada}/api/status", ada)[1])["started"] == started


def test_a_closed_workspace_serves_the_jobs_of_its_student_where_root_is_squashed(hub: ClassOnHub) -> None:
    """The server of ada is a job in it, and submits a job that reads it."""
    ada, blaise = map(hub.person, ("ada", "blaise"))
    hub.start_server(ada)
    work = hub.home(ada) / "dlo-labs"
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    # of this cluster: another test of the machine may have one
    slurmd = next(one for one in psutil.Process().children(recursive=True) if one.name() == "slurmd")
    status = Path(f"/proc/{slurmd.pid}/status").read_text()
    assert not int(re.search(r"CapEff:\s*(\w+)", status).group(1), 16) & 0b110
    file = work / "answer.txt"
    file.write_text("the answer of ada\n")
    site = work / "site.toml"
    site.write_text(SITE)
    for one in (file, site):
        shutil.chown(one, ada, ada)
    python = str(hub.environment / "bin" / "python")
    script = SUBMIT.format(file=str(file), site=str(site))
    conf = f"SLURM_CONF={hub.variables['SLURM_CONF']}"
    done = hub.run_as(ada, "/usr/bin/env", "-C", str(work), conf, python, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "the answer of ada" in done.stdout
    folder = done.stdout.split()[-1]
    assert hub.run_as(blaise, "cat", str(file)).returncode != 0
    assert hub.run_as(blaise, "ls", folder).returncode != 0


def test_what_the_form_does_not_offer_is_refused(hub: ClassOnHub) -> None:
    blaise = hub.person("blaise")
    for options in ({"time": "99:00:00"}, {"gpus": "1\n#SBATCH --nodelist=x"}, {"homedir": "/root"}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            hub.api("POST", f"/users/{blaise}/server", options)
        assert caught.value.code in (400, 500)
    assert blaise not in jobs(hub)


def test_a_job_that_ends_by_its_time_limit_is_named_in_the_form(hub: ClassOnHub) -> None:
    blaise = hub.person("blaise")
    hub.start_server(blaise)
    saved = json.dumps({"type": "file", "format": "text", "content": "kept"})
    request = urllib.request.Request(
        f"{hub.url}/user/{blaise}/api/contents/kept.txt", saved.encode(), method="PUT"
    )
    request.add_header("Authorization", f"token {hub.token_of(blaise)}")
    urllib.request.urlopen(request, timeout=60).close()
    # Shorter than the job has run: how long a server takes to start does not matter then.
    ours = ["squeue", "--noheader", f"--user={blaise}", "--format=%A"]
    job = subprocess.run(
        ours, env=slurm_variables(hub), text=True, capture_output=True, check=True
    ).stdout.strip()
    shorten = ["scontrol", "update", f"JobId={job}", "TimeLimit=1"]
    subprocess.run(shorten, env=slurm_variables(hub), check=True)
    deadline = time.monotonic() + 300
    while hub.api("GET", f"/users/{blaise}")["servers"]:
        assert time.monotonic() < deadline, hub.log[-4000:]
        time.sleep(1)
    with chromium() as browser:
        page = log_in(browser, hub, blaise, "/hub/spawn")
        page.get_by_text("ended at its time limit of 1 min").wait_for()
    assert (hub.home(blaise) / "dlo-labs" / "kept.txt").read_text() == "kept"
