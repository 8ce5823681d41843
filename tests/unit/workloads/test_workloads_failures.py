"""One word leaves the worker; the sealed log has a sentence, and the owner's own traceback where there is one."""

from __future__ import annotations

import multiprocessing
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from torch.distributed.rendezvous import rendezvous

from glasshouse.errors import Code, CollectiveError, GlasshouseError, RunError, UsageError
from glasshouse.workloads.process import environment
from glasshouse.workloads.process.failures import MOST_WORDS, code_of, explain, in_a_line, of_script


class OutOfMemoryError(RuntimeError):
    """Named as the framework names its own."""


OfflineModeIsEnabled = type("OfflineModeIsEnabled", (ConnectionError,), {})  # as the hub's client calls its own


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "egress_open", lambda: False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), Code.OUT_OF_MEMORY),
        (OutOfMemoryError("CUDA out of memory"), Code.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Code.OUT_OF_MEMORY),
        (OSError(12, "Cannot allocate memory"), Code.OUT_OF_MEMORY),
        (ValueError("patient 7 is out of memory"), Code.WORKER_FAILED),
        (RuntimeError("shapes differ"), Code.WORKER_FAILED),
        (RunError(Code.NONFINITE_LOSS, "nan"), Code.NONFINITE_LOSS),
        (KeyboardInterrupt(), Code.WORKER_FAILED),
    ],
)
def test_failures_have_codes(error: BaseException, code: Code) -> None:
    assert code_of(error) is code


def test_a_mistake_that_is_understood_is_a_sentence_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    explain(UsageError(Code.JOB_INVALID, "t line 2 is not a JSON object", hint="mend it"))
    assert capsys.readouterr().err == "glasshouse: t line 2 is not a JSON object [job-invalid]\nglasshouse: mend it\n"


def test_a_cause_is_one_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise UsageError(Code.JOB_INVALID, "no model") from ValueError("unknown architecture\nand much more")
    except UsageError as error:
        explain(error)
    said = capsys.readouterr().err
    assert said == "glasshouse: no model [job-invalid]\nglasshouse: because of ValueError: unknown architecture\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such column\nand much more"), "ValueError: no such column"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (MemoryError("too much"), "MemoryError: too much"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "ModuleNotFoundError: No module named 'x'"),
        (UsageError(Code.JOB_INVALID, "no model", hint="mend it"), "no model"),
        (CollectiveError(Code.RANK_LOST, "rank 1 is gone"), "rank 1 is gone"),
        (ValueError("\x1b[2Jall is well\u202e"), "ValueError: ?[2Jall is well?"),
    ],
)
def test_a_failure_in_a_line_is_in_the_scripts_own_words(error: BaseException, line: str) -> None:
    assert in_a_line(error) == line

    def fail() -> None:
        try:
            raise error
        except BaseException as raised:
            raise of_script(raised, None) from None  # type: ignore[arg-type]

    with pytest.raises(GlasshouseError) as sentence:
        fail()
    assert in_a_line(sentence.value) == line
    assert len(in_a_line(ValueError("x" * 1000))) == MOST_WORDS


def test_an_error_of_ours_has_its_own_words_whatever_the_script_was_busy_with() -> None:
    def fail() -> None:
        try:
            raise KeyError("x")
        except KeyError:
            raise RunError(Code.OUTPUT_REFUSED, "that name is no name of an output")  # noqa: B904 - as scripts do

    with pytest.raises(RunError) as refused:
        fail()
    assert in_a_line(of_script(refused.value, None)) == "that name is no name of an output"


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemoryError("CUDA out of memory")])
def test_memory_that_ran_out_is_a_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    explain(error)
    said = capsys.readouterr().err
    assert said.startswith("glasshouse: the training ran out of memory [out-of-memory]\nglasshouse: rent a machine")
    assert "Traceback" not in said


def test_what_nobody_foresaw_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        explain(error)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("ZeroDivisionError: by zero\nglasshouse: the training failed [worker-failed]\n")


def connect() -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=1)


def look_up() -> None:
    raise socket.gaierror(-3, "Temporary failure in name resolution")


def stay_offline() -> None:
    raise OfflineModeIsEnabled("offline")


def open_a_folder() -> None:
    Path("/").read_bytes()


def told_of(action: Callable[[], object]) -> GlasshouseError:
    with pytest.raises(OSError) as failure:  # noqa: PT011 - whichever it is
        action()
    return of_script(failure.value, failure.value.__traceback__)


def download_by(attempt: Callable[[], None]) -> Callable[[], None]:
    def download() -> None:
        try:
            attempt()
        except OSError as error:
            raise OSError("download failed") from error

    return download


@pytest.mark.parametrize("attempt", [connect, look_up, stay_offline])
@pytest.mark.usefixtures("no_network")
def test_an_attempt_to_reach_the_network_is_called_by_its_name(
    attempt: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for action in (attempt, download_by(attempt)):
        told = told_of(action)
        assert told.code is Code.SCRIPT_FAILED
        assert told.message == "the script wanted the network, and the worker has none: policy.egress is empty"
        assert "[inputs]" in told.hint
    assert "OSError: download failed" in capsys.readouterr().err


def an_error(named: str, words: str) -> Exception:
    """Return an exception as a client raises it, which need not be installed here."""
    module, _, name = named.rpartition(".")
    found: Exception = type(name, (Exception,), {"__module__": module})(words)
    return found


WANDB = ("wandb.errors.UsageError", "api_key not configured (no-tty). call wandb.login(key=[your_api_key])")
DATASETS = ("builtins.ConnectionError", "Couldn't reach 'imdb' on the Hub (LocalEntryNotFoundError)")
PACKED = "add its folder to [inputs] in the job file, and load it from that path"
READ = "add what it would download to [inputs] in the job file, and read it from there"


@pytest.mark.parametrize(
    ("named", "words", "hint"),
    [
        (*WANDB, "W&B is set to offline here"),
        ("wandb.errors.errors.CommError", "Run initialization has timed out after 90.0 sec.", "W&B is set to offline"),
        ("wandb.errors.errors.AuthenticationError", "No API key configured.", "for wandb sync"),
        (*DATASETS, PACKED),
        ("datasets.exceptions.OfflineModeIsEnabled", "Offline mode is enabled.", PACKED),
        ("builtins.OSError", "We couldn't connect to 'https://huggingface.co' to load the files", PACKED),
        ("requests.exceptions.ConnectionError", "Max retries exceeded with url: /mnist.gz", READ),
        ("httpx.ConnectError", "[Errno -3] Temporary failure in name resolution", READ),
        ("urllib.error.URLError", "<urlopen error [Errno -2] Name or service not known>", READ),
        ("aiohttp.client_exceptions.ClientConnectorError", "Cannot connect to host s3.example:443 ssl:default", READ),
        ("botocore.exceptions.EndpointConnectionError", 'Could not connect to the endpoint URL: "https://s3"', READ),
    ],
)
@pytest.mark.usefixtures("no_network")
def test_what_trackers_hubs_and_downloads_meet_is_told_in_one_voice(named: str, words: str, hint: str) -> None:
    told = said_by(an_error(named, words))
    assert told.message == "the script wanted the network, and the worker has none: policy.egress is empty"
    assert hint in told.hint


@pytest.mark.usefixtures("no_network")
def test_the_hubs_own_clients_are_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In their own words, whichever version is installed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code = "import huggingface_hub as h; h.snapshot_download('a/b')"
    model = "import transformers as t; t.AutoModel.from_pretrained('a/b')"
    for source in (code, model):
        said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
        last = said.stderr.strip().splitlines()[-1]
        told = said_by(an_error(*last.split(": ", 1)) if ": " in last else an_error("builtins.OSError", said.stderr))
        assert (told.message.partition(",")[0], PACKED in told.hint) == ("the script wanted the network", True), last


@pytest.mark.usefixtures("no_network")
def test_a_file_that_may_not_be_opened_is_not_the_network() -> None:
    assert told_of(open_a_folder).message == "the script failed"


def test_where_there_is_a_network_a_lost_connection_is_the_scripts_own() -> None:
    assert environment.egress_open()
    assert told_of(connect).message == "the script failed"


def said_by(error: Exception) -> GlasshouseError:
    try:
        raise error
    except type(error) as raised:
        return of_script(raised, raised.__traceback__)


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail at third_party/gloo/gloo/transport/tcp/device.cc:186] rv != -1. -1 vs -1. Address family not"
        " supported by protocol",
        "Distributed package doesn't have NCCL built in",
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    ],
)
def test_a_backend_that_ranks_do_not_have_here_is_named(words: str) -> None:
    told = said_by(RuntimeError(words))
    assert told.message == "the script asked for a backend of torch.distributed that there is none of here"
    assert "--ranks N" in told.hint


def test_a_script_of_several_ranks_that_was_started_as_one_is_told_how() -> None:
    """In torch's own words."""
    with pytest.raises(ValueError, match="RANK expected") as raised:
        next(iter(rendezvous("env://")))
    told = said_by(raised.value)
    assert told.message == "the script is written for several ranks, and was started as one process"
    assert "--ranks N" in told.hint


def test_a_script_that_opens_its_output_by_name_is_told_where_it_is() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="No such device") as failure:
        Path(f"/proc/self/fd/{theirs.fileno()}").write_text("a line")
    assert "sys.stdout" in of_script(failure.value, None).hint


def test_a_database_that_wants_locks_on_parts_of_a_file_is_told_how_to_do_without() -> None:
    for error in (
        sqlite3.OperationalError("access permission denied"),
        an_error("lmdb.Error", "d: Operation not permitted"),
    ):
        told = of_script(error, None)
        assert told.message == "the script wanted to lock a part of a file, which every user of the machine would see"
        assert "nolock=1" in told.hint
    assert "lock" not in of_script(sqlite3.OperationalError("no such table: t"), None).message


@pytest.mark.parametrize(
    ("closed", "attempt"),
    [
        ("multiprocessing.synchronize._multiprocessing.SemLock", lambda: multiprocessing.get_context("fork").Lock()),
        ("multiprocessing.shared_memory._posixshmem.shm_open", lambda: SharedMemory(create=True, size=1)),
    ],
    ids=["lock", "memory"],
)
def test_processes_that_find_no_memory_to_share_are_told_what_to_do(
    closed: str, attempt: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where nothing can be mounted, and so there is no /dev/shm of the worker's own."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(closed, refuse)
    told = told_of(attempt)
    assert told.message == "the script wanted memory that processes share, and the worker has none on this machine"
    assert "num_workers = 0" in told.hint
    assert "glasshouse doctor" in told.hint
