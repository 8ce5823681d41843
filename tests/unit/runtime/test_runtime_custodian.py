"""The custodian: it alone sees the keys, leaves what others may have, and is gone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.custodian.exchange import Opened
from glasshouse.custodian.residue_patterns import PatternKind, ResiduePatterns
from glasshouse.errors import Code, GlasshouseError, InternalError, PackageError, PeerError
from glasshouse.package.content import granted_asset
from glasshouse.package.grant import Grant
from glasshouse.package.limits import OutputLimits
from glasshouse.package.streams import AssetReader, Positioned
from glasshouse.wire.group import Group
from tools import custodian_with_known_key
from tools.custodian_bench import CustodianBench
from tools.runtime_package import OwnersPackage, seal

FILES = {"a-empty": b"", "b-tiny": b"nineteen bytes here", "data.bin": secrets.token_bytes(200_000)}


@pytest.fixture
def package(tmp_path: Path) -> OwnersPackage:
    return seal(tmp_path / "job.sealed", FILES, job={"entry": "train.py"})


@pytest.fixture
def bench(package: OwnersPackage) -> Iterator[CustodianBench]:
    bench = CustodianBench(package)
    yield bench
    bench.close()


def test_the_agent_learns_what_the_job_may_return_from_the_sealed_index(tmp_path: Path) -> None:
    limited = CustodianBench(
        seal(tmp_path / "limited.sealed", FILES, job={"max_outputs": 3, "max_output_bytes": 1 << 20})
    )
    try:
        assert limited.open().limits == OutputLimits(count=3, bytes=1 << 20)
    finally:
        limited.close()


def test_a_package_with_a_limit_that_is_none_does_not_open(tmp_path: Path) -> None:
    beyond = CustodianBench(seal(tmp_path / "beyond.sealed", FILES, job={"max_outputs": 257}))
    try:
        with pytest.raises(PackageError):
            beyond.open()
    finally:
        beyond.close()


def test_the_worker_gets_the_asset_keys_and_nothing_else(bench: CustodianBench) -> None:
    assert bench.open() == Opened(assets=3, patterns=3 + 1 + 3 + 3, max_outputs=256, max_output_bytes=64 << 30)
    granted = Grant.parse(bench.regions.grant.view)
    assert granted.job == {"entry": "train.py"}
    with AssetReader(granted_asset(granted, Positioned(bench.stream), "data.bin")) as reader:
        found = bytearray(200_000)
        reader.read_into(0, found)
    assert found == FILES["data.bin"]
    assert bench.package.key not in bytes(bench.regions.grant.view)


def test_the_patterns_are_the_keys_and_three_windows_of_every_asset(package: OwnersPackage) -> None:
    bench = CustodianBench(package, custodian_with_known_key.__file__)
    bench.open()
    found: dict[PatternKind, list[bytes]] = {kind: [] for kind in PatternKind}
    for kind, window in ResiduePatterns(bench.regions.patterns.view):
        found[kind].append(bytes(window))
        window.release()
    data, private = FILES["data.bin"], custodian_with_known_key.known_key().private()
    assert found[PatternKind.PACKAGE_KEY] == [package.key]
    assert b"".join(found[PatternKind.HPKE_PRIVATE]) == private
    assert found[PatternKind.ASSET_WINDOW] == [data[:32], data[99_984 : 99_984 + 32], data[-32:]]
    assert sorted(found[PatternKind.ASSET_KEY]) == sorted(Grant.parse(bench.regions.grant.view).keys)
    bench.close()


GROUP = Group(id=bytes(range(32)), machines=1, machine=0, ranks=4)


def test_the_group_secret_of_ranks_is_derived_here_granted_and_searched_for_at_the_end(bench: CustodianBench) -> None:
    assert bench.open(group=GROUP).patterns == 3 + 1 + 1 + 3 + 3
    granted = Grant.parse(bench.regions.grant.view)
    assert granted.group_secret == GROUP.secret(bench.package.key)
    kinds = {kind: bytes(window) for kind, window in ResiduePatterns(bench.regions.patterns.view)}
    assert kinds[PatternKind.GROUP_SECRET] == granted.group_secret
    assert bench.package.key not in bytes(bench.regions.grant.view)


def test_a_run_in_one_process_has_no_group_secret(bench: CustodianBench) -> None:
    bench.open()
    assert Grant.parse(bench.regions.grant.view).group_secret is None
    assert PatternKind.GROUP_SECRET not in [kind for kind, _ in ResiduePatterns(bench.regions.patterns.view)]


def test_a_run_that_is_refused_still_has_its_private_key_to_look_for(bench: CustodianBench) -> None:
    bench.custodian.public()
    kinds = [kind for kind, _ in ResiduePatterns(bench.regions.patterns.view)]
    assert kinds == [PatternKind.HPKE_PRIVATE] * 3


def test_it_is_gone_and_reaped_when_the_release_is_open(bench: CustodianBench) -> None:
    assert bench.public
    pid = bench.custodian.pid
    bench.open()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("spoil", "error", "code"),
    [
        ({"package_key": bytes(32)}, PeerError, Code.RELEASE_INVALID),
        ({"info": b"bound to something else"}, PeerError, Code.RELEASE_INVALID),
        ({"manifest": bytes(32)}, PackageError, Code.PACKAGE_TAMPERED),
    ],
    ids=["the key of another package", "a release for other evidence", "a package that changed"],
)
def test_a_release_that_does_not_fit_leaves_nothing(
    bench: CustodianBench, spoil: dict[str, bytes], error: type[GlasshouseError], code: Code
) -> None:
    with pytest.raises(error) as caught:
        bench.open(**spoil)  # type: ignore[arg-type]
    assert caught.value.code is code
    assert bench.regions.grant.is_zero()


def test_an_asset_that_was_altered_is_found_before_the_worker_gets_a_key(package: OwnersPackage) -> None:
    sealed = bytearray(package.path.read_bytes())
    sealed[-10] ^= 1
    package.path.write_bytes(sealed)
    bench = CustodianBench(package)
    with pytest.raises(PackageError) as caught:
        bench.open()
    assert caught.value.code is Code.PACKAGE_TAMPERED
    assert bench.regions.grant.is_zero()
    bench.close()


def test_a_custodian_that_dies_is_an_error_of_ours(bench: CustodianBench) -> None:
    assert bench.public
    os.kill(bench.custodian.pid, 9)
    with pytest.raises(InternalError):
        bench.open()


def test_it_writes_to_no_terminal_and_keeps_no_descriptor_of_the_agents(bench: CustodianBench) -> None:
    extra = os.open(os.devnull, os.O_RDONLY)
    second = CustodianBench(bench.package)
    second.custodian.public()
    names = {str(entry.readlink()) for entry in Path(f"/proc/{second.custodian.pid}/fd").iterdir()}
    os.close(extra)
    second.close()
    assert {name.split(":")[0] for name in names} <= {
        "/dev/null",
        "socket",
        str(bench.package.path),
        "/secretmem (deleted)",
        "/memfd",
    }
    assert sum(name.startswith("socket") for name in names) == 1


def test_text_that_every_process_holds_is_no_pattern(tmp_path: Path) -> None:
    package = seal(tmp_path / "zeros.sealed", {"zeros": bytes(100_000)})
    bench = CustodianBench(package)
    bench.open()
    kinds = [kind for kind, _ in ResiduePatterns(bench.regions.patterns.view)]
    bench.close()
    assert PatternKind.ASSET_WINDOW not in kinds
    assert PatternKind.ASSET_KEY in kinds
