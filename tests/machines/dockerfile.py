"""A reader of deploy/Dockerfile, for the instructions that it uses.

The tests use the Dockerfile itself, so there is no second list of steps. An unknown instruction is an error.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

KNOWN = ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "RUN", "USER", "WORKDIR")


@dataclass
class Stage:
    """``FROM parent AS name`` and its instructions, as (instruction, arguments)."""

    name: str
    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def copies(self) -> Iterator[tuple[list[str], str]]:
        """Yield the sources and the destination of each COPY."""
        for instruction, arguments in self.steps:
            if instruction == "COPY":
                *sources, target = shlex.split(arguments)
                yield sources, target


@dataclass
class State:
    """The result of a stage: user, folder, environment variables and default command."""

    user: str = "root"
    folder: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def note(self, instruction: str, rest: str, arguments: dict[str, str]) -> None:
        """Apply one instruction; ``arguments`` collects the stage's build arguments that have a default."""
        if instruction == "USER":
            self.user = rest
        elif instruction == "WORKDIR":
            self.folder = rest
        elif instruction == "ENV":
            self.env.update(part.split("=", 1) for part in shlex.split(rest))
        elif instruction == "ARG" and "=" in rest:
            arguments.update([rest.split("=", 1)])
        elif instruction == "ENTRYPOINT":
            self.entrypoint, self.command = json.loads(rest), []
        elif instruction == "CMD":
            self.command = json.loads(rest)


def read_stages(text: str) -> dict[str, Stage]:
    """Return the stages of a Dockerfile by name.

    Raises:
        ValueError: an instruction is unknown; the message contains its line.
    """
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for instruction, arguments in instructions(text):
        if instruction == "FROM":
            parent, word, name = arguments.split()
            if word.upper() != "AS":
                raise ValueError(f"FROM without a name: {arguments}")
            stage = stages[name] = Stage(name, parent)
        elif stage is None or instruction not in KNOWN:
            raise ValueError(f"unknown instruction: {instruction} {arguments}")
        else:
            if instruction in ("CMD", "ENTRYPOINT"):
                json.loads(arguments)  # only the JSON form is supported
            stage.steps.append((instruction, arguments))
    return stages


def instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    for line in lines:
        whole = line.strip()
        while whole.endswith("\\"):
            whole = whole[:-1].rstrip() + " " + next(lines).strip()
        instruction, _, arguments = whole.partition(" ")
        yield instruction.upper(), arguments.strip()


def lineage(stages: Mapping[str, Stage], name: str) -> list[Stage]:
    """Return the stage and those it builds on, the lowest first."""
    stage = stages[name]
    return [*(lineage(stages, stage.parent) if stage.parent in stages else []), stage]


def run_line(arguments: str) -> tuple[list[str], str]:
    """Split a RUN into the targets of its cache mounts and its command."""
    caches = []
    while arguments.startswith("--"):
        option, _, arguments = arguments.partition(" ")
        settings = dict(part.split("=", 1) for part in option.partition("=")[2].split(",") if "=" in part)
        if not option.startswith("--mount=") or settings.get("type") != "cache":
            raise ValueError(f"unknown option: RUN {option}")
        caches.append(settings["target"])
    return caches, arguments
