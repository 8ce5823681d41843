"""Run folders: one per run, with its record on the owner's side.

```
runs/ID/            0700
  run.json          this module's record; written by the run's supervisor alone
  package.sealed    what it runs: sealed here, or another name of the package that was given, or a copy
  out/              what came from the machine: events.log, outputs/, log/, receipt.json
  runtime.log       the agent's own words; nothing of the job's
  supervisor.log    a detached run's
  rental.json       what its rented machine cost, by the provider's word
  terms.json        of a leg of a line: policy and machine for the legs after it
  hardware.json     above `software`: policy and collateral that its evidence is judged by
  line/             what its gate and its owner signed of it; see `gates.line_notes`
  order.json        what the runtime was started with; keeper.json: the process that stays with it; ended: its exit code
  machines/ID/      the same again, for each other machine of a group: this folder is machine 0's
```
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import (
    Home,
    is_folder,
    is_there,
    open_regular,
    private_folder,
    read_state,
    write_private,
    write_state,
)
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.wire.canonical import Codec
from glasshouse.wire.group import Group
from glasshouse.wire.record import Record, raw, text

GIVEN_UP = Code.PLACE_UNREACHABLE
"""Why a run is recorded as lost whose machine never came back: what became of it there is not known."""

_ID_CHARS = 32
_Text: TypeAlias = Annotated[str, text(4096)]
FilePath: TypeAlias = Annotated[Path, Codec(lambda value, where: Path(text(4096).read(value, where)), str)]
# What records of earlier versions do not have.
_LATER = dict.fromkeys(
    ("before", "blamed", "gate", "group", "leg", "line", "max_output_bytes", "placed_us", "sent")
) | {"place": "local", "placed": True}
_PIECE_BYTES = 1 << 20


class Phase(StrEnum):
    """Where a run is from the owner's side."""

    PREPARING = "preparing"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord(Record, name="run record"):
    """The record in `run.json`."""

    run_id: _Text  # 32 hex characters
    name: _Text  # label for people
    workload: _Text  # `mlp`, `lora` or `script`
    package: FilePath  # path of the sealed package, in this folder; of an earlier version's record, anywhere
    package_id: _Text  # which package, hex
    manifest_sha256: _Text
    assurance: _Text  # what its owner demands
    profile: _Text
    created_us: int  # when it was started
    max_duration_s: int  # a longer run is wiped
    phase: Phase = Phase.PREPARING  # where it is
    deployment: _Text | None = None  # the broker's id for it, once there is one
    broker: FilePath | None = None  # the owner socket of its broker, once there is one
    supervisor: ProcessName | None = None  # the processes that run it; of a place elsewhere the second is None
    agent: ProcessName | None = None
    ended_us: int | None = None  # when it ended
    outcome: _Text | None = None  # how it ended; `lost` when that is not known
    code: _Text | None = None
    verdict: _Text | None = None  # on its receipt
    exit_code: int | None = None  # what its supervisor ended with
    progress: Annotated[dict[str, Any] | None, raw()] = None  # the last in its events, for lists of runs
    group: Group | None = None  # in a group of ranks; machine 0's record has the end of the whole group
    blamed: int | None = None  # of a group that did not complete: the machine because of which
    place: _Text = "local"  # where it runs, `local` or a machine's name or address
    placed: bool = False  # of a place elsewhere: whether a start was ever requested
    placed_us: int | None = None  # and when; None on this machine
    sent: _Text | None = None  # what its package is called there; None where it is not sent
    max_output_bytes: int | None = None  # the most that its outputs may have together; None for a run on this machine
    gate: _Text | None = None  # the name of the gate that releases its key; None for the embedded broker
    line: _Text | None = None  # the id of the line that it is a leg of, hex; None for a run without checkpoints
    leg: int | None = None  # which
    before: _Text | None = None  # the run that was the leg before; None for the first

    @property
    def alive(self) -> bool:
        """Whether a process of this run still exists."""
        return any(process is not None and process.alive for process in (self.supervisor, self.agent))

    @property
    def active(self) -> bool:
        """Whether the run has not ended and something still works on it."""
        return self.phase is not Phase.ENDED and self.alive


class RunFolder:
    """One run's folder, whose name is the run id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.out = path / "out"
        self.events = self.out / "events.log"
        self.receipt = self.out / "receipt.json"
        self.package = path / "package.sealed"
        self.scratch = path / "empty"
        self.runtime_log = path / "runtime.log"
        self.supervisor_log = path / "supervisor.log"
        self.rental = path / "rental.json"
        self.terms, self.hardware = path / "terms.json", path / "hardware.json"
        self.line = path / "line"
        self._record = path / "run.json"
        self._machines = path / "machines"

    @classmethod
    def create(cls, home: Home) -> RunFolder:
        """Make the folder of a new run; raises `UsageError`."""
        home.note_project()
        return cls._made(home.runs)

    @classmethod
    def _made(cls, parent: Path) -> RunFolder:
        folder = cls(private_folder(parent) / secrets.token_hex(16))
        private_folder(folder.path)
        private_folder(folder.scratch)
        return folder

    @classmethod
    def at(cls, path: Path) -> RunFolder | None:
        """Return the run whose folder a path is; None for any other folder."""
        return cls(path) if len(path.name) == _ID_CHARS and (path / "run.json").is_file() else None

    @classmethod
    def find(cls, home: Home, name: str) -> RunFolder:
        """Return the run with this id or unique prefix of one, or the `latest`; raises `UsageError`: `run-unknown`."""
        runs = list(cls.all(home))
        if name == "latest":
            ages = {}
            for folder in runs:
                with contextlib.suppress(UsageError):  # a damaged record is never the latest
                    ages[folder] = folder.load().created_us
            if not ages:
                raise UsageError(Code.RUN_UNKNOWN, f"no run in {home.runs}", hint="start one with: glasshouse run")
            return max(ages, key=lambda folder: ages[folder])
        matching = [folder for folder in runs if name and folder.run_id.startswith(name.lower())]
        if len(matching) == 1:
            return matching[0]
        why = "no run" if not matching else f"{len(matching)} runs"
        raise UsageError(
            Code.RUN_UNKNOWN,
            f"{why} in {home.runs} with an id that begins with {name[:40]!r}",
            hint="see: glasshouse status",
        )

    @classmethod
    def all(cls, home: Home) -> Iterator[RunFolder]:
        """Yield every run folder that has a record, in no order; a link is none."""
        if not is_folder(home.runs):
            return
        for path in home.runs.iterdir():
            if not path.is_symlink() and (folder := cls.at(path)) is not None:
                yield folder

    @classmethod
    def everywhere(cls, home: Home) -> Iterator[RunFolder]:
        """Yield the run folders of all projects that share this home's broker."""
        for one in home.everywhere():
            yield from cls.all(one)

    @classmethod
    def records(cls, home: Home) -> Iterator[RunRecord]:
        """Yield the records of `everywhere`; a damaged one is of no run that goes on."""
        for folder in cls.everywhere(home):
            with contextlib.suppress(UsageError):
                yield folder.load()

    def keep(self, package: Path) -> Path:
        """Link a run's package into its folder, or copy it where the file system cannot, and return its path here.

        A link is the same file: a write in place (``cp new.sealed job.sealed``) changes both. Nothing of ours does so.

        Raises:
            UsageError: `file-missing`, `disk-full`, or `usage` when it cannot be written.
        """
        if is_there(self.package):
            return self.package
        try:
            # The file itself: a symbolic link goes with its name, and a pipe would block until a writer comes.
            with open_regular(package.resolve()) as source:
                try:
                    os.link(package.resolve(), self.package)
                except OSError:  # another file system, or one without links, or a file of another user's
                    write_private(self.package, partial(shutil.copyfileobj, source, length=_PIECE_BYTES))
        except (OSError, RuntimeError) as error:  # a ring of links is the latter until Python 3.13
            why = error.strerror if isinstance(error, OSError) else "links in a circle"
            raise UsageError(Code.FILE_MISSING, f"cannot read the package {package}: {why}") from None
        return self.package

    def add_machine(self) -> RunFolder:
        """Make the folder of another machine of this run's group; raises `UsageError`."""
        return RunFolder._made(self._machines)

    def machines(self) -> list[RunFolder]:
        """Return the folders of all machines of the run's group in order, this one first; raises `UsageError`."""
        if not self._machines.is_dir():
            return [self]
        others = [RunFolder(path) for path in self._machines.iterdir() if (path / "run.json").is_file()]
        return [self, *sorted(others, key=_machine)]

    def machine(self, machine: int) -> RunFolder:
        """Return the folder of one machine of the run's group, from 0; raises `UsageError` where there is none."""
        machines = self.machines()
        if not 0 <= machine < len(machines):
            last = len(machines) - 1
            raise UsageError(Code.USAGE, f"run {self.run_id[:8]} has no machine {machine}: its last is {last}")
        return machines[machine]

    def active(self) -> bool:
        """Return whether any machine of this run has not ended and something still works on it; raises `UsageError`."""
        return any(folder.load().active for folder in self.machines())

    @property
    def recorded(self) -> bool:
        """Whether the run has a record yet."""
        return self._record.is_file()

    def load(self) -> RunRecord:
        """Return the record; raises `UsageError`."""
        value = read_state(self._record, what="run record")
        try:
            return RunRecord.from_json(_LATER | RunRecord.known(value))
        except FormatError:
            raise UsageError(Code.USAGE, f"the run record {self._record} is damaged") from None

    def save(self, record: RunRecord) -> RunRecord:
        """Write the record and return it; raises `UsageError`."""
        write_state(self._record, record.to_json())
        return record

    def update(self, **changes: Any) -> RunRecord:
        """Change fields of the record; for the run's supervisor alone."""
        return self.save(replace(self.load(), **changes))

    def end(self, **changes: Any) -> RunRecord:
        """Record the end of the run."""
        return self.update(phase=Phase.ENDED, ended_us=time.time_ns() // 1000, **changes)


def _machine(folder: RunFolder) -> int:
    group = folder.load().group
    if group is None:
        raise UsageError(Code.USAGE, f"the run record in {folder.path} is of no group")
    return group.machine
