"""What the worker's sandbox shall be, and what the launcher reports of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from glasshouse.attestation.claims import CheckResult, WorkspaceKind
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.worker.shown_paths import NEVER_SHOWN
from glasshouse.wire import frames
from glasshouse.wire.policy import GROUP_EGRESS
from glasshouse.wire.record import Identifier, Record, items, raw, table, text

_MAX_NOTES = 128  # of a machine on which nothing at all is closed: 69


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """What the sandbox shall be; holds no secret."""

    argv: tuple[str, ...]  # the worker's; ``{workspace}`` is replaced by the workspace's path inside
    pycache_prefix: str  # an empty private directory for the launcher's own interpreter
    workspace_bytes: int  # the most that workspace, /tmp and /dev/shm may hold together
    python: str = sys.executable
    read_paths: tuple[str, ...] = ()  # what may be read and executed, besides nothing
    device_paths: tuple[str, ...] = ()  # device nodes that may be used
    # Whether it may write its own processes' files in /proc: NVIDIA's library ends where it cannot name a thread there.
    # The report has the note `process-files` where it may.
    process_files: bool = False
    # Peers that the worker may reach; today nothing but `GROUP_EGRESS`, for which the sandbox opens nothing: the agent
    # makes those connections.
    egress: tuple[str, ...] = ()
    # Whether its processes may reach each other over TCP and UDP, in a network namespace of their own; the report has
    # the note `loopback` where they may.
    loopback: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the minimal one
    hidden: tuple[str, ...] = ()  # what may lie beneath none of `read_paths`: the run's own folder
    package: int | None = None  # the sealed package, of which the worker is handed a view that reaches no disk
    least_bytes: int = 0  # what must have room in the workspace
    disk: bool = False  # whether it may lie on a disk, where it can have no mount and memory has no such room

    def __post_init__(self) -> None:
        if self.workspace_bytes < 1 << 20:
            raise ValueError(f"a workspace of {self.workspace_bytes} bytes")
        for path in (*self.read_paths, *self.device_paths):
            # A link that leads to the whole machine would show it.
            never = not {path, os.path.realpath(path)}.isdisjoint(NEVER_SHOWN)
            if os.path.normpath(path) != path or not path.startswith("/") or never:
                raise ValueError(f"a sandbox cannot show {path!r}")
        shown = tuple({os.path.realpath(path) + "/" for path in self.read_paths})
        if any((os.path.realpath(path) + "/").startswith(shown) for path in self.hidden):
            raise PlatformError(
                Code.PLATFORM,
                "the run's folder lies beneath what the worker is shown: the interpreter's folder or a Python package",
                hint="keep the state home out of packages and environments (--home, GLASSHOUSE_HOME)",
            )
        if set(self.egress) - {GROUP_EGRESS}:
            # Landlock has ports but no peers, and nothing for datagrams: a list could not be kept.
            raise PlatformError(
                Code.POLICY_IMPOSSIBLE,
                "this runtime cannot limit a worker's network to single peers, so it gives none",
                hint="use an empty egress list, and put what the job needs into the package",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxReport(Record, name="sandbox", constants={"type": "sandbox"}):
    """What the launcher saw from inside, just before it became the worker; `launcher.report` writes it."""

    # The checks that it tried, as many as a frame holds; the others are observed from outside.
    observed: Annotated[Mapping[str, CheckResult], table(frames.MAX_CONTROL_BYTES, raw())]
    workspace: WorkspaceKind
    base: Annotated[str, text(4096)]  # the directory that holds the workspace, as the worker sees it
    notes: Annotated[tuple[Identifier, ...], items(_MAX_NOTES)]  # for people and for `HardeningReport.details`
