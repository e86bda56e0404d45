"""A checked call, ready to submit: its script, its code, and the hash that identifies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.cluster.code import function_job, library
from dlo_lib.cluster.code.code_copy import CodeCopy, copy_of
from dlo_lib.cluster.code.digest import digest
from dlo_lib.cluster.job import settings_check
from dlo_lib.cluster.run import records
from dlo_lib.cluster.script.template import JobScript
from dlo_lib.cluster.script.work import CHECKPOINTS, Once, OnRanks, Work, arguments, options
from dlo_lib.cluster.site.quoting import check_name

What = str | Path | Sequence[str] | Callable[..., Any]


@dataclass(frozen=True)
class PreparedCall:
    """A checked call: its script without a folder, its code, and the parts that identify it."""

    script: JobScript
    settings: tuple[dict[str, Any], ...]
    call: bytes | None
    code: CodeCopy
    digest: str
    card: str | None
    uses_library: bool = False  # and runs the copy of it


def prepare(
    script: JobScript,
    what: What,
    given: Sequence[object] | Mapping[str, Any],
    settings: list[dict[str, Any]],
    after: str,
    card: str | None,
    copy_code: bool = True,
) -> PreparedCall:
    """Return the prepared call.

    Args:
        after: what the job waits for; "" if it waits for none.
        copy_code: the job runs from a copy of the code.

    Raises:
        UserError: the function or a value cannot be sent, or the code cannot be copied.
    """
    check_name(script.name)
    call: bytes | None = None
    if callable(what):
        if given and not isinstance(given, Mapping):
            raise UserError(tr("a function takes its arguments by name: give a dict"))
        named = dict(given) if isinstance(given, Mapping) else {}
        settings_check.check_function(what, named, settings)
        call, modules = function_job.pack(what, named, settings)
        code = copy_of([], sorted(modules), beside=copy_code)
        used = library.imported_by(code.sources(), {*modules, f"{library.ROOT.name}.launch"})
        content: list[object] = [what, named, settings]
        if len(settings) > 1:
            script = replace(script, elements=((),) * len(settings))
    else:
        words = arguments(given)
        if len(settings) > 1 and _names_out(words):
            raise UserError(
                tr(
                    "the elements of a sweep cannot share one --out: "
                    "leave it out, and each gets a separate folder"
                )
            )
        if script.work.trains:
            words += ("--resume",) * ("--resume" not in words)  # a resubmitted job resumes its training
            if not _chooses_checkpoints(words, settings):
                words += CHECKPOINTS
        script = replace(script, arguments=words, elements=tuple(map(options, settings)))
        if script.work.trains:
            settings_check.check_training(words, script.elements, script.allocation, alone=not after)
        code = _code_of(script.work, copy_code)
        run = script.work.program if isinstance(script.work, OnRanks) else script.work.command
        used = library.imported_by([*code.sources(), " ".join(run).encode()])
        content = [_content_of(script.work)]
    of_code = [code.content(), library.content(used)]
    whole = digest([script.text(), str(Path.cwd()), after, of_code, copy_code, *content])
    named_script = replace(script, name=f"{script.name}-{whole[: records.SHORT]}", tag=tag_of(whole))
    copied = code if copy_code else CodeCopy()
    return PreparedCall(named_script, tuple(settings), call, copied, whole, card, copy_code and bool(used))


def tag_of(digest: str) -> str:
    """Return the end of the comment by which SLURM's queue tells a job, whatever its name."""
    return f"dlo-{digest[:16]}"


def _chooses_checkpoints(words: tuple[str, ...], settings: list[dict[str, Any]]) -> bool:
    """Whether the user sets when checkpoints are written, for all elements or in the settings of a sweep."""
    names = [word.partition("=")[0] for word in words]
    names += [word for element in settings for word in options(element)]
    return any(name in ("--checkpoint-minutes", "--checkpoint-every") for name in names)


def _code_of(work: Work, copy_code: bool) -> CodeCopy:
    """Return the code of a program. A shell script is copied alone, because what it calls is not known."""
    if isinstance(work, Once):
        files = _programs(work)
        return copy_of(files, beside=copy_code and any(file.suffix == ".py" for file in files))
    if work.program[0] == "-m":
        name = work.program[1]
        return copy_of([], [name, f"{name}.__main__"], beside=copy_code)
    return copy_of([Path(work.program[0])], beside=copy_code)


def _programs(work: Once) -> list[Path]:
    """Return the words of a command that are files of code."""
    files = (Path(word) for word in work.command if word.endswith((".py", ".sh", ".bash", ".sbatch")))
    return [file for file in files if file.is_file()]


def _content_of(work: Work) -> bytes:
    """Return the content of the file that the command ends with, or nothing if it is no file."""
    last = (work.program if isinstance(work, OnRanks) else work.command)[-1]
    return Path(last).read_bytes() if Path(last).is_file() else b""


def in_folder(prepared: PreparedCall, folder: Path) -> JobScript:
    """Return the script of the job in ``folder``, which runs the copy of the code there."""
    code, work = prepared.code, prepared.script.work
    copied_library = str(library.place_of(folder)) if prepared.uses_library else ""
    path = (*filter(None, [copied_library]), *code.path(folder))
    script = replace(prepared.script, folder=folder, module_path=path, library=copied_library)

    def copied(word: str) -> str:
        original = Path(word).resolve()
        return str(code.placed(original, folder)) if original in code.files else word

    if isinstance(work, Once):
        script = replace(script, work=Once(tuple(map(copied, work.command))))
    elif work.program[0] != "-m":
        script = replace(script, work=OnRanks((copied(work.program[0]), *work.program[1:])))
    if script.work.trains and not any(_names_out(words) for words in (script.arguments, *script.elements)):
        script = replace(script, out='"$DLO_OUT"')
    return script


def _names_out(words: tuple[str, ...]) -> bool:
    return any(word == "--out" or word.startswith("--out=") for word in words)


def write(prepared: PreparedCall, folder: Path) -> None:
    """Write the job's files to its folder, the record last, because it makes the job exist."""
    script = in_folder(prepared, folder)
    (folder / "logs").mkdir(exist_ok=True)
    library.store_of_copies()
    if prepared.uses_library:
        library.link(folder)
    prepared.code.write(folder)
    for note in prepared.code.notes:
        print(note)
    if prepared.call is not None:
        function_job.write(folder, prepared.call, prepared.code.path(folder))
    write_text(folder / records.SCRIPT, script.text())
    allocation = script.allocation
    records.write(
        folder,
        records.Record(
            digest=prepared.digest,
            name=script.name.removesuffix(f"-{prepared.digest[: records.SHORT]}"),
            site=allocation.site.name,
            scheduler=allocation.site.scheduler,
            gpus=allocation.ranks if allocation.gpus_per_node else 0,
            settings=tuple(
                {key: _plain(value) for key, value in settings.items()} for settings in prepared.settings
            ),
            outs=tuple(
                str(_out(script, element, folder, number)) for number, element in enumerate(script.elements)
            ),
            submitted=datetime.now(UTC).isoformat(timespec="microseconds"),
            card=prepared.card,
            ranks_per_node=allocation.ranks_per_node,
        ),
    )


def _out(script: JobScript, element: tuple[str, ...], folder: Path, number: int) -> Path:
    """Return the folder of an element's metrics: the value of ``--out``, or the element's folder."""
    words = script.arguments + element
    named_out = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--out"]
    named_out += [word.removeprefix("--out=") for word in words if word.startswith("--out=")]
    return Path.cwd() / named_out[-1] if named_out else folder / "out" / str(number)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
