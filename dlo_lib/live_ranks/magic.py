"""The magics of a notebook: ``%%ranks 4`` runs a cell on four ranks, ``%%rank 2`` on one of them.

%%ranks             on the ranks that run
%%ranks 4           on four ranks, which are started first if needed
%%ranks 4 --tabs    with one tab for each rank
%%ranks --stacked   with a section for each rank, also where all say the same
%%ranks 4 --gpus    each rank on a separate GPU; without it, only if there are enough
%%ranks 4 --cpu     on the CPU, also where there are GPUs
%%ranks --job 1234  on a rank for each GPU of a running job of SLURM; with a number, on that number of ranks
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.live_ranks.devices import Devices
from dlo_lib.live_ranks.handle import Ranks
from dlo_lib.live_ranks.messages import RankCell
from dlo_lib.live_ranks.transcript import Transcript
from dlo_lib.live_ranks.view import bundle, sections

NAME = "ranks"
_UPDATE_S = 0.3  # between two views of a cell that runs
_DEVICES = {"--gpus": Devices.GPU, "--cpu": Devices.CPU}
_JOB = re.compile(r"(?<!\S)--job[ =](\S+)")
_USAGE = "%%ranks 4, with --tabs, --stacked, --gpus, --cpu or --job 1234"
_loaded: dict[int, LiveMagics] = {}


class Interrupted(KeyboardInterrupt):
    """The cell was interrupted, and the ranks are usable."""

    def _render_traceback_(self) -> list[str]:
        return [tr("KeyboardInterrupt: the cell was stopped on all ranks, which can be used again.")]


@dataclass(frozen=True)
class MagicOptions:
    """The line of a magic."""

    number: int | None = None
    tabs: bool = False
    merge: bool = True
    devices: Devices = Devices.ANY
    job: str | None = None


def parse(magic: str, line: str) -> MagicOptions:
    """Return the options of a line.

    >>> parse("ranks", "4 --tabs")
    MagicOptions(number=4, tabs=True, merge=True, devices=<Devices.ANY: 'any'>, job=None)
    >>> parse("ranks", "--job 1234").job
    '1234'

    Raises:
        UserError: the line has something else.
    """
    rest, jobs = _JOB.subn("", line) if magic == "ranks" else (line, 0)
    job = _JOB.search(line)
    words = rest.split()
    flags = {word for word in words if word.startswith("-")}
    numbers = [word for word in words if word not in flags]
    known = {"--tabs", "--stacked", *_DEVICES} if magic == "ranks" else set()
    number_needed = magic == "rank" or bool(flags & set(_DEVICES) and not jobs)
    wrong = (
        flags - known
        or len(numbers) > 1
        or jobs > 1
        or set(_DEVICES) <= flags
        or (number_needed and not numbers)
        or not all(word.isdecimal() for word in numbers)
    )
    if wrong:
        usage = _USAGE if magic == "ranks" else "%%rank 2"
        raise UserError(f'"%%{magic} {line}" is not understood: write {usage}')
    return MagicOptions(
        int(numbers[0]) if numbers else None,
        "--tabs" in flags,
        "--stacked" not in flags,
        next((_DEVICES[flag] for flag in flags if flag in _DEVICES), Devices.ANY),
        job[1] if jobs and job is not None else None,
    )


@magics_class
class LiveMagics(Magics):
    """The magics, with the ranks of the notebook."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self.ranks = Ranks(shell.user_ns)

        @context_matcher(identifier="dlo_lib.live_ranks")
        def matcher(context: CompletionContext) -> SimpleMatcherResult:  # a method takes no attributes
            return self._complete(context)

        self.matcher = matcher

    @cell_magic("ranks")  # type: ignore[arg-type]
    def run_on_all(self, line: str, cell: str) -> None:
        """Run the cell on all ranks: `%%ranks 4`. The variables of the ranks stay."""
        options = self._options("ranks", line)
        try:
            if options.number is not None or options.job is not None:
                self.ranks.start(options.number, options.job, options.devices)
            else:
                self.ranks.come_back()
            self._run(f"%%ranks {line}".rstrip(), cell, None, options)
        except UserError as error:
            raise UsageError(str(error)) from None

    @cell_magic("rank")  # type: ignore[arg-type]
    def run_on_one(self, line: str, cell: str) -> None:
        """Run the cell on one rank: `%%rank 2`."""
        options = self._options("rank", line)
        try:
            self._run(f"%%rank {line}".rstrip(), cell, options.number, options)
        except UserError as error:
            raise UsageError(str(error)) from None

    def _options(self, magic: str, line: str) -> MagicOptions:
        try:
            return parse(magic, line)
        except UserError as error:
            raise UsageError(str(error)) from None

    def _run(self, magic: str, code: str, rank: int | None, options: MagicOptions) -> None:
        view = _View(options, live=hasattr(self._shell, "kernel"))
        reply = transcripts = None
        try:
            reply, transcripts = self.ranks.run(self._cell(magic, code), rank, view.progress)
        finally:
            notes = [*self.ranks.take_notes(), *(reply.notes if reply is not None else ())]
            view.finish(transcripts or [], notes)
        if reply.interrupted:
            raise Interrupted
        if reply.failure is not None:
            raise reply.failure

    def _cell(self, magic: str, code: str) -> RankCell:
        source = f"{magic}\n{code}"
        shell = self._shell
        # execution_count is that of the next cell, or of this one, depending on the version of IPython.
        assert shell.history_manager is not None
        number = len(shell.history_manager.input_hist_raw) - 1
        file = shell.compile.cache(source, number, raw_code=source)
        # The first line keeps the numbers of the lines. A magic of the whole cell must come first.
        numbered = code if code.startswith("%%") else f"#{magic}\n{code}"
        return RankCell(numbered, source, file)

    def _complete(self, context: CompletionContext) -> SimpleMatcherResult:
        """Complete a name of a cell that runs on ranks, there."""
        first, _, rest = context.full_text.partition("\n")
        words = first.split()
        if not rest or not words or words[0] not in ("%%ranks", "%%rank"):
            return {"completions": []}
        before = context.full_text.split("\n")[: context.cursor_line]
        cursor = sum(len(line) + 1 for line in before) + context.cursor_position
        text, at = f"#{first[1:]}\n{rest}", cursor  # as long as before
        rank = int(words[1]) if words[0] == "%%rank" and words[1:] and words[1].isdecimal() else 0
        found = self.ranks.complete(text, at, rank)
        begin = min((start for start, *_ in found), default=at)
        return {
            "completions": [
                SimpleCompletion(text=word, type=kind) for start, _, word, kind in found if start == begin
            ],
            "matched_fragment": context.full_text[begin:cursor],
            "suppress": True,
        }


class _View:
    """The output of the cell in the notebook, which is updated while the ranks work."""

    def __init__(self, options: MagicOptions, live: bool) -> None:
        self._options = options
        self._live = live  # a terminal cannot change what it has shown
        self._handle: Any = None
        self._shown_at = time.monotonic()

    def progress(self, transcripts: Sequence[Transcript]) -> None:
        """Show what has arrived, a few times a second."""
        now = time.monotonic()
        if not self._live or now - self._shown_at < _UPDATE_S or not any(one.changed for one in transcripts):
            return
        self._shown_at = now
        for one in transcripts:
            one.changed = False
        self._show(transcripts, [], merge=False)

    def finish(self, transcripts: Sequence[Transcript], notes: Sequence[str]) -> None:
        """Show the whole output."""
        self._show(transcripts, notes, merge=self._options.merge)

    def _show(self, transcripts: Sequence[Transcript], notes: Sequence[str], merge: bool) -> None:
        found = sections(transcripts, merge)
        if not found and not notes and self._handle is None:
            return
        data = bundle(found, notes, self._options.tabs)
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def load(shell: InteractiveShell) -> None:
    """Add the magics, the completion and the object ``ranks`` to a shell."""
    magics = LiveMagics(shell)
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(magics.matcher)
    shell.push({NAME: magics.ranks}, interactive=False)
    _loaded[id(shell)] = magics


def unload(shell: InteractiveShell) -> None:
    """End the ranks, and remove what ``load`` added."""
    magics = _loaded.pop(id(shell))
    magics.ranks.stop()
    shell.Completer.custom_matchers.remove(magics.matcher)
    for name in ("ranks", "rank"):
        shell.magics_manager.magics["cell"].pop(name, None)
    if shell.user_ns.get(NAME) is magics.ranks:
        shell.drop_by_id({NAME: magics.ranks})
