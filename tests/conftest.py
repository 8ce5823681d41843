"""For all tests: imports of the simulators and tools beside them, the same examples everywhere, what may be skipped."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from itertools import chain, groupby
from pathlib import Path

import pytest
from hypothesis import settings

# The checkout holds the scripts in benchmarks, this folder what tests share.
for _folder in (str(Path(__file__).parents[1]), str(Path(__file__).parent)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

# The same examples on every machine, no matter how slow it is, and no database in the working tree.
settings.register_profile("glasshouse", deadline=None, derandomize=True, database=None)
settings.load_profile("glasshouse")

# Identities that tests make never reach the data folder of the user who runs them; commands under test inherit it.
_DATA = tempfile.mkdtemp(prefix="glasshouse-tests-")
atexit.register(shutil.rmtree, _DATA, ignore_errors=True)
os.environ["XDG_DATA_HOME"] = _DATA

# One folder for what Triton compiles, made by the first process and inherited by those that it starts.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TRITON_CACHE_DIR"] = f"{_DATA}/triton"

# PyTorch's threads sleep while they wait for each other: as usual they would spin, on cores that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A suite that runs in the background, or under nohup, inherits that Ctrl-C or a hang-up is ignored; every command under
# test would inherit it too.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for kind in {"integration", "long"}.intersection(item.path.parts):
            item.add_marker(kind)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1 and any("integration" in item.path.parts for item in items):
        items[:] = _runs_first(items, processes)


def _runs_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return the tests, whole files, so that each process begins with runs of real processes and ends with units.

    `--dist worksteal` gives each process a stretch of the list, and the ends of what is left to those that are done:
    near the end those had better be short, or one process goes on alone.
    """
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    files.sort(key=lambda file: "unit" in file[0].path.parts)
    stretches: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for file in files:
        min(stretches, key=len).extend(file)
    return list(chain.from_iterable(stretches))


@pytest.fixture(scope="module", autouse=True)
def what_was_imported_is_not_walked() -> None:
    """Have no garbage collection of a file's tests walk what others imported: it took some tests a second each."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail when a test was skipped for want of a program or of data; what a machine cannot have is allowed"
    parser.addoption("--nothing-missing", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nothing-missing"):
        from tools.skips import NothingMissing

        config.pluginmanager.register(NothingMissing())
