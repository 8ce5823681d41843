"""How to add what is missing to the installation at hand; the public index has another project's `glasshouse`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import glasshouse

DISTRIBUTION = "glasshouse-train"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, such as `train`, beside this Glasshouse."""
    return _pip_install(f"{DISTRIBUTION}[{extra}]", "", f"[{extra}]")


def beside(folder: str, distribution: str) -> str:
    """Return the command that installs another distribution of this project, which is a checkout's `folder`."""
    return _pip_install(distribution, f"/{folder}", "")


def _pip_install(named: str, below: str, extra: str) -> str:
    checkout, editable = _checkout()
    if checkout is not None:
        named = f"{'.' if checkout == Path.cwd() else checkout}{below}{extra}"
    return f"{_python()} -m pip install {'-e ' if editable else ''}{shlex.quote(named)}"


def _python() -> str:
    """Return the interpreter at hand, by the name that a shell finds it under where there is one."""
    for name in ("python", "python3"):
        if shutil.which(name) == sys.executable:
            return name
    return shlex.quote(sys.executable)


def _checkout() -> tuple[Path | None, bool]:
    """Return the sources that this was installed from, where they are still here, and whether it runs from them."""
    beside = Path(glasshouse.__file__).resolve().parents[2]
    if _is_ours(beside):
        return beside, True  # an editable installation, or none at all
    try:
        origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlsplit(str(json.loads(origin)["url"])) if origin else None
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None, False
    folder = None if url is None or url.scheme != "file" else Path(unquote(url.path))
    return (folder, False) if folder is not None and _is_ours(folder) else (None, False)


def _is_ours(folder: Path) -> bool:
    try:
        return f'name = "{DISTRIBUTION}"' in (folder / "pyproject.toml").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
