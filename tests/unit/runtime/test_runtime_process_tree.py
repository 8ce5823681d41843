"""A look at a process tree is complete or says that it is not: only ENOENT and ESRCH mean that something has ended."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator

import pytest

from glasshouse.runtime.watchdog import process_tree
from glasshouse.runtime.watchdog.process_tree import CACHED_FILES, ProcessTree
from tools.forked import in_child


@pytest.fixture
def child() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Trees:
    """Makes trees, and closes what they keep open."""

    def __init__(self) -> None:
        self._made: list[ProcessTree] = []

    def __call__(self, root: int, *, left_out: int) -> ProcessTree:
        self._made.append(ProcessTree(root, left_out=left_out))
        return self._made[-1]

    def forget(self) -> None:
        for tree in self._made:
            tree.forget()


@pytest.fixture
def trees() -> Iterator[Trees]:
    made = Trees()
    yield made
    made.forget()


def test_it_sees_a_process_its_threads_and_its_children(child: int, trees: Trees) -> None:
    found = trees(os.getpid(), left_out=0).look(child)
    assert found.complete
    assert {os.getpid(), child} <= found.seen
    assert (found.traced, found.root_stopped) == ({}, False)


def test_what_is_left_out_is_not_looked_at(child: int, trees: Trees) -> None:
    assert child not in trees(os.getpid(), left_out=child).look(0).seen


def test_a_process_that_has_ended_makes_no_look_incomplete(trees: Trees) -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    tree = trees(os.getpid(), left_out=0)
    assert pid in tree.look(0).seen
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = tree.look(0)
    assert (found.complete, pid in found.seen) == (True, False)
    assert not [path for path in tree._files if f"/{pid}/" in path]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO, errno.ENOENT])
def test_a_thread_that_lives_and_cannot_be_read_makes_the_look_incomplete(
    child: int, monkeypatch: pytest.MonkeyPatch, number: int, trees: Trees
) -> None:
    def fail(_descriptor: int, _whole: bool) -> bytes:
        raise OSError(number, os.strerror(number))

    tree = trees(child, left_out=0)
    assert tree.look(0).complete
    monkeypatch.setattr(process_tree, "_content", fail)
    assert not tree.look(0).complete


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOENT])
def test_a_process_that_lives_and_cannot_be_listed_makes_the_look_incomplete(
    child: int, monkeypatch: pytest.MonkeyPatch, number: int, trees: Trees
) -> None:
    def fail(_path: str) -> list[str]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(process_tree.os, "listdir", fail)
    assert not trees(child, left_out=0).look(0).complete


def test_a_kernel_that_does_not_list_children_leaves_the_look_incomplete(
    child: int, monkeypatch: pytest.MonkeyPatch, trees: Trees
) -> None:
    real = os.open

    def without_children(path: str, flags: int) -> int:
        if path.endswith("/children"):
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return real(path, flags)

    monkeypatch.setattr(process_tree.os, "open", without_children)
    assert not trees(child, left_out=0).look(0).complete


def test_a_state_without_a_word_about_a_tracer_is_no_look(
    child: int, monkeypatch: pytest.MonkeyPatch, trees: Trees
) -> None:
    monkeypatch.setattr(process_tree, "_content", lambda _descriptor, whole: b"" if whole else b"Name:\tworker\n")
    assert not trees(child, left_out=0).look(0).complete


def test_a_stop_by_a_debugger_outside_this_process_namespace_counts_as_traced(
    child: int, monkeypatch: pytest.MonkeyPatch, trees: Trees
) -> None:
    status = b"Name:\tworker\nState:\tt (tracing stop)\nTracerPid:\t0\n"
    monkeypatch.setattr(process_tree, "_content", lambda _descriptor, whole: b"" if whole else status)
    assert trees(child, left_out=0).look(child).traced == {child: True}


@pytest.mark.parametrize(("soft", "kept"), [(32, 0), (100, 68), (256, CACHED_FILES)])
def test_it_raises_a_low_limit_as_far_as_it_may_and_keeps_no_more_open(soft: int, kept: int) -> None:
    def act() -> tuple[int, bool, int]:
        hard = soft if soft < 256 else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        threading.stack_size(65536)
        ended = threading.Event()
        threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(CACHED_FILES)]
        for thread in threads:
            thread.start()
        tree = ProcessTree(os.getpid(), left_out=0)
        first, second = tree.look(0), tree.look(0)
        ended.set()
        return len(tree._files), first.complete and second.complete, len(first.seen)

    assert in_child(act, alone=True) == (kept, True, 1)
