"""Servers in SLURM jobs: what the form offers, what it refuses, and what the job requests."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cluster.site.description import site
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.slurm_server import BATCH_SCRIPT, Offer, offer_of, reason_of, requests

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "hub" / "slurm.toml"
OFFER = Offer(("gpu_p2", ""), (timedelta(hours=1), timedelta(hours=2)), (0, 1))


def test_the_form_offers_what_the_file_says() -> None:
    form = OFFER.form()
    for value, shown in (("02:00:00", "2 h"), ("gpu_p2", "gpu_p2"), ("0", "none"), ("", "the default one")):
        assert f'<option value="{value}">{shown}</option>' in form


def test_a_selection_is_read_from_the_form_and_from_the_api() -> None:
    assert OFFER.chosen({}) == {"partition": "gpu_p2", "time": "01:00:00", "gpus": "0"}
    form = {"partition": [""], "time": ["02:00:00"], "gpus": ["1"]}
    assert OFFER.chosen(form) == OFFER.chosen({"partition": "", "time": "02:00:00", "gpus": "1"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time": "99:00:00"}, 'unknown time "99:00:00": did you mean'),
        ({"gpus": "8"}, 'unknown gpus "8"'),
        ({"partition": "gpu_p2\n#SBATCH --account=other"}, "unknown partition"),
        ({"homedir": "/root"}, 'unknown option of a server "homedir"'),
    ],
)
def test_what_is_not_offered_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        OFFER.chosen(options)


def test_a_job_requests_what_the_site_needs() -> None:
    settings = read_settings(EXAMPLE)
    servers = settings.slurm
    assert servers is not None
    a100 = site("jean-zay-a100")
    asked = requests(a100, servers, settings.limits, {"partition": "", "time": "01:00:00", "gpus": "1"})
    assert asked["nprocs"] == "8"
    assert asked["options"].splitlines() == [
        "#SBATCH --account=abc@a100",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --constraint=a100",
        "#SBATCH --hint=nomultithread",
    ]
    other = replace(a100, gpu_option="gpus-per-node", gpu_type="a100")
    elsewhere = requests(
        other, servers, settings.limits, {"partition": "a #2", "time": "01:00:00", "gpus": "1"}
    )
    assert '#SBATCH --partition="a #2"\n' in elsewhere["options"]
    assert "#SBATCH --gpus-per-node=a100:1\n" in elsewhere["options"]
    without = requests(a100, servers, settings.limits, {"partition": "", "time": "01:00:00", "gpus": "0"})
    assert "gres" not in without["options"]
    assert (without["nprocs"], without["memory"]) == ("4", "8G")


def test_more_gpus_than_a_node_has_are_refused() -> None:
    servers = read_settings(EXAMPLE).slurm
    assert servers is not None
    with pytest.raises(UserError, match="offers 9, but a node of jean-zay-v100 has 4"):
        offer_of(replace(servers, gpus=(0, 9)), site("jean-zay-v100"))


def test_the_script_renders_to_options_of_sbatch() -> None:
    from jinja2 import Template

    values = dict.fromkeys(("homedir", "keepvars", "runtime", "nprocs", "memory", "prologue"), "")
    values |= {"options": "#SBATCH --partition=p\n#SBATCH --hint=x\n", "cmd": "server"}
    lines = Template(BATCH_SCRIPT).render(**values).splitlines()
    assert "#SBATCH --partition=p" in lines
    assert "#SBATCH --hint=x" in lines
    assert lines.index("set -euo pipefail") > lines.index("#SBATCH --hint=x")


def test_the_form_says_why_the_last_server_ended() -> None:
    limits = read_settings(EXAMPLE).limits
    said = (
        "JobId=7 JobName=jupyterhub UserId=ada(1001) JobState={state} Reason=None TimeLimit=00:01:00 Nodes=1"
    )
    timeout = reason_of(said.format(state="TIMEOUT"), limits)
    assert timeout == "Your last server ended at its time limit of 1 min. Saved files are in your folder."
    assert timeout in OFFER.form(timeout)
    assert "more than 8G" in reason_of(said.format(state="OUT_OF_MEMORY"), limits)
    assert "NODE_FAIL" in reason_of(said.format(state="NODE_FAIL"), limits)
    assert reason_of(said.format(state="CANCELLED"), limits) == ""
    assert reason_of("", limits) == ""
    assert "alert" not in OFFER.form("")
