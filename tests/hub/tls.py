"""nginx with ``deploy/hub/nginx.conf`` in front of a Hub, with a certificate made for the test."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.hub.guide import README

SITE = README.with_name("nginx.conf")
NAME = "hub.example.org"  # in the file
LIVE = f"/etc/letsencrypt/live/{NAME}"


def certificate(folder: Path, *names: str) -> tuple[Path, Path]:
    """Make a certificate for some names, signed by itself; return its file and that of the key."""
    made, key = folder / "certificate.pem", folder / "key.pem"
    alternatives = ",".join(f"DNS:{name}" for name in names)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(made)]
    command += ["-subj", f"/CN={names[0]}", "-addext", f"subjectAltName={alternatives}"]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


def nginx_command(folder: Path, name: str, ports: Sequence[int], upstream: str) -> list[str]:
    """Return the command of nginx with the shipped site: only names, ports and certificate differ.

    Args:
        ports: for http and https.
        upstream: the URL of the Hub's proxy.
    """
    made, key = certificate(folder, name)
    site = SITE.read_text(encoding="utf-8")
    for old, new in (
        (f"{LIVE}/fullchain.pem", str(made)),
        (f"{LIVE}/privkey.pem", str(key)),
        ("listen 80;", f"listen 127.0.0.1:{ports[0]};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{ports[1]} ssl;"),
        ("proxy_pass http://127.0.0.1:8000;", f"proxy_pass {upstream};"),
    ):
        assert site.count(old) == 1, old
        site = site.replace(old, new)
    (folder / "site.conf").write_text(site.replace(f"server_name {NAME}", f"server_name {name}"))
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = folder / "nginx.conf"
    main.write_text(
        f"pid {folder}/nginx.pid;\nuser root;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{places}include {folder}/site.conf;\n}}\n"
    )
    return ["nginx", "-c", str(main), "-p", str(folder), "-e", str(folder / "error.log")]
