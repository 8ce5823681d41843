"""Evidence of hardware is collected in the order in which it binds, or not at all."""

from __future__ import annotations

import pytest

from glasshouse.attestation.claims import composite
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.errors import Code, FormatError, PlatformError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import TpmKeys
from glasshouse.handshake.runtime_side import with_blobs
from glasshouse.runtime.roots import collectors
from glasshouse.runtime.roots.collectors import CLASSES, Collecting, collector_of, unavailable
from glasshouse.wire.crypto import sha256
from simulators.key_release_world import World

KEYS = TpmKeys(ak=b"ak", ek=b"ek")


class Root:
    """A root of trust that notes what is done with it."""

    def __init__(self, kind: str, *, missing: str = "", keys: TpmKeys | None = None) -> None:
        self.kind, self._missing, self._keys = kind, missing, keys
        self.done: list[str] = []
        self.bound: Bound | None = None

    def look(self) -> str:
        self.done.append("look")
        return self._missing

    def prepare(self) -> TpmKeys | None:
        self.done.append("prepare")
        return self._keys

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        self.done.append("collect")
        self.bound = bound
        return f"{self.kind} {credential!r}".encode()

    def close(self) -> None:
        self.done.append("close")
        raise OSError("the device is gone")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Root]:
    """The roots of a machine, by kind."""
    roots = {"azure": Root("azure", keys=KEYS), "nvidia": Root("nvidia")}
    monkeypatch.setattr(collectors, "collector_of", roots.__getitem__)
    return roots


def test_the_gpus_come_first_and_the_processor_names_their_evidence(offered: dict[str, Root]) -> None:
    claims = World().claims()
    collecting = Collecting(("azure", "nvidia"))
    collecting.prepare()
    blobs = collecting.collect(claims, b"secret")
    assert list(blobs.items()) == [("azure", b"azure b'secret'"), ("nvidia", b"nvidia b'secret'")]
    processor, gpus = offered["azure"].bound, offered["nvidia"].bound
    assert processor is not None and gpus is not None  # noqa: PT018
    assert processor.composite == gpus.composite == composite(claims)
    assert (gpus.gpus_sha256, processor.gpus_sha256) == (b"", sha256(blobs["nvidia"]))
    assert processor.ak == collecting.keys.ak if collecting.keys else False
    collecting.close()
    assert [root.done for root in offered.values()] == [["look", "prepare", "collect", "close"]] * 2


def test_a_machine_that_lacks_one_of_them_ends_the_run_with_what_it_lacks(offered: dict[str, Root]) -> None:
    offered["azure"] = Root("azure", missing="there is no vTPM")
    with pytest.raises(PlatformError) as failed:
        Collecting(("azure", "nvidia")).prepare()
    assert (failed.value.code, failed.value.hint) == (Code.HARDWARE_UNAVAILABLE, "there is no vTPM")
    assert offered["azure"].done == ["look"]


def test_every_kind_has_a_collector() -> None:
    assert CLASSES.keys() == KINDS.keys()
    for kind in CLASSES:
        made = collector_of(kind)
        assert (made.kind, type(made).__name__) == (kind, CLASSES[kind])
        made.close()


def test_blobs_follow_the_envelope_whose_length_is_ahead_of_it() -> None:
    assert with_blobs(b"{}", ()) == b"{}"
    assert with_blobs(b"{}", (b"one", b"two")) == b"\0\0\0\2{}onetwo"


@pytest.mark.parametrize("kinds", [("nvidia",), ("sev-snp", "azure"), ("nvidia", "azure"), ("tpm", "tpm")])
def test_a_launch_names_kinds_that_complete_a_level_in_their_order(kinds: tuple[str, ...]) -> None:
    launch = World().launch_file()
    names = {name: getattr(launch, name) for name in LaunchFile.__dataclass_fields__}
    with pytest.raises(FormatError):
        LaunchFile(**names | {"hardware": kinds})
    assert b"hardware" not in launch.encode(), "software is what it was"
    higher = LaunchFile(**names | {"hardware": ("azure", "nvidia")})
    assert LaunchFile.parse(higher.encode()) == higher
    assert (launch.assurance, higher.assurance) == ("software", "gpu-tee")


def test_the_refusal_of_a_collector_is_printed() -> None:
    assert unavailable("no").hint == "no"
