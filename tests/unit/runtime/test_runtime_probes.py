"""The probes: what is left is found, what is gone is clean, what cannot be known is unverifiable."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.custodian.residue_patterns import PatternKind, ResiduePatterns, region_bytes
from glasshouse.evidence.events import ProbeResult
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.keys import memory_search
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.run import probes, start_processes
from glasshouse.runtime.syscalls import KernelError
from tools.forked import in_child
from tools.machine import WithoutNamespaces, WithoutSecretMemory, WithSwap, needs_filters, needs_namespaces
from tools.sandboxed import specification, start, start_held

CLEAN, FOUND, UNVERIFIABLE = ProbeResult.CLEAN, ProbeResult.FOUND, ProbeResult.UNVERIFIABLE

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p


class Table:
    """Needles of random bytes that no Python object ever held."""

    def __init__(self, count: int, kernel: Kernel = REAL) -> None:
        self.memory = SecretMemory(region_bytes(count), kernel=kernel)
        self.needles = ResiduePatterns(self.memory.view)
        with open("/dev/urandom", "rb", buffering=0) as source:  # noqa: PTH123
            for _ in range(count):
                self.needles.add(PatternKind.ASSET_KEY, bytes(32))
            for window in self.windows():
                source.readinto(window)

    def windows(self) -> list[memoryview]:
        return [window for _, window in self.needles]

    def search(self, *, own: tuple[SecretMemory, ...] = (), kernel: Kernel = REAL) -> memory_search.Search:
        return memory_search.search_self(self.windows(), own=[self.memory, *own], kernel=kernel)

    def copy_to(self, address: int, index: int) -> None:
        """Copy a needle without any Python object in between."""
        window = (ctypes.c_char * 32).from_buffer(self.windows()[index])
        ctypes.memmove(address, window, 32)


class CountsReads(Kernel):
    """Counts what is read from a range of addresses."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end, self.read_bytes = start, end, 0

    def process_vm_readv(self, pid: int, remote: int, length: int, destination: int) -> int:
        self.read_bytes += max(0, min(remote + length, self.end) - max(remote, self.start))
        return super().process_vm_readv(pid, remote, length, destination)


def address_of(buffer: mmap.mmap | bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def with_table(story: Callable[[Table], object], count: int = 8, kernel: Kernel = REAL) -> object:
    return in_child(lambda: story(Table(count, kernel)))


# this process's memory


def test_a_process_that_holds_no_needle_is_searched_and_clean() -> None:
    def story(table: Table) -> object:
        search = table.search()
        return search.found, search.unreadable, search.searched_bytes > 1 << 20

    assert with_table(story) == (frozenset(), 0, True)


def test_needles_in_heap_freed_block_mapping_and_file_are_all_found() -> None:
    def story(table: Table) -> object:
        heap, mapped, shared = bytearray(4096), mmap.mmap(-1, 8192), os.memfd_create("shared")
        os.ftruncate(shared, 4096)
        view = mmap.mmap(shared, 4096)
        for index, address in enumerate((address_of(heap) + 7, address_of(mapped) + 4090, address_of(view))):
            table.copy_to(address, index)
        # Several, and not neighbours, which would be joined: the search allocates too, and may reuse some.
        blocks = [_libc.malloc(3000) for _ in range(64)]
        for block in blocks[::2]:
            table.copy_to(block + 512, 3)
        for block in blocks[::2]:
            _libc.free(ctypes.c_void_p(block))
        return sorted(table.search().found)

    assert with_table(story) == [0, 1, 2, 3]


@pytest.mark.parametrize("offset", [-32, -31, -16, -1, 0, 1, 31])
def test_a_needle_across_the_boundary_of_two_pieces_is_found(offset: int) -> None:
    def story(table: Table) -> object:
        # Pages in use on both sides, so that the region is read in pieces of the buffer's size.
        mapped = mmap.mmap(-1, 3 * memory_search.CHUNK_BYTES)
        mapped[:] = b"\1" * len(mapped)
        whole = memory_search._Region(start=address_of(mapped), end=address_of(mapped) + len(mapped), sparse=False)
        with closing(memory_search.Finder(table.windows())) as finder:
            boundary = len(finder.view)
            table.copy_to(whole.start + boundary + offset, 3)
            memory_search._search_region(finder, whole, REAL)
            return sorted(finder.found)

    assert with_table(story) == [3]


def test_a_needle_in_one_touched_page_of_much_untouched_memory_is_found() -> None:
    def story(table: Table) -> object:
        mapped = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A mapping of its own: joined with a neighbour that has pages in swap, all of it would be read.
        mapped.madvise(mmap.MADV_DONTDUMP)
        start = address_of(mapped)
        table.copy_to(start + (33 << 20) + 4096 - 16, 5)
        kernel = CountsReads(start, start + len(mapped))
        search = table.search(kernel=kernel)
        return sorted(search.found), 0 < kernel.read_bytes < 16 << 20

    assert with_table(story) == ([5], True)


def test_the_search_leaves_no_copy_behind() -> None:
    def story(table: Table) -> object:
        mapped = mmap.mmap(-1, 4096)
        table.copy_to(address_of(mapped), 0)
        first = table.search().found
        ctypes.memset(address_of(mapped), 0, 4096)
        return sorted(first), sorted(table.search().found)

    assert with_table(story) == ([0], [])


def test_secret_memory_that_nobody_answers_for_is_counted_and_not_skipped() -> None:
    def story(table: Table) -> object:
        other = SecretMemory(4096)
        other.view[0] = 1
        return table.search().unreadable, table.search(own=(other,)).unreadable

    expected = (1, 0) if in_child(lambda: SecretMemory(64).is_refused_to_readers()) else (0, 0)
    assert with_table(story) == expected


def test_needles_in_locked_memory_do_not_find_themselves() -> None:
    assert with_table(lambda table: sorted(table.search().found), kernel=WithoutSecretMemory()) == []


def test_memory_that_cannot_be_read_makes_the_answer_unverifiable() -> None:
    class Blind(Kernel):
        def process_vm_readv(self, pid: int, remote: int, length: int, destination: int) -> int:
            raise KernelError("process_vm_readv", errno.EFAULT)

    class Forbidden(Kernel):
        def process_vm_readv(self, pid: int, remote: int, length: int, destination: int) -> int:
            raise KernelError("process_vm_readv", errno.EPERM)

    def story(table: Table) -> object:
        given = {"wiped": [], "needle_memory": table.memory}
        blind = probes.probe_memory(table.windows(), kernel=Blind(), **given)
        forbidden = probes.probe_memory(table.windows(), kernel=Forbidden(), **given)
        return blind.result, blind.detail.startswith("regions-unreadable"), forbidden.result, forbidden.detail

    assert with_table(story) == (UNVERIFIABLE, True, UNVERIFIABLE, "memory-not-readable")


def test_a_kernel_without_mincore_is_searched_in_full() -> None:
    class Older(Kernel):
        def mincore(self, address: int, length: int) -> bytes:
            raise KernelError("mincore", errno.ENOSYS)

    def story(table: Table) -> object:
        mapped = mmap.mmap(-1, 1 << 20)
        table.copy_to(address_of(mapped) + 70000, 2)
        return sorted(table.search(kernel=Older()).found)

    assert with_table(story) == [2]


def test_the_answer_says_what_was_found_and_no_more() -> None:
    def story(table: Table) -> object:
        grant = SecretMemory(4096)
        given = {"wiped": [grant], "needle_memory": table.memory}
        clean = probes.probe_memory(table.windows(), **given)
        kept = mmap.mmap(-1, 4096)
        table.copy_to(address_of(kept), 0)
        found = probes.probe_memory(table.windows(), **given)
        grant.view[100] = 1
        unwiped = probes.probe_memory(table.windows(), **given)
        return [(probe.result, probe.detail.partition("-in-")[0]) for probe in (clean, found, unwiped)]

    assert with_table(story) == [(CLEAN, "needles-8"), (FOUND, "needles-1-of-8"), (FOUND, "secret-memory-not-wiped")]


def test_without_needles_nothing_was_verified() -> None:
    def story(table: Table) -> object:
        return probes.probe_memory([], wiped=[], needle_memory=table.memory).result

    assert with_table(story, count=1) is UNVERIFIABLE


def test_text_that_the_runtime_holds_itself_is_told_before_anything_is_released() -> None:
    def story(table: Table) -> object:
        table.windows()[1][:] = b"from __future__ import annotations"[:32]
        text = bytearray(b"x = 1\nfrom __future__ import annotations\n")
        return probes.scan_self(table.windows(), own=[table.memory]), len(text)

    assert with_table(story) == ([1], 41)


def test_a_search_for_many_lets_others_come_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "NEEDLES_AT_ONCE", 3)

    def story(table: Table) -> object:
        kept, rounds = mmap.mmap(-1, 4096), []
        for place, needle in enumerate((0, 4, 7)):
            table.copy_to(address_of(kept) + 64 * place, needle)
        found = probes.scan_self(table.windows(), own=[table.memory], between=lambda: rounds.append(1))
        return found, len(rounds)

    assert with_table(story) == ([0, 4, 7], 3)


@needs_filters
def test_a_hardened_and_sealed_agent_can_still_search_itself() -> None:
    def story(table: Table) -> object:
        start_processes.harden_agent()
        start_processes.seal_agent()
        kept = mmap.mmap(-1, 4096)
        table.copy_to(address_of(kept), 6)
        search = table.search()
        return sorted(search.found), search.unreadable

    assert with_table(story) == ([6], 0)


def test_a_piece_of_memory_is_read_once_for_all_needles_together() -> None:
    class Counting(Kernel):
        reads = searches = 0

        def process_vm_readv(self, pid: int, remote: int, length: int, destination: int) -> int:
            self.reads += 1
            return super().process_vm_readv(pid, remote, length, destination)

        def memmem(self, haystack: int, length: int, needle: int, needle_length: int) -> int | None:
            self.searches += 1
            return super().memmem(haystack, length, needle, needle_length)

    def story(table: Table) -> object:
        kernel = Counting()
        table.search(kernel=kernel)
        return kernel.reads > 0, kernel.searches == 64 * kernel.reads

    assert with_table(story, count=64) == (True, True)


# workspace


@needs_filters
@needs_namespaces
def test_a_workspace_whose_worker_has_ended_is_gone_and_one_whose_worker_runs_is_not() -> None:
    def story() -> object:
        worker = start(specification("print('up', flush=True); import time; time.sleep(60)"))
        os.read(worker.stdout, 3)
        running = probes.probe_workspace(worker)
        worker.end()
        return running.result, running.detail, probes.probe_workspace(worker).result

    assert in_child(story) == (FOUND, "worker-still-there", CLEAN)


@needs_filters
def test_a_workspace_that_had_a_name_is_unverifiable_and_one_that_still_has_it_is_found() -> None:
    def story() -> object:
        worker = start_held("open('plain','w').write('x')", WithoutNamespaces())
        while worker.poll() is None:
            time.sleep(0.01)
        before = probes.probe_workspace(worker)
        worker.end()
        after = probes.probe_workspace(worker)
        return before.result, before.detail, after.result, after.detail

    assert in_child(story) == (FOUND, "files-left", UNVERIFIABLE, "was-a-directory")


def test_a_workspace_that_never_was_is_clean() -> None:
    assert probes.probe_workspace(None).result is CLEAN


# swap, GPU


def test_swap_is_clean_only_where_there_is_none_or_both_were_kept_out_of_it() -> None:
    passed, failed = CheckResult.PASSED, CheckResult.FAILED

    class NoSwap(Kernel):
        def read(self, path: str) -> bytes:
            return b"Filename\tType\n"

    class Hidden(Kernel):
        def read(self, path: str) -> bytes:
            raise PermissionError(errno.EACCES, path)

    def answer(kernel: Kernel, agent: CheckResult, worker: CheckResult) -> ProbeResult:
        return probes.probe_swap(agent=agent, worker=worker, kernel=kernel).result

    assert answer(NoSwap(), failed, failed) is CLEAN
    assert answer(WithSwap(), passed, passed) is CLEAN
    assert answer(WithSwap(), passed, failed) is UNVERIFIABLE
    assert answer(WithSwap(), failed, passed) is UNVERIFIABLE
    assert answer(Hidden(), passed, passed) is UNVERIFIABLE


def test_a_machine_without_a_gpu_is_clean_and_a_driver_that_cannot_be_asked_is_not() -> None:
    assert probes.probe_gpu(1, devices=[]).detail == "no-gpu"
    silent = probes.probe_gpu(1, devices=["nvidia0"], library="libno-such-driver.so")
    assert (silent.result, silent.detail) == (UNVERIFIABLE, "driver-not-asked")


@pytest.mark.parametrize(
    ("holders", "result", "detail"),
    [
        (set(), CLEAN, "no-process-holds-memory"),
        ({41}, FOUND, "worker-holds-memory"),
        ({7, 8}, UNVERIFIABLE, "other-processes-2"),
    ],
)
def test_what_the_gpus_driver_says_decides(
    holders: set[int], result: ProbeResult, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes.gpus, "holders", lambda _library: holders)
    answer = probes.probe_gpu(41, devices=["nvidia0"])
    assert (answer.result, answer.detail) == (result, detail)
