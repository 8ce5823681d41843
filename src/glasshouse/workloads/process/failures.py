"""From an exception to the code that leaves the worker, and to the lines of the sealed log.

Laws: a failure that is recognised is one sentence and a hint, never a traceback; an owner's script fails with its own
traceback, which begins in the script, and one sentence behind it.
"""

from __future__ import annotations

import errno
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import glasshouse
from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.workloads.process import environment

# How frameworks report that memory ran out without raising MemoryError.
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
# How clients report that there is no network, each in words of its own: the hub's, which is set to stay offline because
# there is none; W&B's, which asks for a key first; and beneath them HTTP libraries and clients of storage.
_NO_NETWORK = re.compile(
    r"OfflineModeIsEnabled|LocalEntryNotFoundError|OfflineModeException|Offline mode is enabled"
    r"|api_key not configured|No API key configured|wandb\.errors\.(errors\.)?(CommError|AuthenticationError)"
    r"|[Nn]ame resolution|Name or service not known|nodename nor servname|getaddrinfo failed|Network is unreachable"
    r"|Max retries exceeded with url|Failed to establish a new connection|Could not connect to the endpoint URL"
    r"|Couldn't reach |couldn't connect to 'https?://|Cannot connect to host |urlopen error"
)
_WANDB = re.compile(r"\bwandb\b|api_key not configured")
_HUB = re.compile(r"hugging ?face|hf_hub|HfHub|OfflineMode|Offline mode|LocalEntryNotFoundError|\bthe Hub\b")
_HOUSE = f"{Path(glasshouse.__file__).parent}/"
_MOST_CAUSE_CHARS = MOST_WORDS = 300
# gloo without a network, nccl and others in a build or on a machine that has none of them.
_OTHER_BACKEND = re.compile(r"gloo/transport|[Dd]istributed package doesn't have|ProcessGroupNCCL is only supported")
# Where Python makes semaphores and memory by a name in /dev/shm.
_SHARING = {"multiprocessing.shared_memory", "multiprocessing.synchronize"}
# How SQLite, and LMDB's two bindings, report that parts of a file cannot be locked.
_RANGE_LOCK = re.compile(r"OperationalError\b.* access permission denied|\blmdb\..*Operation not permitted", re.DOTALL)
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/self/fd/")
# As torch's rendezvous through the environment reports that it is not set.
_WANTED_RANKS = "environment variable RANK expected"

COLLECTIVE = frozenset(
    {
        Code.COLLECTIVE_ABORTED,
        Code.COLLECTIVE_MISMATCH,
        Code.COLLECTIVE_TAMPERED,
        Code.COLLECTIVE_TIMEOUT,
        Code.COLLECTIVE_UNSEALED,
        Code.GROUP_MISMATCH,
        Code.GROUP_SECRET,
        Code.RANK_LOST,
    }
)
"""How a sealed collective fails."""
# As `GlasshouseError.__str__` ends.
_IN_BRACKETS = re.compile(rf"\[({'|'.join(sorted(COLLECTIVE))})\]")


def code_of(error: BaseException, *, otherwise: Code = Code.WORKER_FAILED) -> Code:
    """Return the code of a failure."""
    if isinstance(error, GlasshouseError):
        return error.code
    reported = isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in _MEMORY_WORDS)
    if reported or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Code.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and (found := _IN_BRACKETS.search(str(error))):
        return Code(found[1])  # torch's own threads pass a collective's failure on as its words alone
    return otherwise


def explain(error: BaseException) -> None:
    """Write what happened to standard error, which is the sealed log; a traceback only where it was not foreseen."""
    understood = _understood(error, "the training", Code.WORKER_FAILED)
    if understood.code is Code.WORKER_FAILED and understood is not error:
        _write(_traceback(error, error.__traceback__))
    report(understood)


def in_a_line(error: BaseException) -> str:
    """Return a failure's own text, the script's where there is one, in at most `MOST_WORDS` characters."""
    own = error.own if isinstance(error, _OwnError) else error
    if isinstance(own, GlasshouseError):
        text = own.message
    else:
        text = f"{type(own).__name__}: {next(iter(str(own).strip().splitlines()), '')}".removesuffix(": ")
    return "".join(char if char.isprintable() else "?" for char in text)[:MOST_WORDS]


def report(error: GlasshouseError) -> None:
    """Write an error to the sealed log: what, because of what, and what to do."""
    lines = [str(error)]
    if error.__cause__ is not None:
        cause = next(iter(str(error.__cause__).strip().splitlines()), "")
        lines.append(f"because of {type(error.__cause__).__name__}: {cause}"[:_MOST_CAUSE_CHARS])
    if error.hint:
        lines.append(error.hint)
    _write("".join(f"glasshouse: {line}\n" for line in lines))


def of_script(error: BaseException, trace: TracebackType | None) -> GlasshouseError:
    """Write a script's traceback, from its first frame on, to the log; return what to raise in place of its error."""
    # An error of ours is one sentence: only the way to it through the script is shown.
    _write(_way(trace) if isinstance(error, GlasshouseError) else _traceback(error, trace))
    understood = _understood(error, "the script", Code.SCRIPT_FAILED)
    return understood if understood is error else _OwnError(understood, error)


def ignored(error: BaseException, where: str) -> None:
    """Write what failed at the end of a script's interpreter, where it changes nothing, as Python does."""
    _write(f"Exception ignored in {where}:\n" + _traceback(error, error.__traceback__ and error.__traceback__.tb_next))


class _OwnError(RunError):
    """What is raised in the place of a script's own error."""

    def __init__(self, understood: GlasshouseError, own: BaseException) -> None:
        super().__init__(understood.code, understood.message, hint=understood.hint)
        self.own = own


def _understood(error: BaseException, subject: str, otherwise: Code) -> GlasshouseError:
    """Return an error as a sentence for its owner."""
    if isinstance(error, GlasshouseError):
        return error
    code = code_of(error, otherwise=otherwise)
    if code is Code.OUT_OF_MEMORY:
        return RunError(
            code, f"{subject} ran out of memory", hint="rent a machine with more memory, or use smaller batches"
        )
    if code in COLLECTIVE:
        return RunError(code, f"{subject} could not go on with the other ranks; its own error is above")
    for recognised, what, hint in _REASONS:
        if recognised(error):
            return RunError(code, f"{subject} {what}", hint=hint)
    if _wanted_network(error):
        return RunError(
            code, f"{subject} wanted the network, and the worker has none: policy.egress is empty", hint=_instead(error)
        )
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename or 'the script').name} line {error.lineno}"
        return RunError(code, f"{place} is not valid Python {sys.version_info.major}.{sys.version_info.minor}")
    if isinstance(error, ModuleNotFoundError) and error.name:
        return RunError(
            code,
            f"{subject} imports {error.name!r}, which is neither in the package nor on this machine",
            hint="add it to [inputs] if it is a file of yours; else choose an image that has it, and list it in "
            "requirements, which are checked before anything runs",
        )
    return RunError(code, f"{subject} failed")


# How to recognise a failure, what the training or the script did, and what to do.
_REASONS: tuple[tuple[Callable[[BaseException], bool], str, str], ...] = (
    (
        lambda error: bool(_OTHER_BACKEND.search(str(error))),
        "asked for a backend of torch.distributed that there is none of here",
        "start it with --ranks N, also with one: each group is sealed then, whichever backend it names",
    ),
    (
        lambda error: _WANTED_RANKS in str(error),
        "is written for several ranks, and was started as one process",
        "start it with --ranks N, which sets what torchrun sets",
    ),
    (
        lambda error: (
            isinstance(error, OSError) and error.errno == errno.ENXIO and str(error.filename).startswith(_STREAMS)
        ),
        "opened its output by name, and here that is no file",
        "write to sys.stdout or sys.stderr, or to the descriptors 1 and 2",
    ),
    (
        # A pool, queue or lock found no /dev/shm of the worker's own: there is none where a namespace is missing.
        lambda error: any(
            isinstance(link, PermissionError) and _SHARING & _modules(link.__traceback__).keys()
            for link in _chain(error)
        ),
        "wanted memory that processes share, and the worker has none on this machine",
        "do without processes: num_workers = 0 in a DataLoader, threads in the place of pools; or choose a "
        "machine where `glasshouse doctor` finds every namespace",
    ),
    (
        lambda error: any(_RANGE_LOCK.search(_named(link)) for link in _chain(error)),
        "wanted to lock a part of a file, which every user of the machine would see",
        "open SQLite's databases by file:PATH?nolock=1 (uri=True), and LMDB's with lock=False",
    ),
)


def _wanted_network(error: BaseException) -> bool:
    if environment.egress_open():
        return False
    for link in _chain(error):
        if isinstance(link, socket.gaierror) or _NO_NETWORK.search(_named(link)):
            return True
        # Refused where every attempt begins: a file that may not be opened also gives an OSError.
        if isinstance(link, OSError) and next(reversed(_modules(link.__traceback__)), "") == "socket":
            return True
    return False


def _instead(error: BaseException) -> str:
    """Return what to do in the place of reaching the network: the same for all, but what is packed."""
    chain = " ".join(map(_named, _chain(error)))
    if _WANDB.search(chain):
        return (
            "W&B is set to offline here, and what it records comes back in the output folder, for wandb sync: take "
            "what sets another mode out of the script and of [env]"
        )
    if _HUB.search(chain):
        return "download the model or data set, add its folder to [inputs] in the job file, and load it from that path"
    return "add what it would download to [inputs] in the job file, and read it from there"


def _named(error: BaseException) -> str:
    """Return an exception with the full name of its type."""
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _modules(trace: TracebackType | None) -> dict[str, None]:
    """Return the modules that a failure went through, the innermost last."""
    names: dict[str, None] = {}
    while trace is not None:
        name, trace = str(trace.tb_frame.f_globals.get("__name__", "")), trace.tb_next
        names.pop(name, None)
        names[name] = None
    return names


def _traceback(error: BaseException, trace: TracebackType | None) -> str:
    import traceback  # only where something failed: every start compiles what it imports

    return "".join(traceback.TracebackException(type(error), error, trace, compact=True).format())


def _way(trace: TracebackType | None) -> str:
    import traceback

    frames = traceback.extract_tb(trace)
    while frames and (frames[-1].filename.startswith(_HOUSE) or frames[-1].filename.endswith("contextlib.py")):
        frames.pop()
    return "".join(["Traceback (most recent call last):\n", *frames.format()])


def _write(text: str) -> None:
    sys.stdout.flush()  # what was printed before the failure comes before it
    sys.stderr.write(text)
    sys.stderr.flush()
