"""An HTTP proxy for a machine without another network connection; it counts the hosts that it connects to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter


class Proxy:
    """Answers CONNECT requests on listening sockets that were made inside the machine's network namespace.

    ``channel`` is the end of a socket pair for the machine; ``hosts`` counts the connections, host → number.
    """

    PORT = 3128

    def __init__(self) -> None:
        self.hosts: Counter[str] = Counter()
        self._own, self.channel = socket.socketpair()
        self._listener: socket.socket | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Close all sockets."""
        for each in (self._own, self.channel, self._listener):
            if each is not None:
                each.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed, because the machine has ended
            _, descriptors, _, _ = socket.recv_fds(self._own, 16, 1)
            if not descriptors:
                return
            self._listener = socket.socket(fileno=descriptors[0])
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            request = b""
            while b"\r\n\r\n" not in request:
                part = client.recv(65536)
                if not part:
                    return
                request += part
            method, target, _ = request.split(b"\r\n", 1)[0].decode().split(" ", 2)
            if method != "CONNECT":
                client.sendall(b"HTTP/1.1 405 Only CONNECT\r\nContent-Length: 0\r\n\r\n")
                return
            host, port = target.rsplit(":", 1)
            self.hosts[host] += 1
            with socket.create_connection((host, int(port)), timeout=60) as server:
                server.settimeout(None)
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(part)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
