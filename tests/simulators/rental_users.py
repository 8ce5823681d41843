"""A user with an account at a stand-in of a provider, whose commands wait tenths of seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glasshouse.attestation.measurements.measurement import measured_files
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.references.known_references import add_reference
from simulators.command_line import Shell
from simulators.fake_runpod import fake_runpod
from simulators.fake_vast import fake_vast

__all__ = ["WAYS", "Account", "Renting", "Way", "bare_image", "serving_account", "serving_accounts"]

TOOL = Path(__file__).parents[1] / "tools" / "quick_renting.py"
MACHINE = """
[machine]
gpu = ["RTX 4090"]
gpus = 1
most_per_hour = 5
most_usd = 3
most_time = "1h"
boot = "2m"
image = "example/torch:1"
python = "{python}"
"""


@dataclass(frozen=True)
class Way:
    """How a provider is played.

    Attributes:
        fake: serves an account, in a folder.
        url: the environment's name for where it is.
    """

    fake: Callable[[Path], AbstractContextManager[Any]]
    url: str


WAYS = {
    "runpod": Way(fake=fake_runpod, url="RUNPOD_API_URL"),
    "vast": Way(
        # Its thresholds are of tens of seconds, which these commands do not wait.
        fake=lambda folder: fake_vast(folder, clock=lambda: time.time() * 100),
        url="VAST_URL",
    ),
}


class Renting(Shell):
    """A user with an account, whose commands do not wait as long.

    Args:
        folder: an empty folder.
        image: the interpreter of the image that they rent, which has no start-up file.
    """

    def __init__(self, folder: Path, image: Path) -> None:
        super().__init__(folder)
        self.image = image
        assert self.ask("init").code == 0
        add_reference(Home(path=self.home), "image", {**measured_files(), "start_up": {}})

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start_with(TOOL, *arguments)

    def newest_id(self) -> str:
        newest = self.newest()
        assert newest is not None
        return str(newest["run_id"])

    def job(self, name: str, *arguments: str, profile: str = "standard") -> Path:
        path = super().job(name, *arguments, profile=profile)
        path.write_text(path.read_text() + 'reference = ["image"]\n' + MACHINE.format(python=self.image))
        return path


@dataclass(frozen=True)
class Account:
    """A user, and the provider that they rent from."""

    name: str
    shell: Renting
    fake: Any


def bare_image(folder: Path) -> Path:
    """Return an image's interpreter, with the standard library and no start-up file."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@contextmanager
def serving_account(name: str, folder: Path, image: Path) -> Iterator[Account]:
    """Serve a user's account at a provider as long as the block lasts; nothing is rented or runs after it."""
    with serving_accounts(folder, image, name) as (account,):
        yield account


@contextmanager
def serving_accounts(folder: Path, image: Path, *names: str) -> Iterator[tuple[Account, ...]]:
    """Serve one user's accounts at providers, as `serving_account` does."""
    (folder / "user").mkdir()
    shell = Renting(folder / "user", image)
    keys = shell.home / "accounts"
    keys.mkdir(mode=0o700)
    with ExitStack() as serving:
        fakes = {name: serving.enter_context(WAYS[name].fake(folder / name)) for name in names}
        for name, fake in fakes.items():
            shell.environment[WAYS[name].url] = fake.url
            (keys / name).write_text(fake.key)
            (keys / name).chmod(0o600)
        yield tuple(Account(name, shell, fake) for name, fake in fakes.items())
        assert [fake.left() for fake in fakes.values()] == [[]] * len(names)
    assert shell.left_running() == []
