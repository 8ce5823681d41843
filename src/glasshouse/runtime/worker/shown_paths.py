"""What of this machine a worker needs to see, and what it may take over from the agent's environment."""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH110, PTH112, PTH113, PTH119, PTH111, PTH118, PTH120, PTH208
from __future__ import annotations

import os
import sys
import zipimport

from glasshouse.runtime.spawn import library_path

NEVER_SHOWN = ("/", "/home", "/root", "/tmp", "/var", "/proc", "/sys", "/dev", "/etc", "/run", "/mnt", "/opt")  # noqa: S108

_SYSTEM_PATHS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")
_SYSTEM_FILES = (
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
    "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/sys/devices/system/cpu", "/sys/devices/system/node",
)  # fmt: skip
# Of an interpreter's or environment's folder, which may be a project's folder too: programs, libraries, headers; and,
# in conda's own folders alone, what the toolkits that it installs need.
_OF_A_PREFIX = ("bin", "include", "lib", "lib32", "lib64", "pyvenv.cfg")
_OF_CONDA = (
    "compiler_compat", "libexec", "nvvm", "share", "ssl", "targets", f"{os.uname().machine}-conda-linux-gnu",
)  # fmt: skip
_SITES = ("dist-packages", "site-packages")
_GPU_PATHS = ("/sys/bus/pci", "/sys/class/drm", "/sys/devices", "/sys/module")
_DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")

# Which devices, how many threads, determinism; nothing that names a machine, a user or a token.
_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS",
    "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TZ",
)  # fmt: skip


def default_read_paths() -> tuple[str, ...]:
    """Return what this interpreter, its packages and the system's libraries need, and downloaded public models.

    Of a folder that is on the search path by a line of a `.pth` file, which for an editable install is a whole project,
    only the packages and modules are shown that an import finds there.
    """
    found = {*_SYSTEM_PATHS, *_SYSTEM_FILES, os.path.realpath(f"{os.path.dirname(__file__)}/../..")}
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        for place in {os.path.normpath(prefix), os.path.realpath(prefix)}:
            extra = _OF_CONDA if os.path.isdir(f"{place}/conda-meta") else ()
            found |= {f"{place}/{name}" for name in (*_OF_A_PREFIX, *extra)}
    found |= {os.path.normpath(sys.executable), os.path.realpath(sys.executable)}
    for path in sys.path:
        if path.startswith("/"):
            found |= _importable(os.path.normpath(path))
    for module in [module for name, module in sys.modules.items() if name.startswith("__editable__")]:
        # How setuptools maps names of an editable install whose packages lie apart.
        found |= {str(path) for path in getattr(module, "MAPPING", {}).values()}
    found.add(_hub_cache())
    if _gpu_nodes():
        found |= set(_GPU_PATHS)
    shown = [path for path in found if {path, os.path.realpath(path)}.isdisjoint(NEVER_SHOWN)]
    return tuple(sorted(path for path in shown if os.path.exists(path)))


def _importable(path: str) -> set[str]:
    """Return what an entry of the search path must show, so that imports find there what they found before."""
    library = os.path.dirname(os.__file__)
    if os.path.isfile(path):
        try:
            # Imports look into archives; `site` puts any file on the search path that a `.pth` file names.
            zipimport.zipimporter(path)  # part of every interpreter that runs; `zipfile` costs 40 ms
        except (EOFError, ImportError, OSError, ValueError):
            return set()
        return {path}
    if os.path.basename(path) in _SITES or f"{path}/".startswith(f"{library}/"):
        return {path}
    found = set()
    for entry in _entries(path):
        if entry.is_file():
            found |= {entry.path} if entry.name.endswith((".py", ".so")) else set()
        elif entry.name.endswith((".dist-info", ".egg-info")):
            found.add(entry.path)  # the version that `requirements` asks for
        elif entry.name.isidentifier() and os.path.isfile(f"{entry.path}/__init__.py"):
            found.add(entry.path)
        elif entry.name.isidentifier() and entry.is_dir():
            # Perhaps a namespace: its packages, and nothing beside them.
            found |= {one.path for one in _entries(entry.path) if os.path.isfile(f"{one.path}/__init__.py")}
    return found


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []  # it may not be read, or is gone


def default_devices() -> tuple[str, ...]:
    """Return the device nodes that a worker may use: the harmless ones and GPUs."""
    return tuple([path for path in _DEVICES if os.path.exists(path)] + _gpu_nodes())


def has_gpus() -> bool:
    """Return whether there are GPUs among the devices."""
    return bool(_gpu_nodes())


def minimal_environment(python: str) -> dict[str, str]:
    """Return the worker's environment without what its specification adds."""
    path = f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin"
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    kept |= library_path()
    if os.path.isdir(_hub_cache()):
        kept["HF_HUB_CACHE"] = _hub_cache()
    return {"HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8", "PATH": path, "TRANSFORMERS_OFFLINE": "1", **kept}


def _hub_cache() -> str:
    """Return where models from the hub were downloaded to; the folder above it may hold the user's token."""
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return os.path.normpath(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))


def _gpu_nodes() -> list[str]:
    # What CUDA uses. Of the others IMEX shares memory with other machines over NVLink, `nvswitch` steers what connects
    # all GPUs, `fs` moves files past the kernel's cache, `uvm-tools` follows processes, and `modeset` drives screens.
    names = [name.removeprefix("nvidia") for name in os.listdir("/dev") if name.startswith("nvidia")]
    return sorted(f"/dev/nvidia{name}" for name in names if name in ("ctl", "-uvm", "-caps") or name.isdecimal())
