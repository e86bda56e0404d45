"""Every value of a script's head is read by sbatch unchanged, or is refused in one line."""

from __future__ import annotations

import random
import string
import subprocess
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster.script.template import JobScript
from dlo_lib.cluster.script.work import Once
from dlo_lib.cluster.site.description import site
from dlo_lib.cluster.site.quoting import check_name, directive, expanded, output_pattern
from dlo_lib.cluster.site.request import allocate, make_request

HARD = [
    "essai #2",
    "lr=0.1 --exclusive",
    "it's",
    'say "hi"',
    "50%",
    "a%j%a",
    "back\\slash",
    "ends with \\",
    " blanks ",
    "a,b|c;d",
    "$HOME `id` $(id)",
    "été 日本",
    "--hold",
    "#",
    "'",
    "packjob",
]


def read_by_sbatch(line: str) -> list[str]:
    """Return the words of a line after ``#SBATCH``, as ``_get_argument`` of sbatch's opt.c reads them."""
    words, word, quote, at = [], None, "", 0
    while at < len(line):
        letter = line[at]
        if letter == "\\":
            at += 1
            word = (word or "") + line[at : at + 1]
        elif quote:
            quote, word = ("", word) if letter == quote else (quote, (word or "") + letter)
        elif letter in "'\"":
            quote, word = letter, word or ""
        elif letter == "#":
            break
        elif letter.isspace():
            words += [word] if word is not None else []
            word = None
        else:
            word = (word or "") + letter
        at += 1
    assert not quote, "an open quote: sbatch refuses the script"
    return words + ([word] if word is not None else [])


def test_a_directive_is_read_as_the_value_that_was_given():
    draw = random.Random(1)
    letters = string.ascii_letters + " \"'\\#%$`;|,=-[]()é日" * 3
    random_ones = ["".join(draw.choices(letters, k=draw.randrange(1, 20))) for _ in range(2000)]
    for value in [*HARD, *random_ones]:
        line = f'{directive("job-name", value):<30}  # it\'s "the" reason'
        assert read_by_sbatch(line) == [f"--job-name={value}"], value
    assert read_by_sbatch(directive("exclusive")) == ["--exclusive"]


@pytest.mark.parametrize("wrong", ["two\nlines", "a\ttab", "bell\x07", "nul\0", "\x7f", "\udcff"])
def test_what_no_line_can_hold_is_refused_in_one_line(wrong):
    for refused in (lambda: directive("account", wrong), lambda: check_name(wrong)):
        with pytest.raises(UserError, match="(account|name) is '") as error:
            refused()
        assert "\n" not in str(error.value)


def test_a_name_is_as_long_as_the_accounting_keeps(tmp_path, monkeypatch):
    assert check_name("é" * 100) == "é" * 100
    with pytest.raises(UserError, match="name has 202 bytes: use at most 200"):
        check_name("é" * 101)
    monkeypatch.setenv("DLO_SITE", "jean-zay-v100")
    monkeypatch.chdir(tmp_path)
    for name, says in (("a\nb", "name is 'a"), ("x" * 300, "name has 300 bytes")):
        with pytest.raises(UserError, match=says):
            cluster.submit(["true"], gpus=0, name=name, dry_run=True)


@pytest.mark.parametrize("where", ["account", "reservation", "qos", "partition"])
@pytest.mark.parametrize("value", HARD)
def test_no_argument_becomes_another_option(where, value, tmp_path):
    (tmp_path / "centre.toml").write_text(
        'title = "c"\nscheduler = "slurm"\ngpus_per_node = 1\ncores_per_gpu = 1\n'
    )
    allocation = allocate(site(tmp_path / "centre.toml"), make_request("1:00:00", **{where: value}))
    text = JobScript("run", allocation, Once(("true",)), folder=tmp_path / value.replace("\\", "")).text()
    words = [
        word for line in text.splitlines() if line.startswith("#SBATCH") for word in read_by_sbatch(line[7:])
    ]
    assert f"--{where}={value}" in words
    assert all(word.startswith("--") for word in words)
    plain = JobScript("run", allocate(allocation.site, make_request("1:00:00")), Once(("true",))).text()
    names = [word.split("=")[0] for word in words]
    assert set(names) - {f"--{where}"} == {
        word.split("=")[0] for line in plain.splitlines() if line.startswith("#SBATCH")
        for word in read_by_sbatch(line[7:])
    }  # fmt: skip
    assert len(names) == len(set(names))


def test_a_folder_of_jobs_keeps_its_name_or_is_refused():
    assert output_pattern(Path("/a/50% #1"), "%a.out") == "/a/50%% #1/%a.out"
    with pytest.raises(UserError, match="has a backslash, and SLURM writes no output there: set DLO_HOME"):
        output_pattern(Path("/a/b\\c"), "0.out")


@pytest.mark.parametrize("text", ["a b", 'q"q', "`id`", "$(id)", "b\\n", "100$", "#", "$1"])
def test_a_word_of_bash_keeps_everything_but_variables(text):
    said = subprocess.run(
        ["bash", "-uc", f'printf "%s" {expanded("$WORK/${WORK}/" + text)}'],
        env={"WORK": "/w x"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == f"/w x//w x/{text}"


def test_a_real_sbatch_reads_each_name_and_the_job_is_found(jean_zay, tmp_path, monkeypatch):
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    home = tmp_path / "a #1 50%j it's"
    home.mkdir()
    monkeypatch.setenv("DLO_HOME", str(home))
    monkeypatch.chdir(home)
    asked = {"gpus": 0, "cores": 1, "site": "jean-zay-v100", "account": "abc", "time": 5}
    jobs = {
        name: cluster.submit(["true"], name=name, options={"hold": True, "comment": name}, **asked)
        for name in HARD
    }
    rows = subprocess.run(
        ["squeue", "-h", "-o", "%A<>%j<>%k"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = {number: (name, comment) for number, name, comment in (row.split("<>") for row in rows)}
    for name, job in jobs.items():
        assert job.status()[0].state is cluster.State.PENDING
        called, comment = found[str(job.record.turns[0].number)]
        digest = job.record.digest
        assert (called, comment) == (f"{name}-{digest[:8]}", f"{name} dlo-{digest[:16]}".strip())
        job.cancel()
    renamed = cluster.submit(["true"], name="first", options={"hold": True}, **asked)
    number = renamed.record.turns[0].number
    subprocess.run(["scontrol", "update", f"jobid={number}", "name=other"], check=True)
    assert renamed.state == "pending"
    renamed.cancel()
    assert renamed.state == "cancelled"
    job = cluster.submit(["echo", "it's #1"], name="essai #2 --exclusive", sweep={"x": ["a b", "#"]}, **asked)
    assert job.wait(timeout=600).logs(1) == "it's #1 --x #\n"
