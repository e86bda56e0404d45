"""Options of sbatch, the software of a site, typed GPUs and ranks without GPUs reach the script, checked."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster.run import dependency
from dlo_lib.cluster.script.template import JobScript, Launcher
from dlo_lib.cluster.script.work import Once, work_of
from dlo_lib.cluster.site.description import site
from dlo_lib.cluster.site.request import Allocation, allocate, make_request
from tests.cluster.script.test_script import head

SITE = """
title = "another centre"
scheduler = "slurm"
gpus_per_node = 2
cores_per_gpu = 16
partition = "training"
gpu_type = "a100"
options = { mem = "64G", mail-type = "FAIL", exclusive = true }
"""
CPUS = """
title = "nodes without GPUs"
scheduler = "slurm"
gpus_per_node = 0
cores_per_gpu = 4
cores_per_node = 16
"""


def allocated(tmp_path: Path, more: str = "", text: str = SITE, **wanted: object) -> Allocation:
    file = tmp_path / "centre.toml"
    file.write_text(text + more)
    return allocate(site(file), make_request("1:00:00", **wanted))


def text_of(allocation: Allocation, what: object = "dlo_lib.train", **changes: object) -> str:
    script = JobScript("run", allocation, work_of(what), folder=Path("/job"), python="/own/python")
    return replace(script, **changes).text()


def test_options_of_the_call_replace_those_of_the_site(tmp_path):
    asked = {
        "mail_type": "END",
        "--nice": 10,
        "mem-per-cpu": "2G",
        "exclusive": False,
        "comment": "two words",
    }
    said = head(text_of(allocated(tmp_path, gpus=4, options=asked)))
    assert said["gres"] == "gpu:a100:2"
    assert (said["mail-type"], said["nice"], said["mem-per-cpu"]) == ("END", "10", "2G")
    assert said["comment"] == '"two words"'
    assert not {"mem", "exclusive"} & said.keys()
    plain = head(text_of(allocated(tmp_path, memory="8G")))
    assert (plain["mem"], plain["exclusive"], plain["mail-type"]) == ("8G", "", "FAIL")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"options": {"nodes": 2}}, "options: the job sets --nodes: use nodes="),
        ({"options": {"output": "x"}}, r"options: the job sets --output: use job.logs()"),
        ({"options": {"array": "0-3"}}, "options: the job sets --array: use sweep= and at_once="),
        ({"options": {"meme": "4G"}}, 'unknown option of sbatch "meme": did you mean mem'),
        ({"options": {"partition": "other"}}, "options: the job sets --partition: use partition="),
        ({"options": {"mem": "a lot"}}, 'mem is "a lot": write a number and a unit'),
        ({"options": {"mem": True}}, "options: mem needs a value"),
        ({"options": {"hold": "yes"}}, "options: hold takes no value"),
        ({"options": {"comment": "a\nb"}}, "options: comment is 'a.*nb': leave out the line break"),
        ({"options": {"nodelist": ["v1"]}}, r"options: nodelist is \['v1'\]: it must be a text"),
        ({"options": {"mem": "4G", "mem-per-gpu": "4G"}}, "mem and mem-per-gpu contradict each other"),
        ({"options": {"mem-per-gpu": "4G"}, "memory": "4G"}, "memory= and options mem-per-gpu contradict"),
        ({"options": {"hint": "nomultithread", "threads-per-core": 1}}, "threads-per-core contradicts"),
        ({"options": "--mem=4G"}, "options is '--mem=4G': write a dict, such as"),
        ({"memory": "64 GB"}, 'memory is "64 GB": write a number and a unit'),
        ({"setup": "module load gcc"}, "setup is 'module load gcc': give a list of lines"),
        ({"gpus": 2, "ranks": 2}, "gpus=2 with ranks=2: there is one rank per GPU, so leave ranks out"),
        ({"ranks": 0}, "ranks is 0: use at least 1"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_one_line_with_its_cure(wanted, says, tmp_path):
    with pytest.raises(UserError, match=says) as error:
        text_of(allocated(tmp_path, **wanted))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('options = ["mem=4G"]', "options is .*: it must be a table, such as"),
        ('options = { node = "x" }', 'unknown option of sbatch "node"'),
        ('options = { time = "1:00" }', "options: the job sets --time: use time="),
        ('conda = "a"\nvenv = "b"', "venv and conda contradict each other: keep one"),
        ('setup = "ulimit"', "setup is 'ulimit': it must be a list of texts"),
    ],
)
def test_a_wrong_setting_of_a_site_is_one_line(more, says, tmp_path):
    text = SITE.replace("options = {", "# options = {")
    with pytest.raises(UserError, match=says) as error:
        allocated(tmp_path, more, text)
    assert "centre.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_ranks_without_gpus_fill_nodes(tmp_path):
    found = allocated(tmp_path, text=CPUS, ranks=8)
    assert (found.nodes, found.ranks_per_node, found.gpus_per_node) == (2, 4, 0)
    said = head(text_of(found))
    assert (said["nodes"], said["ntasks-per-node"], said["cpus-per-task"]) == ("2", "4", "4")
    assert "gres" not in said
    torchrun = text_of(found, launcher=Launcher.TORCHRUN)
    assert '--nproc-per-node="4"' in torchrun
    assert "SLURM_CPUS_PER_TASK / 4" in torchrun
    assert allocated(tmp_path, text=CPUS).ranks == 1, "a site without GPUs needs no gpus=0"
    with pytest.raises(UserError, match="8 ranks of 8 cores on 2 nodes: a node of centre holds 2 .*nodes=4"):
        allocated(tmp_path, text=CPUS, ranks=8, cores=8, nodes=2)
    with pytest.raises(
        UserError, match="5 ranks cannot be spread evenly over 2 nodes: use ranks=4 or ranks=6"
    ):
        allocated(tmp_path, text=CPUS, ranks=5, nodes=2)


CARRIERS = {
    "gres": ("", {"gres": "gpu:a100:2"}, "${SLURM_GPUS_ON_NODE:-1}"),
    "gpus-per-node": ("gpus-per-node", {"gpus-per-node": "a100:2"}, "${SLURM_GPUS_ON_NODE:-1}"),
    "none": ("none", {}, "2"),
}


@pytest.mark.parametrize("kind", CARRIERS)
def test_gpus_are_requested_in_the_way_of_the_centre(kind, tmp_path):
    option, wanted, on_node = CARRIERS[kind]
    more = f'gpu_option = "{option}"\n' if option else ""
    text = text_of(allocated(tmp_path, more, gpus=4), launcher=Launcher.TORCHRUN)
    said = head(text)
    assert {name: said[name] for name in ("gres", "gpus-per-node") if name in said} == wanted
    assert (said["nodes"], said["ntasks-per-node"]) == ("2", "1")
    assert f'--nproc-per-node="{on_node}"' in text
    assert f"/ {on_node}))" in text


@pytest.mark.parametrize("where", ["site", "call"])
def test_a_directive_that_a_centre_refuses_is_dropped(where, tmp_path):
    names = ("cpus-per-task", "gres", "open-mode", "partition", "signal")
    of_site = ", ".join(f"{name} = false" for name in names)
    text = SITE.replace("exclusive = true", f"exclusive = true, {of_site}") if where == "site" else SITE
    asked = {} if where == "site" else {"options": dict.fromkeys(names)}
    before = head(text_of(allocated(tmp_path, gpus=2)))
    script = text_of(allocated(tmp_path, text=text, gpus=2, **asked))
    after = head(script)
    assert before.keys() - after.keys() == set(names)
    assert after.items() <= before.items()
    assert "SRUN_CPUS_PER_TASK" not in script
    assert "USR1" not in script
    torchrun = text_of(allocated(tmp_path, text=text, gpus=2, **asked), launcher=Launcher.TORCHRUN)
    assert "$((${SLURM_CPUS_ON_NODE:-1} / 2))" in torchrun
    assert subprocess.run(["bash", "-nc", torchrun], capture_output=True).stderr == b""


def test_none_takes_an_option_of_the_site_out_too(tmp_path):
    said = head(text_of(allocated(tmp_path, options={"mem": None, "exclusive": False})))
    assert not {"mem", "exclusive"} & said.keys()


def test_a_call_names_its_partitions_and_whether_it_may_be_requeued(tmp_path):
    said = head(text_of(allocated(tmp_path, partition="a,b", options={"requeue": True})))
    assert (said["partition"], said["requeue"]) == ("a,b", "")
    twice = allocated(tmp_path, options={"requeue": True})
    assert text_of(twice, requeue=True).count("#SBATCH --requeue") == 1
    with pytest.raises(UserError, match="requeue=True and options no-requeue contradict each other"):
        text_of(allocated(tmp_path, options={"no-requeue": True}), requeue=True)


def test_the_comment_of_a_job_ends_with_its_tag(tmp_path):
    for options, comment in (({}, "dlo-1"), ({"comment": "mine"}, '"mine dlo-1"'), ({"comment": None}, None)):
        assert head(text_of(allocated(tmp_path, options=options), tag="dlo-1")).get("comment") == comment


def test_variables_of_the_call_replace_those_of_the_site_and_of_the_script(tmp_path):
    more = 'network = false\nenvironment = { A = "site", B = "site" }\n'
    env = {"B": "it's $HOME", "HF_HUB_OFFLINE": 0, "PYTHONPATH": "/mine"}
    allocation = allocated(tmp_path, more, gpus=0, env=env)
    echo = Once(("bash", "-c", 'echo "$A|$B|$HF_HUB_OFFLINE|$PYTHONPATH"'))
    script = text_of(allocation, work=echo, folder=tmp_path, module_path=("/copy",))
    clean = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=clean, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "site|it's $HOME|0|/copy:/mine\n", done.stderr


FAKE_SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$(dirname "$0")/srun.words"
"""


@pytest.mark.parametrize(
    ("srun", "words"),
    [
        ({"mpi": "pmix", "cpu_bind": "verbose"}, ["--mpi=pmix", "--cpu-bind=verbose"]),
        ({"--uenv": "prgenv-gnu/24.11:v1", "view": "default"},
         ["--mpi=none", "--uenv=prgenv-gnu/24.11:v1", "--view=default"]),
        ({"image": "docker:pytorch/pytorch"}, ["--mpi=none", "--image=docker:pytorch/pytorch"]),
        ({"container-image": "nvcr.io#nvidia/pytorch:25.01", "no-container-mount-home": True, "mpi": None},
         ["--container-image=nvcr.io#nvidia/pytorch:25.01", "--no-container-mount-home",
          "--container-mounts={cwd}:{cwd},{job}:{job},{job}/{library}", "--container-workdir={cwd}"]),
        ({"container-image": "$IMAGES/a b.sqsh", "container-mounts": "/data:/data:ro", "mpi": False},
         ["--container-image=/images/a b.sqsh",
          "--container-mounts=/data:/data:ro,{cwd}:{cwd},{job}:{job},{job}/{library}",
          "--container-workdir={cwd}"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("launcher", Launcher)
def test_srun_gets_the_options_of_the_call_and_the_site(launcher, srun, words, tmp_path):
    fake = tmp_path / "bin" / "srun"
    fake.parent.mkdir()
    fake.write_text(FAKE_SRUN)
    fake.chmod(0o755)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node1\n")
    scontrol.chmod(0o755)
    job = tmp_path / "the job #1"
    allocation = allocated(tmp_path, 'srun = { mpi = "none" }\n', gpus=1, srun=srun)
    script = text_of(allocation, folder=job, launcher=launcher)
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin", "IMAGES": "/images", "SLURM_CPUS_PER_TASK": "2"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = (fake.parent / "srun.words").read_text().splitlines()
    expected = [word.format(cwd=tmp_path, job=job, library=f"library:{job}/library") for word in words]
    image = any(word.startswith(("--container-image", "--image")) for word in words)
    assert said[: len(words) + 2] == [
        "--kill-on-bad-exit=1",
        *expected,
        "python" if image else "/own/python",
    ]


def test_srun_gets_the_words_that_submitit_gives_it(tmp_path):
    submitit = pytest.importorskip("submitit.slurm.slurm")
    srun = {"container-image": "nvcr.io#nvidia/pytorch:25.01", "mpi": "pmix", "no-container-mount-home": True}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in srun.items()]
    theirs = submitit._make_sbatch_string("python x", str(tmp_path), srun_args=words, partition="day,night")
    ours = text_of(allocated(tmp_path, gpus=2, srun=srun, partition="day,night"))
    for text in (theirs, ours):
        assert head(text)["partition"] == "day,night"
        line = next(line for line in text.splitlines() if line.startswith("srun "))
        assert set(words) <= set(shlex.split(line))


def test_a_command_runs_in_a_step_only_if_the_site_or_the_call_has_options_of_srun(tmp_path):
    command = Once(("make", "data"))
    plain = text_of(allocated(tmp_path, gpus=0), work=command)
    step = text_of(allocated(tmp_path, gpus=0, srun={"uenv": "a"}), work=command)
    assert '\nmake data "${arguments[@]}"\n' in plain
    assert '\nsrun --nodes=1 --ntasks=1 --uenv="a" make data "${arguments[@]}"\n' in step


def test_a_plug_in_may_have_options_of_sbatch_too(tmp_path):
    said = head(text_of(allocated(tmp_path, options={"uenv": "prgenv-gnu/24.11:v1", "view": "default"})))
    assert (said["uenv"], said["view"]) == ("prgenv-gnu/24.11:v1", "default")


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


SOFTWARE = {
    "modules": ('modules = ["gcc/12", "cuda"]', ["module purge", "module load gcc/12 cuda"]),
    "venv": ('venv = "$WORK/env"', ['source "$WORK/env/bin/activate"']),
    "conda": (
        'conda = "train"',
        ['conda_base="$("${CONDA_EXE:-conda}" info --base)"', 'conda activate "train"'],
    ),
    "setup": ('setup = ["ulimit -n 65536"]', ["ulimit -n 65536", "export MINE=1"]),
}


@pytest.mark.parametrize("kind", SOFTWARE)
def test_the_software_of_a_site_is_loaded_before_the_program(kind, tmp_path):
    more, expected = SOFTWARE[kind]
    text = text_of(allocated(tmp_path, more, setup=("export MINE=1",)))
    found = [line for line in lines_of(text) if line in expected]
    assert found == expected
    launch = next(line for line in lines_of(text) if line.startswith("srun"))
    assert launch.startswith(
        "srun --kill-on-bad-exit=1 " + ("python " if kind in ("venv", "conda") else "/own")
    )
    (tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True).returncode == 0
    if shutil.which("shellcheck"):
        command = ["shellcheck", "--exclude=SC1091,SC2016", str(tmp_path / "job.sh")]
        assert subprocess.run(command, capture_output=True, text=True).stdout == ""


CONDA_SH = """\
conda() { [ "$unset" != set ] && [ "$1" = activate ] && export PATH="$conda_base/envs/$2/bin:$PATH"; }
"""


@pytest.mark.parametrize("base", ["named", "asked"])
def test_a_conda_environment_is_activated(base, tmp_path):
    installed = tmp_path / "conda"
    (installed / "etc/profile.d").mkdir(parents=True)
    (installed / "etc/profile.d/conda.sh").write_text(CONDA_SH)
    programs = {
        "envs/train/bin/python": "echo python of train: $*",
        "bin/conda": f'[ "$*" = "info --base" ] && echo {installed}',
    }
    for name, line in programs.items():
        file = installed / name
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
    more = 'conda = "train"\n' + (f'conda_base = "{installed}"\n' if base == "named" else "")
    script = JobScript("run", allocated(tmp_path, more, gpus=0), Once(("python", "x.py")), folder=tmp_path)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    if base == "asked":
        environment["CONDA_EXE"] = str(installed / "bin/conda")
    command = ["bash", "-c", script.text()]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "python of train: x.py\n", done.stderr


def test_modules_and_a_container_run_where_module_is_no_function(tmp_path):
    (tmp_path / "init.sh").write_text('module() { echo "module $*, unset: $never_set"; }\n')
    more = f'modules = ["gcc"]\nmodules_init = "{tmp_path}/init.sh"\ncontainer = "$IMAGES/torch.sif"\n'
    program = tmp_path / "fake"
    program.write_text('#!/bin/sh\necho "$0 $*"\n')
    program.chmod(0o755)
    more += f'container_runtime = "{program}"\ncontainer_options = ["--rocm"]\n'
    script = JobScript("run", allocated(tmp_path, more, gpus=0), Once(("make", "data")), folder=tmp_path)
    environment = {"PATH": "/usr/bin:/bin", "IMAGES": "/images", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script.text()], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "module purge, unset: ",
        "module load gcc, unset: ",
        f"{program} exec --rocm --bind {tmp_path} --bind {tmp_path} --bind {tmp_path}/library "
        "/images/torch.sif make data",
    ], done.stderr
    without = script.text().replace(f"{tmp_path}/init.sh", "/nowhere")
    done = subprocess.run(
        ["bash", "-c", without], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no command module on" in done.stderr
    assert "set modules_init in the file of the site" in done.stderr


def test_a_kind_of_dependency_is_checked():
    with pytest.raises(UserError, match='unknown after_kind "afternotok": did you mean'):
        dependency.check("afternotok", 1, 1)
    with pytest.raises(UserError, match="aftercorr joins the elements of two sweeps of the same size"):
        dependency.check("aftercorr", 2, 3)


@pytest.mark.parametrize("kind", ["afterok", "afterany", "aftercorr"])
def test_this_machine_honours_every_kind_of_dependency(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("DLO_SITE", "local")
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    monkeypatch.chdir(tmp_path)
    first = cluster.submit(["bash", "-c", 'exit "$1"'], sweep={"code": [0, 1]})
    later = cluster.submit(["true"], sweep={"code": [0, 1]}, after=first, after_kind=kind)
    while not later.done:
        time.sleep(0.05)
    expected = {"afterok": "2 cancelled", "afterany": "2 completed", "aftercorr": "1 completed, 1 cancelled"}
    assert later.state == expected[kind]
