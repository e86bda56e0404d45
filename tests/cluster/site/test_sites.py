"""Sites are data: packaged ones describe real nodes, users' ones are found, and errors name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cluster.site.description import Scheduler, site, site_names, sites
from tests.cluster.fixtures import OTHER_SITE


@pytest.fixture(autouse=True)
def no_own_sites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DLO_SITES", raising=False)


@pytest.mark.parametrize(
    ("name", "gpus", "cores_of_a_node", "card", "suffix"),
    [
        ("jean-zay-v100", 4, 40, "v100-16", "@v100"),
        ("jean-zay-v100-32g", 4, 40, "v100-32", "@v100"),
        ("jean-zay-v100-8gpu", 8, 24, "v100-32", "@v100"),
        ("jean-zay-a100", 8, 64, "a100-80", "@a100"),
        ("jean-zay-h100", 4, 96, "h100-80", "@h100"),
    ],
)
def test_nodes_of_jean_zay(name, gpus, cores_of_a_node, card, suffix):
    found = site(name)
    assert (found.gpus_per_node, found.gpus_per_node * found.cores_per_gpu, found.account_suffix) == (
        gpus,
        cores_of_a_node,
        suffix,
    )
    assert found.gpu is not None
    assert found.gpu.name == card
    assert found.hint == "nomultithread"
    assert not found.network


def test_newer_processors_of_jean_zay_need_other_modules():
    assert {name: one.modules for name, one in sites().items() if one.modules} == {
        "jean-zay-a100": ("arch/a100",),
        "jean-zay-h100": ("arch/h100",),
    }


def test_local_is_this_machine():
    assert site("local").scheduler is Scheduler.LOCAL


@pytest.mark.parametrize("where", ["config", "DLO_SITES", "path"])
def test_a_users_site_is_found(where, tmp_path, monkeypatch):
    folder = tmp_path / "config" / "dlo" / "sites" if where == "config" else tmp_path / "sites"
    folder.mkdir(parents=True)
    (folder / "ours.toml").write_text(OTHER_SITE)
    if where == "DLO_SITES":
        monkeypatch.setenv("DLO_SITES", f"/nowhere:{folder}")
    ours = site(folder / "ours.toml" if where == "path" else "ours")
    assert (ours.name, ours.partition, ours.qos[0].time.days) == ("ours", "training", 1)


def test_a_site_may_extend_another(tmp_path):
    file = tmp_path / "course.toml"
    file.write_text('extends = "jean-zay-a100"\ntitle = "our course"\nreservation = "course-2026"\n')
    course, base = site(file), site("jean-zay-a100")
    assert (course.reservation, course.constraint, course.qos) == ("course-2026", base.constraint, base.qos)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("gpus_per_node = 2", "gpus_per_node = 0.5"), "gpus_per_node is 0.5: it must be a whole number"),
        (("cores_per_gpu = 16", "cores_per_gpu = 0"), "cores_per_gpu is 0: it must be at least 1"),
        (("partition", "particion"), 'unknown key "particion": did you mean partition'),
        (('gpu = "a100-80"', 'gpu = "a100-81"'), 'unknown GPU "a100-81": did you mean a100-80'),
        (("1-00:00:00", "one day"), 'time is "one day": write it as hours:minutes:seconds'),
        (('scheduler = "slurm"', 'scheduler = "pbs"'), 'unknown scheduler "pbs"'),
        (("cores_per_gpu = 16", 'cores_per_gpu = "16"'), "cores_per_gpu is '16': it must be a whole number"),
        (
            ('scheduler = "slurm"', 'scheduler = "slurm"\nmodules = "gcc"'),
            "modules is 'gcc': it must be a list of texts",
        ),
        (
            ('scheduler = "slurm"', 'scheduler = "slurm"\nenvironment = ["A=1"]'),
            "it must be a table of texts",
        ),
        (
            ('scheduler = "slurm"', 'scheduler = "slurm"\nnetwork = "yes"'),
            "network is 'yes': it must be true or false",
        ),
        (
            ('partition = "training"', 'partition = ["a"]'),
            "partition is ['a']: it must be a text",
        ),
        (
            ('partition = "training"', 'gpu_option = "gpus-per"'),
            'unknown gpu_option "gpus-per": did you mean gpus-per-node',
        ),
        (
            ('partition = "training"', 'partition = "a\\nb"'),
            "partition is 'a\\nb': leave out the line break",
        ),
        (
            ('title = "our machine room"', 'title = "our\\nrm -rf"'),
            "title is 'our\\nrm -rf': leave out the line break",
        ),
        (
            ('scheduler = "slurm"', 'scheduler = "slurm"\nsrun = { ntasks = 2 }'),
            "srun: the job sets --ntasks: use gpus= or ranks=",
        ),
        (('scheduler = "slurm"', 'scheduler = "slurm"\nsrun = "x"'), "srun is 'x': it must be a table"),
        (
            ('scheduler = "slurm"', 'scheduler = "slurm"\nenvironment = { "A-B" = "1" }'),
            "env: 'A-B' is no name of a variable",
        ),
        (('time = "1-00:00:00"', ""), "has no time: each has a name and the time of its longest job"),
        (
            ('time = "1-00:00:00"', 'time = "1-00:00:00"\ngpus = "8"'),
            "gpus of a qos is '8': it must be a whole number",
        ),
        (('time = "1-00:00:00"', "time = 24"), "time of a qos is 24: it must be a text"),
        (("[[qos]]", "[qos]"), "it must be tables, each under [[qos]]"),
        (('title = "our machine room"', ""), "lacks title"),
        (('title = "our', "title = our"), "is not a readable TOML file"),
        (("title", 'extends = "ours.toml"\ntitle'), "no site at"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(change, says, tmp_path):
    file = tmp_path / "ours.toml"
    file.write_text(OTHER_SITE.replace(*change))
    with pytest.raises(UserError, match="ours.toml") as error:
        site(file)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_file_does_not_hide_the_other_sites(tmp_path, monkeypatch):
    (tmp_path / "broken.toml").write_text("title = ")
    monkeypatch.setenv("DLO_SITES", str(tmp_path))
    assert {"broken", "jean-zay-a100", "local"} <= set(site_names())
    assert site("jean-zay-a100").gpus_per_node == 8
    with pytest.raises(UserError, match="broken.toml is not a readable TOML file"):
        site("broken")


def test_a_site_that_extends_itself_is_refused(tmp_path):
    file = tmp_path / "loop.toml"
    file.write_text(f'extends = "{file}"\n')
    with pytest.raises(UserError, match="extends itself"):
        site(file)


def test_an_unknown_site_offers_the_nearest():
    with pytest.raises(UserError, match='unknown site "jeanzay-a100": did you mean jean-zay-a100'):
        site("jeanzay-a100")
