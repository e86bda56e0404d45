"""``hub.toml``: the examples are read, and each mistake gives one line that names it and the cure."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.hub.read_settings import read_settings

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "hub"
LOCAL = (EXAMPLES / "hub.toml").read_text(encoding="utf-8")
SLURM = (EXAMPLES / "slurm.toml").read_text(encoding="utf-8")
SECOND = """
[[course]]
name = "deep26"
account = "grader-b"
folder = "/srv/b"
checkout = "/srv/b-checkout"
graders = []
"""


@pytest.mark.parametrize("kind", ["hub", "slurm", "kubernetes"])
def test_the_examples_are_valid(kind: str) -> None:
    settings = read_settings(EXAMPLES / f"{kind}.toml")
    assert settings.kind == ("local" if kind == "hub" else kind)
    assert [course.name for course in settings.courses] == ["deep26"]


def test_the_values_of_the_example() -> None:
    settings = read_settings(EXAMPLES / "hub.toml")
    assert settings.limits.memory_bytes == 2 << 30
    assert settings.limits.idle == timedelta(hours=1)
    (course,) = settings.courses
    assert (course.student_group, course.grader_group) == ("nbgrader-deep26", "formgrade-deep26")
    assert settings.graders == ("assistant", "head")
    assert settings.exchange == Path("/srv/dlo-hub/exchange")
    assert settings.jupyter_folder("student") == Path("/srv/dlo-hub/jupyter/student")


def test_every_key_is_described() -> None:
    from dataclasses import fields

    from dlo_lib.hub import settings

    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for kind in (
        settings.HubSettings, settings.HubLimits, settings.HubCourse, settings.SlurmServers,
        settings.KubernetesServers, settings.LtiPlatform,
    ):  # fmt: skip
        for option in fields(kind):
            if option.name not in ("courses", "file"):
                assert f"`{option.name}`" in text, option.name


LTI = """
[lti]
issuer = "https://moodle.example.org"
client_id = "A"
authorize_url = "https://moodle.example.org/mod/lti/auth.php"
keys_url = "https://moodle.example.org/mod/lti/certs.php"
username = "custom_login"
"""
WRONG = {
    "a claim that is no Unix account": (
        LOCAL + LTI,
        '"custom_login"',
        '"email"',
        'username in [lti] is "email", which is an address and no Unix account: write "custom_login"',
    ),
    "a key that does not exist": (
        LOCAL,
        "admins =",
        "admin =",
        'unknown key in the file "admin": did you mean admins',
    ),
    "a key of a course": (
        LOCAL,
        "graders =",
        "grader =",
        'unknown key in [[course]] deep26 "grader": did you mean graders',
    ),
    "a key of the limits": (
        LOCAL,
        "memory =",
        "memroy =",
        'unknown key in [limits] "memroy": did you mean memory',
    ),
    "a missing key": (
        LOCAL,
        'account = "grader-deep26"',
        "",
        "[[course]] deep26 lacks account: deploy/hub/README.md",
    ),
    "no course": (LOCAL.split("[[course]]")[0], "", "", "no course: add a table [[course]]"),
    "another kind": (
        LOCAL,
        '"local"',
        '"docker"',
        "kind in the file is 'docker': it must be one of local, slurm, kubernetes",
    ),
    "slurm without its table": (
        LOCAL,
        '"local"',
        '"slurm"',
        'kind is "slurm", but there is no table [slurm]: add it',
    ),
    "a table of another kind": (
        SLURM,
        'kind = "slurm"',
        'kind = "local"',
        'there is a table [slurm], but kind is "local"',
    ),
    "a relative folder": (
        LOCAL,
        '"/srv/courses/deep26"',
        '"courses"',
        "folder in [[course]] deep26 is 'courses': it must be a full",
    ),
    "a size": (LOCAL, '"2G"', '"2 GB"', "memory in [limits] is '2 GB': it must be a size, such as \"2G\""),
    "a text as number": (
        LOCAL,
        "processes = 512",
        'processes = "many"',
        "processes in [limits] is 'many': it must be a whole number",
    ),
    "no processors": (
        LOCAL,
        "processors = 2",
        "processors = 0",
        "processors in [limits] is 0: it must be a number above 0",
    ),
    "a time": (LOCAL, '"1:00:00"', '"soon"', "idle in [limits] is 'soon': time is \"soon\": write it as"),
    "times of the form": (
        SLURM,
        'times = ["1:00:00", "2:00:00", "4:00:00"]',
        "times = []",
        "times in [slurm] is []: it must be a list",
    ),
    "a name with spaces": (
        LOCAL,
        'name = "deep26"',
        'name = "Deep 26"',
        "is 'Deep 26': it must be a name of lower-case letters",
    ),
    "graders as text": (
        LOCAL,
        'graders = ["head", "assistant"]',
        'graders = "head"',
        "graders in [[course]] deep26 is 'head': it must be a list",
    ),
    "students": (
        LOCAL,
        '"roster"',
        '"all"',
        "students in [[course]] deep26 is 'all': it must be \"roster\" or a list",
    ),
    "the address": (
        LOCAL,
        '"http://127.0.0.1:8000"',
        '"hub"',
        "address in the file is 'hub': it must be a URL",
    ),
    "limits without a table": (
        LOCAL.replace("[limits]", "[other]").replace('admins = ["head"]', "admins = []\nlimits = 3"),
        "",
        "",
        "[limits] is not a table",
    ),
    "two courses of one name": (
        LOCAL + SECOND,
        "",
        "",
        "the courses deep26 and deep26 have the same name (deep26)",
    ),
    "an account that is a person": (
        LOCAL,
        '["head", "assistant"]',
        '["grader-deep26"]',
        "grader-deep26 is the account of a course and also a person",
    ),
    "no TOML": (LOCAL, 'kind = "local"', "kind = local", "is not a readable TOML file"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_named_in_one_line(mistake: str, tmp_path: Path) -> None:
    text, old, new, said = WRONG[mistake]
    assert old in text
    file = tmp_path / "hub.toml"
    file.write_text(text.replace(old, new, 1) if old else text)
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        read_settings(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_names_the_example(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="copy deploy/hub/hub.toml"):
        read_settings(tmp_path / "hub.toml")


def test_an_unknown_course_suggests_a_near_one() -> None:
    with pytest.raises(UserError, match="did you mean deep26"):
        read_settings(EXAMPLES / "hub.toml").course("deep25")
