"""A small Moodle for LTI 1.3: a page with the Hub in a frame, the login of OpenID, and its keys, by TLS."""

from __future__ import annotations

import base64
import contextlib
import html
import json
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CLIENT = "AbCdEf123456789"
CLAIMS = "https://purl.imsglobal.org/spec/lti/claim/"


class SmallMoodle:
    """The server.

    Attributes:
        custom: the custom parameters of the tool, as Moodle fills them in.
    """

    def __init__(self, certificate: Path, key: Path, issuer: str, hub: str) -> None:
        self.key, self.issuer, self.hub = key, issuer, hub
        self.custom: dict[str, str] = {}
        moodle = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                moodle.answer(self, urllib.parse.urlsplit(self.path))

            def log_message(self, *words: object) -> None:
                pass  # the tests show what the Hub says

        port = urllib.parse.urlsplit(issuer).port
        self.server = ThreadingHTTPServer(("127.0.0.1", port or 443), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)

    def answer(self, request: BaseHTTPRequestHandler, url: urllib.parse.SplitResult) -> None:
        """Answer a request of the browser, or of the Hub for the keys."""
        if url.path == "/course":
            source = html.escape(self.launch_url)
            body = f'<h1>Moodle</h1><iframe width=1300 height=760 src="{source}"></iframe>'
        elif url.path == "/auth.php":
            asked = dict(urllib.parse.parse_qsl(url.query))
            fields = {"id_token": self.token(asked["nonce"]), "state": asked["state"]}
            inputs = "".join(
                f'<input type=hidden name="{name}" value="{html.escape(value)}">'
                for name, value in fields.items()
            )
            action = html.escape(asked["redirect_uri"])
            body = f'<form method=post action="{action}">{inputs}</form>'
            body += "<script>document.forms[0].submit()</script>"
        elif url.path == "/certs.php":
            body = json.dumps({"keys": [self.public_key()]})
        else:
            request.send_error(404)
            return
        data = body.encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json" if url.path == "/certs.php" else "text/html")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @property
    def launch_url(self) -> str:
        """The page of the Hub at which a launch begins."""
        launch = {
            "iss": self.issuer,
            "login_hint": "3",
            "client_id": CLIENT,
            "target_link_uri": f"{self.hub}/hub/",
        }
        return f"{self.hub}/hub/lti13/oauth_login?{urllib.parse.urlencode(launch)}"

    def public_key(self) -> dict[str, str]:
        """The key in the form of JSON Web Keys (RFC 7517)."""
        said = subprocess.run(
            ["openssl", "rsa", "-in", str(self.key), "-noout", "-modulus"], capture_output=True, check=True
        ).stdout
        modulus = bytes.fromhex(said.decode().strip().partition("=")[2])
        return {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": "1", "e": "AQAB", "n": _coded(modulus)}

    def token(self, nonce: str) -> str:
        """The claims of a launch, signed (RFC 7519)."""
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": self.issuer, "aud": CLIENT, "sub": "3", "nonce": nonce, "iat": now, "exp": now + 60,
            "email": "ada@example.org", "given_name": "Ada", "name": "Ada Lovelace",
            f"{CLAIMS}message_type": "LtiResourceLinkRequest", f"{CLAIMS}version": "1.3.0",
            f"{CLAIMS}deployment_id": "1", f"{CLAIMS}target_link_uri": f"{self.hub}/hub/",
            f"{CLAIMS}resource_link": {"id": "1"}, f"{CLAIMS}roles": [],
        }  # fmt: skip
        if self.custom:
            claims[f"{CLAIMS}custom"] = self.custom
        parts = [{"alg": "RS256", "typ": "JWT", "kid": "1"}, claims]
        signed = ".".join(_coded(json.dumps(part).encode()) for part in parts)
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(self.key)],
            input=signed.encode(),
            capture_output=True,
            check=True,
        ).stdout
        return f"{signed}.{_coded(signature)}"


def _coded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@contextlib.contextmanager
def small_moodle(certificate: Path, key: Path, issuer: str, hub: str) -> Iterator[SmallMoodle]:
    """A running Moodle.

    Args:
        issuer, hub: URLs as the browser reaches them.
    """
    moodle = SmallMoodle(certificate, key, issuer, hub)
    thread = threading.Thread(target=moodle.server.serve_forever)
    thread.start()
    try:
        yield moodle
    finally:
        moodle.server.shutdown()
        thread.join()
        moodle.server.server_close()
