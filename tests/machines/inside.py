"""Runs inside a machine: start a server as a user does, query it, stop it.

    python3 inside.py COMMAND [ARGUMENT]...          the command prints the URL of a Jupyter server
    python3 inside.py --hub COMMAND [ARGUMENT]...    the command is the single-user server of a simulated
                                                     JupyterHub

Exit status 0: the server answered, and Ctrl-C ended it. Otherwise the status of the command, or 1 with one
line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VERSION = "6.1.1"  # of the simulated Hub
START_LIMIT, STOP_LIMIT = 400.0, 20.0  # seconds; the first includes the whole set-up
URL = re.compile(r"(http://127\.0\.0\.1:\d+)(/\S*?)(?:lab|tree)?\?token=(\w+)")


def main() -> int:
    # A shell without job control starts commands with SIGINT ignored, and the server would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] == "--hub":
        return single_user(sys.argv[2:])
    command = sys.argv[1:]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
    lines: list[str] = []
    found = threading.Event()
    reader = threading.Thread(target=read, args=(server, lines, found), daemon=True)
    reader.start()
    if not found.wait(START_LIMIT):
        stop(server)
        return fail(f"no URL within {START_LIMIT:.0f} s")
    reader.join(0.1 if server.poll() is None else None)
    match = next((match for line in lines if (match := URL.search(line))), None)
    if match is None:
        return server.wait() or fail("it ended without printing the URL of a server")
    origin, base, token = match.groups()
    for path in (f"{base}api/status", f"{base}lab"):
        with urllib.request.urlopen(f"{origin}{path}?token={token}", timeout=60) as answer:
            print(f"inside: {path} answers {answer.status}", flush=True)
    if not stop(server):
        return fail(f"Ctrl-C did not end it within {STOP_LIMIT:.0f} s")
    return 0


class Hub(BaseHTTPRequestHandler):
    """Answers a single-user server's requests to its Hub: the version, the owner of a token, activity."""

    def do_GET(self) -> None:
        owner = {
            "kind": "user",
            "name": "student",
            "admin": False,
            "groups": [],
            "scopes": ["access:servers!server=student/"],
        }
        self.reply(owner if self.path.startswith("/hub/api/user") else {"version": VERSION})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.reply({})

    def reply(self, what: dict[str, object]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-JupyterHub-Version", VERSION)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        print(f"hub: {format % arguments}", file=sys.stderr, flush=True)


def single_user(command: list[str]) -> int:
    """Start a single-user server as a spawner does.

    Request its page with a user's token and without a token.
    """
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    url = "http://127.0.0.1:8889/user/student/"
    given = {
        "API_URL": f"http://127.0.0.1:{hub.server_port}/hub/api",
        "API_TOKEN": "of-the-server",
        "BASE_URL": "/",
        "USER": "student",
    }
    given |= {
        "CLIENT_ID": "jupyterhub-user-student",
        "SERVICE_PREFIX": "/user/student/",
        "SERVICE_URL": url,
        "HOST": "",
    }
    given |= {
        "OAUTH_CALLBACK_URL": "/user/student/oauth_callback",
        "SERVER_NAME": "",
        "ACTIVITY_URL": f"http://127.0.0.1:{hub.server_port}/x",
    }
    given |= {
        "OAUTH_ACCESS_SCOPES": '["access:servers!server=student/"]',
        "OAUTH_SCOPES": '["access:servers!server=student/"]',
    }
    environment = {**os.environ, **{f"JUPYTERHUB_{name}": value for name, value in given.items()}}
    server = subprocess.Popen(command, env=environment, process_group=0)
    deadline = time.monotonic() + START_LIMIT
    while not answers(f"{url}api"):
        if server.poll() is not None:
            return server.returncode or fail("it ended at once")
        if time.monotonic() > deadline:
            stop(server)
            return fail(f"no answer within {START_LIMIT:.0f} s")
        time.sleep(0.5)
    stranger = answers(f"{url}lab")
    owner = answers(f"{url}lab", {"Authorization": "token of-the-user"})
    print(f"inside: {url}lab answers {owner} to its user and {stranger} to a stranger", flush=True)
    if not stop(server):
        return fail(f"Ctrl-C did not end it within {STOP_LIMIT:.0f} s")
    return 0 if owner == 200 and stranger in (302, 403) else 1


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object) -> None:
        return None


def answers(url: str, headers: dict[str, str] | None = None) -> int:
    """Return the HTTP status of the answer; 0 if there is none."""
    try:
        opener = urllib.request.build_opener(NoRedirect)
        with opener.open(urllib.request.Request(url, headers=headers or {}), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def read(server: subprocess.Popen[bytes], lines: list[str], found: threading.Event) -> None:
    assert server.stdout is not None
    for raw in server.stdout:
        line = raw.decode("utf-8", "replace")
        lines.append(line)
        sys.stderr.buffer.write(raw)
        sys.stderr.flush()
        if URL.search(line):
            found.set()
    found.set()


def stop(server: subprocess.Popen[bytes]) -> bool:
    """Press Ctrl-C, repeatedly as a user does: in a terminal Jupyter asks for a second one.

    Return whether it ended.
    """
    deadline = time.monotonic() + STOP_LIMIT
    while server.poll() is None and time.monotonic() < deadline:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            continue
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        return False
    return True


def fail(reason: str) -> int:
    print(f"inside: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
