"""pip's settings on this machine (configuration files and environment), in a form for another machine."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

# A site's certificates and proxies, as common programs read them.
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
INDEXES = ("TORCH_INDEX", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL")
FILES = "/run/handed-over"
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class PipSettings:
    """Environment variables to set, and the files and folders that they name: (here, there, "ro")."""

    environment: dict[str, str]
    binds: list[tuple[str, str, str]]


def pip_settings() -> PipSettings:
    """Read pip's configuration; without pip on this machine, use the environment only."""
    pip = next(
        (
            command
            for command in ([sys.executable, "-m", "pip"], [shutil.which("pip3") or "pip"])
            if answers(command)
        ),
        None,
    )
    listed = (
        subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
        if pip
        else ""
    )
    environment = variables(listed)
    environment |= {
        name: os.environ[name] for name in (*CERTIFICATES, *INDEXES, *PROXIES) if os.environ.get(name)
    }
    return handed_over(environment)


def answers(command: list[str]) -> bool:
    try:
        return subprocess.run([*command, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def variables(listed: str) -> dict[str, str]:
    """Return the output of `pip config list` as PIP_ variables, in pip's order of precedence.

    The environment overrides a command's section, which overrides the global section.

    >>> variables("global.index-url='https://host/simple'")
    {'PIP_INDEX_URL': 'https://host/simple'}
    """
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            owner, _, option = name.strip().rpartition(".")
            if owner == section and value:
                found["PIP_" + option.upper().replace("-", "_")] = " ".join(
                    str(ast.literal_eval(value.strip())).split()
                )
    return found


def handed_over(environment: Mapping[str, str]) -> PipSettings:
    """Return the settings with the files and folders that they name, directly or as a file:// URL.

    Folders have the same path there; of nested ones the outermost is bound. Files, such as a site's
    certificates, are bound into a separate folder, because the other machine's packages may write to their
    original folder.
    """
    folders: set[Path] = set()
    files: dict[str, str] = {}
    for value in environment.values():
        for word in value.split():
            path = Path(unquote(urlsplit(word).path)) if word.startswith("file:") else Path(word)
            if path.is_absolute() and path.is_dir():
                # For the root of an index, `.../simple`, bind its parent, which holds the index's files too.
                folders.add(path.parent if path.name == "simple" else path)
            elif path.is_absolute() and path.is_file() and str(path) == word:
                files[word] = f"{FILES}/{path.name}"
    outermost = sorted(path for path in folders if not folders & set(path.parents))
    binds = [(str(path), str(path), "ro") for path in outermost] + [
        (here, there, "ro") for here, there in sorted(files.items())
    ]
    return PipSettings(
        {
            name: " ".join(files.get(word, word) for word in value.split())
            for name, value in environment.items()
        },
        binds,
    )
