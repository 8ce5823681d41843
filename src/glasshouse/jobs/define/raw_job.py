"""The raw leg: the same worker and workload, unprotected, on plain inputs, for comparison.

The inputs lie in the clear in a private folder while it runs, and the outputs stay in the clear.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from glasshouse.errors import Code, ExitCode, RunError, UsageError
from glasshouse.jobs.define.jobfile import Job
from glasshouse.jobs.define.package_records import KeyStore
from glasshouse.jobs.define.seal_job import content_of
from glasshouse.jobs.owner.home import Home, private_folder, write_private
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.package.content import verify_content
from glasshouse.package.read import Package
from glasshouse.wire.canonical import Json

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """A job in the clear."""

    workload: str  # `mlp`, `lora` or `script`
    params: Mapping[str, Json]  # the workload's own
    lay: Callable[[Path], None]  # writes the inputs into a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class RawEnded:
    """A raw run that has ended."""

    run_id: str  # a name for its folder
    folder: Path  # where its outputs lie, in the clear
    outcome: str  # `completed`, `failed` or `interrupted`
    code: str | None  # why it failed
    work: Mapping[str, Any] | None  # what the workload reported
    loss: Mapping[str, Any] | None
    trainable: int | None
    outputs: tuple[Mapping[str, Any], ...]  # name, kind, class, digest and length of each
    imports_s: float | None  # the worker's own import of its frameworks
    total_s: float  # from the start of the worker to its end

    @property
    def exit_code(self) -> ExitCode:
        """What a command ends with."""
        return {"completed": ExitCode.DONE, "interrupted": ExitCode.INTERRUPTED}.get(self.outcome, ExitCode.RUN_FAILED)


def of_job(job: Job) -> Plain:
    """Return a job file's job in the clear; raises `UsageError` as `content_of` does."""
    content = content_of(job)

    def lay(folder: Path) -> None:
        for source in content.sources:
            with source.open() as stream:
                _put(folder, source.path, partial(shutil.copyfileobj, stream))

    return Plain(workload=job.workload, params=content.params, lay=lay)


def of_package(path: Path, *, home: Home, identity: Identity) -> Plain:
    """Return a sealed job in the clear, opened with its owner's keys; raises as `Package.open` and `KeyStore.get`."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read the package {path}: {error.strerror}") from None
    with contextlib.ExitStack() as held:
        held.enter_context(stream)
        package = Package.open(stream, owner_signing=identity.signing.public)
        manifest = package.manifest
        key = KeyStore(home.keys).get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing)
        index = package.unlock(key)
        held.pop_all()  # `lay` reads on, and closes it

    def lay(folder: Path) -> None:
        with stream:
            for entry in index.assets:
                _put(folder, entry.path, partial(verify_content, package.asset(entry, key)))

    return Plain(workload=manifest.workload, params=index.job, lay=lay)


def run_raw(
    plain: Plain,
    *,
    home: Home,
    event: Callable[[Mapping[str, Any]], None],
    log: BinaryIO,
    ranks: int | None = None,
) -> RawEnded:
    """Run a job in the clear until it ends, with each message given to `event`; Ctrl-C stops it in order."""
    stopped = False
    with contextlib.closing(RawProcess(plain, home=home, log=log, ranks=ranks)) as process:
        while True:
            try:
                ended = process.worker.poll() is not None
                for message in process.news():
                    event(message)
                if ended:
                    return process.ended(stopped=stopped)
                time.sleep(_POLL_S)
            except KeyboardInterrupt:
                stopped = True
                process.worker.terminate()  # it saves what it has


class RawProcess:
    """A raw worker, whose folder lies in the home's `raw/`; raises `RunError` (`worker-failed`) if it cannot start.

    Args:
        log: a real file for what the training prints, in the clear.
        ranks: the processes of one group that the job runs in; None for one process without a group.
        program: what Python runs as the worker.
    """

    def __init__(
        self,
        plain: Plain,
        *,
        home: Home,
        log: BinaryIO,
        ranks: int | None = None,
        program: Sequence[str] = ("-m", "glasshouse.workloads.worker"),
    ) -> None:
        self.run_id = secrets.token_hex(16)
        folder = private_folder(home.raw / self.run_id)
        self._inputs, self._outputs = private_folder(folder / "inputs"), private_folder(folder / "outputs")
        self._events, self._offset = folder / "events.jsonl", 0
        self._messages: list[dict[str, Any]] = []
        params = folder / "params.json"
        try:
            plain.lay(self._inputs)
            write_private(params, json.dumps(plain.params).encode())
            command = [
                sys.executable,
                *("-I", "-B", *program, "--raw", "--workload", plain.workload),
                *("--params", str(params), "--inputs", str(self._inputs), "--outputs", str(self._outputs)),
                *("--events", str(self._events)),
                *(() if ranks is None else ("--ranks", str(ranks))),
            ]
            self._began = time.monotonic()
            self.worker = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                umask=0o077,
            )
        except BaseException as error:
            shutil.rmtree(self._inputs, ignore_errors=True)
            if isinstance(error, OSError):
                raise RunError(Code.WORKER_FAILED, f"the worker cannot be started: {error.strerror}") from None
            raise

    def news(self) -> Iterator[Mapping[str, Any]]:
        """Yield the worker's messages since the last call."""
        if not self._events.exists():
            return
        with self._events.open("rb") as source:
            source.seek(self._offset)
            for line in source:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                message = json.loads(line)
                if isinstance(message, dict):
                    self._messages.append(message)
                    yield message

    def ended(self, *, stopped: bool) -> RawEnded:
        """Return what came of a worker that has ended."""
        total_s = time.monotonic() - self._began
        for _ in self.news():
            pass
        last = {str(message.get("type")): message for message in self._messages}
        finished, failed, imported = last.get("finished"), last.get("failed"), last.get("imported")
        work = finished or {"work": None, "loss": None, "trainable": None}
        return RawEnded(
            run_id=self.run_id,
            folder=self._outputs,
            outcome="interrupted" if stopped else "completed" if finished else "failed",
            code=str(failed["code"]) if failed else None if finished else Code.WORKER_KILLED.value,
            work=work["work"],
            loss=work["loss"],
            trainable=work["trainable"],
            outputs=tuple(_outputs(self._messages)),
            imports_s=imported["us"] / 1e6 if imported else None,
            total_s=total_s,
        )

    def close(self) -> None:
        """Kill the worker if it still runs, and remove the plain inputs."""
        if self.worker.poll() is None:
            self.worker.kill()
            self.worker.wait()
        shutil.rmtree(self._inputs, ignore_errors=True)


def _outputs(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    begun: dict[str, Any] | None = None
    for message in messages:
        if message.get("type") == "output":
            begun = message
        elif message.get("type") == "output-end" and begun is not None:
            whole = begun | {"sha256": message["sha256"]}
            yield {key: whole[key] for key in ("name", "kind", "class", "sha256", "bytes")}
            begun = None


def _put(folder: Path, name: str, write: Callable[[BinaryIO], object]) -> None:
    target = folder.joinpath(*name.split("/"))
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with target.open("xb") as out:
        write(out)
