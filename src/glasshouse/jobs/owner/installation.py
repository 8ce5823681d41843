"""What is installed here: plugins of other distributions, and how to add what is missing.

Laws: naming what is installed loads none of it; what cannot be loaded is an error of its own command alone; nothing
here runs in an agent or a worker. A name in `OURS` is taken from its own distribution alone, and a name that two
distributions claim from neither. This is no protection: any installed package can change what a command does.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import glasshouse
from glasshouse.errors import Code, UsageError

DISTRIBUTION = "glasshouse-train"
COMMANDS = "glasshouse.commands"  # groups of commands, by the word that they are called by
ARTIFACTS = "glasshouse.artifacts"  # verifiers of folders, by NAME in application/vnd.glasshouse.NAME+json
_BENCH = "glasshouse-train-bench"
OURS = {"bench": _BENCH, "measurement": _BENCH, "overhead": _BENCH}
"""Names of this project, and the distribution that each comes from."""
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


def install_command() -> str:
    """Return the command that installs the extra `train` of pyproject.toml beside this Glasshouse."""
    return _pip_install(f"{DISTRIBUTION}[train]", "", "[train]")


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


def installed(group: str) -> tuple[str, ...]:
    """Return the names that are installed in a group, in order."""
    return tuple(sorted({one.name for one in entry_points(group=group) if _NAME.fullmatch(one.name)}))


def load(group: str, name: str, kind: type = object) -> Any:
    """Return the `kind` of object that stands under a name; raises `UsageError`: `requirement-missing`."""
    found = [one for one in entry_points(group=group, name=name) if OURS.get(name) in (None, _distribution(one))]
    if not found:
        raise _lacking(name, OURS.get(name, "another distribution"))
    if len(found) > 1:
        claimed = ", ".join(sorted(_distribution(one) for one in found))
        raise UsageError(
            Code.REQUIREMENT_MISSING, f"{name} is claimed by {claimed}", hint="uninstall all of them but one"
        )
    try:
        loaded = found[0].load()
    except ModuleNotFoundError as error:
        raise _lacking(name, error.name or _distribution(found[0])) from None
    except Exception as error:  # whatever its code raises, as it is imported
        raise _broken(name, found[0], type(error).__name__) from error
    if not isinstance(loaded, kind):
        raise _broken(name, found[0], f"a {type(loaded).__name__}")
    return loaded


def _distribution(point: EntryPoint) -> str:
    """Return the name of the distribution that an entry point is of, in its one spelling (PEP 503)."""
    return "unknown" if point.dist is None else re.sub(r"[-_.]+", "-", point.dist.name).lower()


def _lacking(name: str, what: str) -> UsageError:
    hint = beside("bench", OURS[name]) if name in OURS else f"install what brings {name}, with all that it needs"
    return UsageError(Code.REQUIREMENT_MISSING, f"{name} needs {what}, which is not installed", hint=hint)


def _broken(name: str, point: EntryPoint, what: str) -> UsageError:
    return UsageError(
        Code.REQUIREMENT_MISSING,
        f"{name}, of {_distribution(point)}, cannot be loaded: {what}",
        hint=f"install {_distribution(point)} again, in the version that belongs to this glasshouse",
    )
