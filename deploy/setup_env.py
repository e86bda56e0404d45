#!/usr/bin/env python3
"""Create the project's Python environment in .venv, or do nothing if it is up to date.

The Makefile calls this file. It runs on Python 3.6 or newer without any package, and asks no questions. These
variables override its choices:

    TORCH         auto, cpu, cuda, here, or a build that uv knows (cu128, rocm6.4, ...). The default, auto,
                  selects PyTorch's CPU build, or with a GPU the CUDA build for its driver. "here" builds
                  .venv on the PyTorch that the Python in use already has: a cluster's module, a conda
                  environment, a Hub's image. That PyTorch is not changed, and no other one is downloaded.
    TORCH_INDEX   URL of a package index that holds the required build of PyTorch
    PYTHON        the interpreter to build on; the default is the one of .venv, or the first supported one

uv resolves and installs the packages, with the indexes that pip is configured for; pip does if uv is not
available. If PyTorch's index cannot be reached, the build in pip's indexes is installed. The size is printed
before the download. Files that were downloaded before an interruption are kept.

Exit status 0: .venv is ready. 2: a requirement is missing, and one line gives the cure.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".made-from"
SUPPORTED = {(3, 11), (3, 12), (3, 13), (3, 14)}
SUPPORTED_PYTHONS = "Python {}.{} to {}.{}".format(*min(SUPPORTED), *max(SUPPORTED))
SUPPORTED_RANGE = ">={}.{},<{}.{}".format(*min(SUPPORTED), max(SUPPORTED)[0], max(SUPPORTED)[1] + 1)
OLDEST_TORCH = (2, 8)
EXTRAS = ("labs", "labs,dev")
LEAST_GB = 0.8  # size of an environment whose packages are all in uv's cache
UNPACKED = 2.7  # disk space of an environment and of uv's cache, divided by the bytes downloaded
LOADED = (
    "torch.distributed",
    "torch._dynamo",
    "nbgrader.apps",
    "ipykernel.kernelapp",
    "jupyterlab.labapp",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "optuna",
    "rich.table",
)
# Run by the Python of .venv, whose pip contains packaging: each pin that the metadata of PyTorch contradicts,
# with the requirement.
CONTRADICTED = """
import importlib.metadata, re, sys
from pip._vendor.packaging.requirements import Requirement
wanted = {}
try:
    needs = importlib.metadata.requires("torch") or []
except importlib.metadata.PackageNotFoundError:  # built here, without an installer
    needs = []
for text in needs:
    need = Requirement(text)
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        wanted[re.sub("[-_.]+", "-", need.name).lower()] = need
for pin in open(sys.argv[1], encoding="utf-8").read().splitlines():
    name, _, version = pin.partition("==")
    need = wanted.get(re.sub("[-_.]+", "-", name).lower())
    if version and need is not None and not need.specifier.contains(version):
        print(pin, need.name + str(need.specifier))
"""
PIP_DOWNLOAD_GB = {"cpu": 0.5, "cuda": 3.5}  # pip reports no sizes; measured with torch 2.13 on Linux x86-64


class SetupError(Exception):
    """A missing requirement and its cure, in one line."""


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--extras", choices=EXTRAS, default="labs", help="what to install in addition to the library"
    )
    extras = parser.parse_args().extras
    try:
        require_linux()
        require_readable_name()
        if not is_ready(extras):
            with one_at_a_time():
                if not is_ready(extras):  # another call may have built it in the meantime
                    build(extras)
    except SetupError as error:
        print("setup: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup: interrupted; what was downloaded is kept for the next call", file=sys.stderr)
        return 130
    return 0


def require_linux() -> None:
    """Raise an error on systems other than Linux."""
    if platform.system() != "Linux":
        raise SetupError(
            f"the labs run on Linux, and this is {platform.system()}: "
            "open this folder in its container with Docker Desktop, VS Code or "
            'Codespaces, or use WSL2 (docs/install.md, "On macOS and Windows")'
        )


def require_readable_name() -> None:
    """Raise an error if the locale cannot decode the name of this folder."""
    # A name that the locale cannot decode has surrogates; Python's venv and pip fail on them.
    if any("\udc80" <= character <= "\udcff" for character in str(ROOT)):
        name = os.fsencode(str(ROOT)).decode("utf-8", "replace").encode("ascii", "backslashreplace").decode()
        raise SetupError(
            f"the locale of this shell cannot read the name of the folder {name}: export LC_ALL=C.UTF-8"
        )


def build(extras: str) -> None:
    """Create or update .venv."""
    started = time.time()
    choice = torch_choice()
    require_space(LEAST_GB)
    python = make_venv(choice)
    uv = find_uv()
    if uv is not None:
        install_with_uv(uv, extras, choice)
    else:
        install_with_pip(extras, choice)
    if choice == "here":
        load_modules_on_activation()
    else:
        write_bytecode()
    STAMP.write_text(
        json.dumps({"torch": choice, "python": python, "made from": fingerprint(extras, choice)}),
        encoding="utf-8",
    )
    print(f"setup: ready in {VENV}, after {time.time() - started:.0f} s", flush=True)


# The existing environment and the requested one


def is_ready(extras: str) -> bool:
    """Whether .venv has ``extras`` already; the developers' environment contains the students' one."""
    stamp, choice = read_stamp(), torch_choice()
    asked = os.environ.get("PYTHON")
    if asked and (
        version_of(asked) != version_of(PYTHON)
        or (choice == "here" and shutil.which(asked) != stamp.get("python"))
    ):
        return False
    return stamp.get("torch") == choice and stamp.get("made from") in {
        fingerprint(extras, choice),
        fingerprint("labs,dev", choice),
    }


def read_stamp() -> dict:
    """Return what .venv was created from; empty if there is no valid .venv."""
    try:
        return dict(json.loads(STAMP.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def torch_choice() -> str:
    """Return the value of TORCH; without it, the choice that .venv was created with."""
    choice = os.environ.get("TORCH") or str(read_stamp().get("torch", "auto"))
    if not re.match(r"(auto|cpu|cuda|here|xpu|cu\d+|rocm[\d.]+)$", choice):
        raise SetupError(f'TORCH is "{choice}": use auto, cpu, cuda, here, or a build such as cu128')
    return choice


def fingerprint(extras: str, choice: str) -> str:
    """Return a hash of what determines the environment; .venv is updated in place when it changes."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    parts += [str(ROOT).encode("utf-8", "surrogateescape"), choice.encode()]
    return extras + " " + hashlib.sha256(b"|".join(parts)).hexdigest()


class one_at_a_time:
    """Lets only one call build the environment at a time; a second call waits."""

    def __enter__(self) -> None:
        import fcntl  # not on Windows

        try:
            self.lock = open(ROOT / ".setup.lock", "w")
        except OSError as error:
            raise SetupError(
                f"cannot write to {ROOT} ({error.strerror}): clone into a folder of yours with space"
            ) from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another call is setting up here; waiting for it", flush=True)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            print("setup: this file system has no locks: start one set-up at a time", flush=True)

    def __exit__(self, *exception: object) -> None:
        self.lock.close()


# The Python interpreter


def make_venv(choice: str) -> str:
    """Create .venv, or keep one of the right Python and kind; return the interpreter that it is built on."""
    python = find_python()
    before = read_stamp()
    here = choice == "here"
    folder = torch_folder(python) if here and python else ""
    STAMP.unlink() if STAMP.exists() else None
    if python is None:
        make_venv_with_a_python_of_uv()
        return str(PYTHON.resolve())
    if (
        version_of(PYTHON) == version_of(python)
        and (before.get("torch") == "here") == here
        and (not here or before.get("python") == python)
    ):
        return python
    remove_venv()
    done = run([python, "-m", "venv", *(["--system-site-packages"] if here else []), str(VENV)])
    if done.returncode:
        remove_venv()
        if "ensurepip" in done.stdout + done.stderr:
            version = "python{}.{}".format(*version_of(python) or (3, 11))
            raise SetupError(f"{python} has no venv module: apt-get install {version}-venv")
        raise SetupError(
            f"{python} cannot make an environment ({last_line(done)}): check the disk, or set PYTHON"
        )
    if here and run([str(PYTHON), "-c", "import torch"]).returncode:
        # "python" belongs to a virtual environment, whose packages are not the system's packages.
        (site,) = VENV.glob("lib/python3.*/site-packages")
        (site / "torch-of-this-machine.pth").write_text(folder + "\n", encoding="utf-8")
    return python


def find_python() -> "str | None":
    """Return the interpreter to build on; None if no supported one is found.

    Raises:
        SetupError: PYTHON names an unsupported interpreter.
    """
    asked, before = os.environ.get("PYTHON"), str(read_stamp().get("python", ""))
    if (
        not asked
        and os.environ.get("TORCH") != "here"
        and version_of(PYTHON) in SUPPORTED
        and version_of(before) == version_of(PYTHON)
    ):
        return before
    newest_first = ["python{}.{}".format(*version) for version in sorted(SUPPORTED, reverse=True)]
    names = [asked] if asked else ["python3", *newest_first, "/usr/bin/python3"]
    for name in names:
        path = shutil.which(name)
        if path and version_of(path) in SUPPORTED:
            return path
    if asked:
        version = version_of(asked)
        what = "{}.{}".format(*version) if version else "no Python"
        raise SetupError(f"PYTHON={asked} is {what}: use {SUPPORTED_PYTHONS}")
    return None


def make_venv_with_a_python_of_uv() -> None:
    """Create .venv with a Python from uv, if no supported one is installed (Ubuntu 22.04 has 3.10)."""
    print(f"setup: {SUPPORTED_PYTHONS} is needed; uv looks for one", flush=True)
    remove_venv()
    helper = ROOT / ".venv-uv"
    try:
        if run([sys.executable, "-m", "venv", str(helper)]).returncode:
            raise SetupError(
                f"needs {SUPPORTED_PYTHONS} with its venv module: "
                "install python3 and python3-venv, or set PYTHON"
            )
        run(
            [
                str(helper / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "uv",
            ]
        )
        done = run(
            [str(helper / "bin" / "uv"), "venv", "--quiet", "--seed", "--python", SUPPORTED_RANGE, str(VENV)],
            uv_settings(),
        )
        if done.returncode:
            raise SetupError(
                f"needs {SUPPORTED_PYTHONS}, and uv cannot install one ({last_line(done)}): "
                "install one, or set PYTHON"
            )
    finally:
        shutil.rmtree(str(helper), ignore_errors=True)


def version_of(python: "str | Path") -> "tuple | None":
    """Return (major, minor) of an interpreter; None if it does not run."""
    try:
        done = run([str(python), "-c", "import sys; print(*sys.version_info[:2])"], timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else tuple(int(part) for part in done.stdout.split())


def torch_folder(python: str) -> str:
    """Return the folder of packages that contains the PyTorch of ``python``.

    Raises:
        SetupError: there is no PyTorch, or it is too old.
    """
    done = run([python, "-c", "import torch; print(torch.__version__, torch.__path__[0])"])
    if done.returncode:
        raise SetupError(
            f"TORCH=here, and {python} has no PyTorch ({last_line(done)}): "
            "load its module or activate its environment first"
        )
    version, _, path = done.stdout.strip().partition(" ")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        raise SetupError(
            f"TORCH=here, and {python} has PyTorch {version}: use {'.'.join(map(str, OLDEST_TORCH))} or newer"
        )
    print(f"setup: on PyTorch {version} of {python}, which is not changed", flush=True)
    return str(Path(path).parent)


def remove_venv() -> None:
    """Remove .venv, or the link that it is."""
    if VENV.is_symlink():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(str(VENV))


# Installation


def find_uv() -> "str | None":
    """Return uv: in .venv, where pip installs it, else the one on PATH; None if neither exists.

    Raises:
        SetupError: no package index can be reached.
    """
    own = VENV / "bin" / "uv"
    if run([str(own), "--version"]).returncode == 0:
        return str(own)
    # An interrupted installation leaves an incomplete file.
    again = ["--force-reinstall"] if own.exists() else []
    done = run(pip("install", "--quiet", *again, "-c", str(ROOT / "constraints.txt"), "uv"))
    found = str(own) if run([str(own), "--version"]).returncode == 0 else shutil.which("uv")
    if found is None and re.search(
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|SSLError|Read timed out",
        done.stderr,
    ):
        raise SetupError(
            "no package index can be reached: check the network, "
            "the proxy (HTTPS_PROXY) and `pip config list`, then run this again"
        )
    return found


def install_with_uv(uv: str, extras: str, choice: str) -> None:
    """Resolve, print the size, and install with uv."""
    settings = uv_settings()
    lock = VENV / "pylock.toml"
    resolve(uv, settings, extras, choice, lock)
    build, size, number = what_comes(lock)
    announce(f"PyTorch {build}" if choice != "here" else "all packages except PyTorch", size / 1e9, number)
    target = ["--python", str(PYTHON)]
    finish([uv, "pip", "install", *target, "-r", str(lock)], settings)
    finish([uv, "pip", "install", *target, "--quiet", "--no-deps", "-e", str(ROOT)], settings)


def resolve(uv: str, settings: dict, extras: str, choice: str, lock: Path) -> None:
    """Write the packages to install to ``lock``, from metadata only."""
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--python",
        str(PYTHON),
        "--index-strategy",
        "unsafe-best-match",
    ]
    command += [
        "-c",
        str(constraints_for(choice)),
        "--format",
        "pylock.toml",
        "-o",
        str(lock),
        str(ROOT / "pyproject.toml"),
    ]
    for extra in extras.split(","):
        command += ["--extra", extra]
    if choice == "here":
        excluded = VENV / "excluded.txt"
        excluded.write_text("torch\n", encoding="utf-8")
        command += ["--excludes", str(excluded)]
    index = os.environ.get("TORCH_INDEX")
    if index:
        command += ["--index", index]
    lock.unlink() if lock.exists() else None
    if choice not in ("here", "cuda") and not index:
        done = run(
            [*command, "--torch-backend", choice],
            {**settings, "UV_HTTP_RETRIES": "1", "UV_HTTP_CONNECT_TIMEOUT": "5"},
        )
        if done.returncode == 0:
            return
        print("setup: PyTorch's index cannot be reached; using the build in pip's indexes", flush=True)
    done = run(command, settings)
    if done.returncode:
        raise SetupError(
            f"cannot determine what to install ({last_line(done)}): check the network, then run this again"
        )


def constraints_for(choice: str) -> Path:
    """Return the file of constraints. On the PyTorch of this machine, what its metadata requires replaces the
    pins that contradict it: 2.11 requires setuptools<82.
    """
    file = ROOT / "constraints.txt"
    if choice != "here":
        return file
    done = run([str(PYTHON), "-c", CONTRADICTED, str(file)])
    if done.returncode:
        raise SetupError(
            f"the requirements of this PyTorch cannot be read ({last_line(done)}): set TORCH=auto"
        )
    instead = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    if instead:
        required = ", ".join(sorted(instead.values()))
        print(f"setup: this PyTorch requires {required}, which replaces what constraints.txt has", flush=True)
    lines = file.read_text(encoding="utf-8").splitlines()
    chosen = VENV / "constraints.txt"
    kept = [instead.get(line, line) for line in lines if not line.startswith("torch==")]
    chosen.write_text("\n".join([*kept, ""]), encoding="utf-8")
    return chosen


def what_comes(lock: Path) -> "tuple[str, int, int]":
    """Return PyTorch's build, the bytes to download and the number of packages; cached packages count too."""
    build, size, number, cuda = "", 0, 0, False
    for package in lock.read_text(encoding="utf-8").split("[[packages]]")[1:]:
        number += 1
        name = re.search(r'name = "([^"]+)"', package)
        version = re.search(r'version = "([^"]+)"', package)
        files = [line for line in package.splitlines() if line.startswith(("wheels", "sdist", "archive"))]
        for line in [line for line in files if not line.startswith("sdist")] or files:
            said = re.search(r"size = (\d+)", line)
            local = re.search(r'(?:url = "file://|path = ")([^"]+)"', line)
            if said:
                size += int(said.group(1))
            elif local and (lock.parent / local.group(1)).exists():
                size += (lock.parent / local.group(1)).stat().st_size
        if name and name.group(1).startswith(("nvidia-", "cuda-")):
            cuda = True
        if name and version and name.group(1) == "torch":
            build = version.group(1).split("+")[0]
    return f"{build} ({'CUDA' if cuda else 'CPU'} build)", size, number


def announce(what: str, gigabytes: float, number: int) -> None:
    """Print the size before the download.

    Raises:
        SetupError: the disk has too little free space.
    """
    free = require_space(UNPACKED * gigabytes)
    print(
        f"setup: {what} and {number} packages, {gigabytes:.1f} GB to download, once; "
        f"{free:.0f} GB are free here",
        flush=True,
    )


def require_space(gigabytes: float) -> float:
    """Return the free space in GB.

    Raises:
        SetupError: it is less than ``gigabytes``.
    """
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    if free < gigabytes:
        raise SetupError(
            f"{free:.1f} GB are free on the disk of {ROOT}, and {gigabytes:.1f} GB are needed: "
            "free some space, or clone elsewhere"
        )
    return free


def finish(command: list, settings: dict) -> None:
    """Run an installation, and show its progress in a terminal."""
    if sys.stderr.isatty():
        failed, reason = subprocess.call(command, env=settings), "see above"
    else:
        done = run(command, settings)
        failed, reason = done.returncode, last_line(done)
    if failed:
        raise SetupError(
            f"the installation stopped ({reason}): check the network and the disk, then run this again; "
            "downloaded files are kept"
        )


def write_bytecode() -> None:
    """Import once what the commands and the labs need, so that Python stores its bytecode, and compile the
    library.

    Otherwise each import of PyTorch takes 5 s instead of 2 s for users who cannot write to .venv, such as the
    students of a shared installation, and where PYTHONDONTWRITEBYTECODE is set. The judge's ranks need less
    memory if the library is compiled (dlo_lib/grading/sandbox/compiled.py). A failed import is left to the
    command that needs the package.
    """
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run([str(PYTHON), "-c", f"import {', '.join(LOADED)}"], settings)
    run([str(PYTHON), "-m", "compileall", "-q", str(ROOT / "dlo_lib")], settings)


def install_with_pip(extras: str, choice: str) -> None:
    """Install with pip, which is slower, selects the build of PyTorch, and reports no sizes."""
    chosen = constraints_for(choice)
    index = os.environ.get("TORCH_INDEX")
    kind = "cpu" if choice == "cpu" else "cuda"
    announce(
        "PyTorch" if choice != "here" else "all packages except PyTorch",
        PIP_DOWNLOAD_GB["cpu" if choice == "here" else kind],
        150,
    )
    if choice != "here":
        finish(
            pip("install", "-c", str(chosen), *(["--index-url", index] if index else []), "torch"),
            dict(os.environ),
        )
    finish(pip("install", "--quiet", "-c", str(chosen), "-e", f"{ROOT}[{extras}]"), dict(os.environ))


def pip(*arguments: str) -> list:
    """Return a pip command for .venv."""
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]


def uv_settings() -> dict:
    """Return the environment for uv, with pip's settings where uv is not configured."""
    settings = dict(os.environ)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME"):
        settings.pop(name, None)
    for name, value in from_pip(pip_settings()).items():
        settings.setdefault(name, value)
    cache = settings.get("UV_CACHE_DIR") or settings.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    if "UV_CACHE_DIR" not in settings and not same_disk(cache):
        # The home is small or read-only, or links are not possible.
        settings["UV_CACHE_DIR"] = str(ROOT / ".uv-cache")
    return settings


def pip_settings() -> dict:
    """Return pip's configuration, such as {"index-url": ...}; environment variables override its files."""
    done = (
        run(pip("config", "list"))
        if PYTHON.exists()
        else run([sys.executable, "-m", "pip", "config", "list"])
    )
    found = {}  # type: dict
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.strip().partition(".")
        with contextlib.suppress(ValueError, SyntaxError):  # not a line of pip's configuration
            if section == ":env:" or section in ("global", "install"):
                found.setdefault(section, {})[name] = str(ast.literal_eval(value))
    return {**found.get("global", {}), **found.get("install", {}), **found.get(":env:", {})}


def from_pip(settings: dict) -> dict:
    """Return uv's environment variables for pip's settings.

    >>> from_pip({"extra-index-url": "https://a.example/simple", "timeout": "60"})
    {'UV_INDEX': 'https://a.example/simple', 'UV_HTTP_TIMEOUT': '60'}
    """
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    names.update(
        {
            "trusted-host": "UV_INSECURE_HOST",
            "proxy": "ALL_PROXY",
            "timeout": "UV_HTTP_TIMEOUT",
            "no-index": "UV_NO_INDEX",
        }
    )
    return {
        names[name]: (",".join(value.split()) if name == "find-links" else " ".join(value.split()))
        for name, value in settings.items()
        if name in names
    }


def same_disk(folder: str) -> bool:
    """Whether ``folder``, or its nearest existing parent, is writable and on the checkout's file system."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(str(path), os.W_OK) and path.stat().st_dev == ROOT.stat().st_dev


def load_modules_on_activation() -> None:
    """Let the activation of .venv in a job load the modules that provide this PyTorch."""
    modules = os.environ.get("LOADEDMODULES", "").replace(":", " ").strip()
    if not modules:
        return
    activate = VENV / "bin" / "activate"
    text = activate.read_text(encoding="utf-8")
    mark = "# The modules that were loaded when this environment was created on their PyTorch"
    if mark not in text:
        line = f"if command -v module > /dev/null; then module load {modules}; fi"
        activate.write_text(f"{text}\n{mark}\n{line}\n", encoding="utf-8")


def run(
    command: list, environment: "dict | None" = None, timeout: "float | None" = None
) -> subprocess.CompletedProcess:
    """Run a program to its end; a missing program gives exit status 127."""
    try:
        return subprocess.run(  # noqa: UP022  Python 3.6 has no capture_output
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=timeout,
            universal_newlines=True,  # noqa: UP021  and no text
            errors="replace",
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def last_line(done: subprocess.CompletedProcess) -> str:
    """Return the error message of a failed program: its first error and the last cause."""
    lines = [line.strip(" │├─▶╰×") for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    causes = [line for line in lines if re.match(r"(cause|caused by)\b", line.lower())]
    said = [*errors[:1], *causes[-1:]] or lines[-1:] or [f"exit status {done.returncode}"]
    return "; ".join(
        re.sub(r"^(error|cause|caused by)\s*:\s*", "", line, flags=re.IGNORECASE) for line in said
    )


if __name__ == "__main__":
    sys.exit(main())
