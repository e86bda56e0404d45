"""Every command in a guide exists and has the options that the guide uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

import dlo_lib
from dlo_lib.cli.app import app

ROOT = Path(dlo_lib.__file__).parents[1]
GUIDES = [
    "README.md",
    "docs/cluster.md",
    "docs/student.md",
    "solutions/README.md",
    "solutions/CALENDAR.md",
    "slurm/README.md",
    "deploy/hub/README.md",
    "Makefile",
]
CODE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:^|[\s/`(])dlo ((?:[a-z]+|--?[a-z])[^#|`;&]*)")


def commands_in(text: str) -> Iterator[str]:
    """Return the arguments of `dlo` in code spans, code blocks and recipes."""
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    recipes = [line for line in text.splitlines() if line.startswith("\t")]
    for code in (*(line for block in fenced for line in block.splitlines()), *CODE.findall(text), *recipes):
        yield from COMMAND.findall(code)


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_and_options_of_the_guides_exist(guide: str) -> None:
    top = typer.main.get_command(app)
    assert isinstance(top, TyperGroup)
    commands = list(commands_in((ROOT / guide).read_text(encoding="utf-8")))
    assert commands
    for words in commands:
        name, *rest = words.split()
        command = top.commands.get(name)
        assert command is not None, f"{guide}: dlo {words}"
        if isinstance(command, TyperGroup) and rest:  # a group without a command has a default
            command = command.commands.get(rest[0])
            assert command is not None, f"{guide}: dlo {words}"
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        } | {"--help"}
        assert {word for word in rest if word.startswith("--")} <= known, f"{guide}: dlo {words}"


def test_the_guide_for_instructors_describes_every_command_for_instructors() -> None:
    text = (ROOT / "solutions" / "README.md").read_text(encoding="utf-8")
    commands = {words.split()[0] for words in commands_in(text)}
    assert {
        "course",
        "roster",
        "release",
        "kit",
        "collect",
        "grade",
        "similar",
        "feedback",
        "export",
        "leaderboard",
        "receipt",
    } <= commands
