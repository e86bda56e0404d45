"""TensorBoard inside a notebook, served by the notebook's own kernel: it ends when the kernel ends, and leaves no process behind.

``%tensorboard --logdir FOLDER`` shows the same page, from a process of its own that lives on. Behind a hub, where a browser does not reach
the kernel's ports, ``$TENSORBOARD_PROXY_URL`` says the way, with ``%PORT%`` for the port, as TensorBoard's own extension reads it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from dlo_lib.errors import UserError


@dataclass(frozen=True)
class Board:
    """A page that is being served: a notebook shows it, ``url`` opens it elsewhere on this machine."""

    url: str
    height: int

    def _repr_html_(self) -> str:
        port = urlparse(self.url).port
        proxy = os.environ.get("TENSORBOARD_PROXY_URL", "").replace("%PORT%", str(port))
        # The host as the browser knows it: the notebook may be open on another machine than the kernel's.
        where = json.dumps(proxy) if proxy else f'location.protocol + "//" + location.hostname + ":{port}/"'
        frame = f"tensorboard-{port}"
        return (
            f'<iframe id="{frame}" width="100%" height="{self.height}" frameborder="0"></iframe>'
            f'<script>document.getElementById("{frame}").src = {where};</script>'
        )


def serve_board(folder: str | Path, *, height: int = 600) -> Board:
    """TensorBoard on the runs below ``folder``, on a free port of this machine, read anew every few seconds.

    Also tells ``%tensorboard`` where its program is, which it does not find by itself when a kernel runs in an environment that is not
    activated (``$TENSORBOARD_BINARY``).

    Raises:
        UserError: the package tensorboard is missing.
    """
    try:
        from tensorboard import program
    except ImportError as error:
        raise UserError("the dashboard needs the package tensorboard: pip install tensorboard") from error
    binary = Path(sys.executable).with_name("tensorboard")
    if binary.exists():
        os.environ.setdefault("TENSORBOARD_BINARY", str(binary))
    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(folder), "--port", "0", "--reload_interval", "5", "--load_fast", "false"])
    return Board(board.launch(), height)
