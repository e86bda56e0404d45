"""TensorBoard in a notebook. The kernel serves it, so the server ends with the kernel.

``%tensorboard --logdir FOLDER`` shows the same page from a separate process, which survives the kernel.
Behind a hub, where a browser cannot reach the ports of the kernel, ``$TENSORBOARD_PROXY_URL`` gives the URL,
with ``%PORT%`` for the port, as for the extension of TensorBoard."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from dlo_lib.base.errors import UserError


@dataclass(frozen=True)
class TensorBoardView:
    """A served page. A notebook displays it; ``url`` opens it in another program on this machine."""

    url: str
    height: int

    def _repr_html_(self) -> str:
        port = urlparse(self.url).port
        proxy = os.environ.get("TENSORBOARD_PROXY_URL", "").replace("%PORT%", str(port))
        # The host name of the browser, because the notebook may be open on another machine than the kernel.
        where = json.dumps(proxy) if proxy else f'location.protocol + "//" + location.hostname + ":{port}/"'
        frame = f"tensorboard-{port}"
        return (
            f'<iframe id="{frame}" width="100%" height="{self.height}" frameborder="0"></iframe>'
            f'<script>document.getElementById("{frame}").src = {where};</script>'
        )


def serve_board(folder: str | Path, *, height: int = 600) -> TensorBoardView:
    """Serve TensorBoard for the runs below ``folder`` on a free port of this machine; it reloads every few
    seconds.

    This also sets ``$TENSORBOARD_BINARY``, because ``%tensorboard`` does not find its program if the
    environment of the kernel is not activated.

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
    board.configure(
        argv=[None, "--logdir", str(folder), "--port", "0", "--reload_interval", "5", "--load_fast", "false"]
    )
    return TensorBoardView(board.launch(), height)
