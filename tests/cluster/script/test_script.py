"""The job script requests what the user asked for, each option with its reason, and is valid bash."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cluster.run import records
from dlo_lib.cluster.script.template import JobScript, Launcher
from dlo_lib.cluster.script.work import Once, combinations, name_of, options, work_of
from dlo_lib.cluster.site.description import site, sites
from dlo_lib.cluster.site.request import allocate, make_request

SETTINGS = {"lr": [0.1, 0.01], "note": ["it's $HOME; `true`"]}


def scripted(name: str, launcher: Launcher = Launcher.SRUN, **changes: object) -> JobScript:
    allocation = allocate(site(name), make_request("1:00:00", gpus=2, account="abc"))
    return replace(JobScript("run", allocation, work_of("dlo_lib.train"), launcher=launcher), **changes)


def head(text: str) -> dict[str, str]:
    """Return the options in the script's head."""
    lines = [
        line.removeprefix("#SBATCH ").partition("  #")[0].strip()
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    ]
    return dict(line.removeprefix("--").partition("=")[::2] for line in lines)


EVERY_KIND = {
    "srun": {},
    "torchrun": {"launcher": Launcher.TORCHRUN},
    "requeue": {"requeue": True},
    "sweep": {"elements": tuple(map(options, combinations(SETTINGS)))},
    "folder": {
        "folder": Path("/a folder/of ours"),
        "python": "/a python/python",
        "out": '"$DLO_OUT"',
        "requeue": True,
    },
    "command": {"work": Once(("dlo", "grade", "it's"))},
}


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("name", [*sites()])
def test_bash_and_shellcheck_accept_every_script(kind, name, tmp_path):
    file = tmp_path / "job.sh"
    changes = EVERY_KIND[kind]
    file.write_text(scripted(name, **changes).text())
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "--exclude=SC1091,SC2016", str(file)], capture_output=True, text=True
        )
        assert done.stdout == ""
    lines = file.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert all("  # " in line for line in lines if line.startswith("#SBATCH")), "every option has a reason"


def test_the_head_has_the_allocation():
    assert head(scripted("jean-zay-a100").text()) == {
        "job-name": "run",
        "account": "abc@a100",
        "constraint": "a100",
        "nodes": "1",
        "ntasks-per-node": "2",
        "gres": "gpu:2",
        "cpus-per-task": "8",
        "hint": "nomultithread",
        "time": "01:00:00",
        "signal": "B:USR1@90",
        "open-mode": "append",
        "output": "run-%j.out",
    }


def test_torchrun_is_one_task_a_node_with_the_cores_of_all_its_ranks():
    said = head(scripted("jean-zay-v100", Launcher.TORCHRUN).text())
    assert (said["ntasks-per-node"], said["cpus-per-task"], said["gres"]) == ("1", "20", "gpu:2")


def test_only_runs_that_can_stop_get_a_signal():
    assert "signal" not in head(scripted("jean-zay-v100", work=Once(("true",))).text())
    assert "signal" not in head(scripted("jean-zay-v100", Launcher.TORCHRUN).text()), (
        "torchrun would end its ranks"
    )
    assert head(scripted("jean-zay-v100", requeue=True).text())["signal"] == "B:USR1@90"
    assert head(scripted("jean-zay-v100", folder=Path("/job")).text())["signal"] == "B:USR1@90", (
        "it reports how the run ended"
    )
    short = allocate(site("jean-zay-v100"), make_request("1"))
    assert "signal" not in head(scripted("jean-zay-v100", allocation=short).text()), (
        "the limit leaves no time for it"
    )
    with pytest.raises(
        UserError, match="the limit 00:01:00 leaves no time before its warning .90 s.: use a longer time="
    ):
        scripted("jean-zay-v100", allocation=short, requeue=True).text()
    with pytest.raises(UserError, match="requeue does not work with torchrun"):
        scripted("jean-zay-v100", Launcher.TORCHRUN, requeue=True).text()


def test_arguments_of_a_sweep_are_passed_unchanged(tmp_path):
    echo = Once(("printf", "%s\\n", "first"))
    text = scripted(
        "local", work=echo, elements=EVERY_KIND["sweep"]["elements"], folder=tmp_path, python="python"
    ).text()
    done = subprocess.run(
        ["bash", "-c", text],
        env={"SLURM_ARRAY_TASK_ID": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["first", "--lr", "0.01", "--note", "it's $HOME; `true`"], done.stderr
    assert records.exit_code(tmp_path, 1) == 0


def test_a_script_records_its_exit_status(tmp_path):
    for command, code in ((("false",), 1), (("bash", "-c", "exit 7"), 7), (("no-such-program",), 127)):
        text = scripted("local", work=Once(command), folder=tmp_path, python="python").text()
        # On a full disk, files can be made and not written to.
        full = ["bash", "-c", 'trap "" XFSZ; ulimit -f 0; exec bash -c "$0"', text]
        for run in (["bash", "-c", text], full):
            subprocess.run(run, capture_output=True)
            assert records.exit_code(tmp_path, 0) == code
            (tmp_path / "ends" / "0").unlink()
    (tmp_path / "ends" / "0").write_text("143\n")  # by the script of an older version
    assert records.exit_code(tmp_path, 0) == 143


def test_a_sweep_combines_all_values_or_takes_the_settings_given():
    assert combinations({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert combinations([{"a": 1}, {"a": 2, "b": 3}]) == [{"a": 1}, {"a": 2, "b": 3}]
    for nothing in ({}, [], {"a": []}):
        with pytest.raises(UserError, match="the sweep is empty"):
            combinations(nothing)
    for lone in ({"lr": 0.1}, {"lr": "0.1"}):
        with pytest.raises(UserError, match=r'the sweep over "lr" needs a list of values: write lr=\[...\]'):
            combinations(lone)


def test_a_file_a_module_and_a_command_are_recognised(tmp_path):
    (tmp_path / "my train.py").touch()
    (tmp_path / "go.sh").touch()
    assert work_of("dlo_lib.train").program == ("-m", "dlo_lib.train")
    assert work_of(tmp_path / "my train.py").program == (str(tmp_path / "my train.py"),)
    assert work_of(str(tmp_path / "go.sh")).command == ("bash", str(tmp_path / "go.sh"))
    assert work_of(["dlo", "grade"]).command == ("dlo", "grade")
    assert [
        name_of(what)
        for what in (
            "dlo_lib.train",
            tmp_path / "my train.py",
            ["/bin/dlo"],
            test_the_head_has_the_allocation,
        )
    ] == [
        "train",
        "my-train",
        "dlo",
        "test_the_head_has_the_allocation",
    ]
    for absent, says in (
        ("dlo_lib.trein", "no module"),
        ("nowhere.py", "no file"),
        ([], "the command is empty"),
    ):
        with pytest.raises(UserError, match=says):
            work_of(absent)


def test_a_site_sets_its_data_folder_and_its_network_interface(tmp_path):
    (tmp_path / "ours.toml").write_text(
        'extends = "jean-zay-a100"\ndata = "/data/models"\ninterface = "ib0"\nenvironment = { A = "b c" }\n'
    )
    text = scripted(str(tmp_path / "ours.toml")).text()
    for line in (
        'export DSDIR="/data/models"',
        "export GLOO_SOCKET_IFNAME=ib0",
        "export A='b c'",
        "export HF_HUB_OFFLINE=1",
    ):
        assert f"\n{line} " in text
    assert "DSDIR" not in scripted("jean-zay-a100").text(), "the site sets it for all users"
