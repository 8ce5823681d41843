"""A TPM's evidence, from a real software TPM to the appraisal: a machine that is right, and those that are not."""

from __future__ import annotations

import dataclasses
import os
import pty
import socket
import struct
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised, EarStatus
from glasshouse.attestation.roots.binding import Bound, activation_mac
from glasshouse.attestation.roots.collateral import EMPTY
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.attestation.roots.tpm.endorsement import credential_for, make_credential
from glasshouse.attestation.roots.tpm.tpm_blob import TpmBlob
from glasshouse.attestation.roots.tpm.tpm_evidence import appraise
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS, TpmPolicy
from glasshouse.attestation.roots.tpm.tpm_quote import check_ak, check_signature
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.roots import tpm as tpm_module
from glasshouse.runtime.roots.tpm import TpmCollector
from glasshouse.runtime.roots.tpm_device import PASSWORD, sized, split
from glasshouse.wire.crypto import sha256
from tools.ek_authority import EkAuthority
from tools.software_tpm import BOOT_LOG, SoftwareTpm, TestersTpm, needs_swtpm, software_tpm

pytestmark = needs_swtpm

NOW_US = time.time_ns() // 1000 + 60_000_000  # the certificates of these TPMs are made within the minute
COMPOSITE, OTHER = sha256(b"this run"), sha256(b"another run")
_SIGN, _LOAD_EXTERNAL, _OWNER = 0x15D, 0x167, 0x40000001


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the maker of the TPMs of these tests has its keys."""
    return tmp_path_factory.mktemp("authority")


@pytest.fixture(scope="module")
def machine(authority: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(authority=authority) as tpm:
        yield tpm


@pytest.fixture(scope="module")
def policy(machine: SoftwareTpm) -> TpmPolicy:
    return machine.policy()


class GateSession:
    """A challenge of a gate's to a machine, and what it makes of the answer."""

    def __init__(self, collector: TpmCollector, policy: TpmPolicy, *, now_us: int = NOW_US) -> None:
        self.collector, self.policy, self.now_us = collector, policy, now_us
        self.keys = collector.prepare()
        self.secret = os.urandom(32)
        self.credential = credential_for(self.keys.ak, self.keys.ek, self.secret, policy=policy, now_us=now_us)

    def bound(self, composite: bytes = COMPOSITE) -> Bound:
        secret = None if self.credential is None else self.secret
        return Bound(composite=composite, ak=self.keys.ak, ek=self.keys.ek, secret=secret)

    def collect(self, composite: bytes = COMPOSITE) -> TpmBlob:
        return TpmBlob.parse(self.collector.collect(bound=self.bound(composite), credential=self.credential))

    def appraise(self, blob: TpmBlob, bound: Bound | None = None) -> Appraised:
        policy = HardwarePolicy(tpm=self.policy)
        return appraise(blob.encode(), bound=bound or self.bound(), now_us=self.now_us, collateral=EMPTY, policy=policy)

    def refusal(self, blob: TpmBlob, bound: Bound | None = None) -> CheckFailedError:
        with pytest.raises(CheckFailedError) as refused:
            self.appraise(blob, bound)
        assert refused.value.check == "12"
        return refused.value


@contextmanager
def asked(machine: SoftwareTpm, policy: TpmPolicy, *, now_us: int = NOW_US) -> Iterator[GateSession]:
    collector = machine.collector()
    try:
        yield GateSession(collector, policy, now_us=now_us)
    finally:
        collector.close()


def test_a_machine_shows_what_it_booted_by_a_key_of_a_tpm_that_the_policy_names(
    machine: SoftwareTpm, policy: TpmPolicy
) -> None:
    assert machine.collector().look() == ""
    with asked(machine, policy) as session:
        for _ in range(4):  # a TPM without a resource manager has room for three objects
            found = session.appraise(session.collect())
        assert session.collector.prepare() == session.keys  # the same key each time, so that a policy can list it
    assert found.status is EarStatus.AFFIRMING
    assert found.not_after_us > NOW_US
    assert found.claims["log_events"] == len(BootLog.read(BOOT_LOG.read_bytes()).events)
    assert found.claims["ak"] == check_ak(session.keys.ak).hex()


def test_a_verifier_a_year_later_repeats_all_but_the_activation(machine: SoftwareTpm, policy: TpmPolicy) -> None:
    with asked(machine, policy) as session:
        blob = session.collect()
    later = Bound(composite=COMPOSITE, is_repeated=True)
    assert session.appraise(blob, later) == session.appraise(blob)
    assert session.refusal(blob, Bound(composite=OTHER, is_repeated=True)).code is Code.HARDWARE_BINDING
    assert session.refusal(dataclasses.replace(blob, activation=None), later).code is Code.TPM_ACTIVATION


def test_evidence_of_another_run_challenge_or_machine_is_refused(
    machine: SoftwareTpm, policy: TpmPolicy, authority: Path
) -> None:
    with software_tpm(authority=authority) as second, asked(second, policy) as other:
        theirs = other.collect()
        other.appraise(theirs)  # of the same maker, and booted the same
    with asked(machine, policy) as session:
        mine, replayed = session.collect(), session.collect(OTHER)
        again = dataclasses.replace(replayed, activation=activation_mac(session.secret, COMPOSITE))
        assert session.refusal(again).code is Code.HARDWARE_BINDING
        assert session.refusal(dataclasses.replace(mine, activation=replayed.activation)).code is Code.TPM_ACTIVATION
        assert session.refusal(dataclasses.replace(mine, activation=None)).code is Code.TPM_ACTIVATION
        not_given = dataclasses.replace(session.bound(), secret=None)
        assert session.refusal(mine, not_given).code is Code.TPM_ACTIVATION
        assert session.refusal(theirs).code is Code.TPM_KEY
        quoted = dataclasses.replace(mine, quote=theirs.quote, signature=theirs.signature)
        assert session.refusal(quoted).code is Code.HARDWARE_SIGNATURE
        assert session.refusal(dataclasses.replace(mine, ek=theirs.ek)).code is Code.TPM_ENDORSEMENT
        # A credential for another machine's key stays closed, for its name is in what the TPM decrypts with.
        meant_for_them = make_credential(session.keys.ek, check_ak(theirs.ak), session.secret)
        with pytest.raises(PlatformError, match="refused the command 0x147"):
            session.collector.collect(bound=session.bound(), credential=meant_for_them)
    # Nor does this TPM open it beside their key's public half, which can be loaded everywhere: it has no authorization.
    tpm = TestersTpm(machine.path)
    try:
        loaded = tpm.command(_LOAD_EXTERNAL, (), sized(b"") + sized(theirs.ak) + _OWNER.to_bytes(4, "big"))
        handle = tpm._keep(loaded)
        assert split(loaded[4:], 1) == [check_ak(theirs.ak)]
        with pytest.raises(PlatformError, match="refused the command 0x147 with 0x12f"):
            tpm.activate(handle, 0x81010001, meant_for_them)
    finally:
        tpm.close()


def test_a_key_that_signs_what_it_is_given_is_no_attestation_key(machine: SoftwareTpm, policy: TpmPolicy) -> None:
    """The attack: an unrestricted key of the right TPM, shown to be in it, signs an attestation made at home."""
    unrestricted = struct.pack(">HHI8H", 0x23, 0x0B, 0x40472, 0, 0x10, 0x18, 0x0B, 0x03, 0x10, 0, 0)
    with asked(machine, policy) as session:
        genuine = session.collect()
    dreamt = tuple(
        sha256(b"a kernel of ours") if register == 9 else value
        for register, value in zip(QUOTED_PCRS, genuine.pcrs, strict=True)
    )
    quote = genuine.quote[:-32] + sha256(b"".join(dreamt))
    tpm = TestersTpm(machine.path)
    try:
        handle, public = tpm.create_primary(unrestricted)
        credential = make_credential(genuine.ek, b"\x00\x0b" + sha256(public), session.secret)
        assert tpm.activate(handle, 0x81010001, credential) == session.secret
        own_ticket = struct.pack(">HIH", 0x8024, 0x40000007, 0)
        answer = tpm.command(_SIGN, (handle,), sized(sha256(quote)) + b"\x00\x10" + own_ticket, PASSWORD)
    finally:
        tpm.close()
    signature = answer[4 : 4 + int.from_bytes(answer[:4], "big")]
    x, y = (int.from_bytes(one, "big") for one in split(public[-68:], 2))
    check_signature(ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key(), signature, quote)  # it holds
    with pytest.raises(CheckFailedError) as refused:
        credential_for(public, genuine.ek, session.secret, policy=policy, now_us=NOW_US)
    assert refused.value.code is Code.TPM_KEY
    forged = dataclasses.replace(genuine, ak=public, quote=quote, signature=signature, pcrs=dreamt)
    refusal = session.refusal(forged, dataclasses.replace(session.bound(), ak=public))
    assert refusal.code is Code.TPM_KEY
    assert "attributes 00040472" in refusal.message


def test_a_machine_that_booted_something_else_is_refused_by_the_register_that_shows_it(
    policy: TpmPolicy, authority: Path
) -> None:
    with software_tpm(authority=authority) as other:
        tpm = TestersTpm(other.path)
        tpm.extend(14, sha256(b"of no account"))
        tpm.close()
        with asked(other, policy) as session:
            session.appraise(session.collect())
        tpm = TestersTpm(other.path)
        tpm.extend(9, sha256(b"another initrd"))
        tpm.close()
        with asked(other, policy) as session:
            refusal = session.refusal(session.collect())
            assert refusal.code is Code.REFERENCE_VALUE
            assert "register 9 " in refusal.message
        with asked(other, other.policy()) as session:  # the value is listed, but no event of the log leads to it
            refusal = session.refusal(session.collect())
            assert refusal.code is Code.TPM_LOG
            assert "register 9" in refusal.message
            without = dataclasses.replace(session.collect(), log=b"")
            session.appraise(without)


def test_a_tpm_without_a_certificate_is_taken_by_the_name_of_its_key(policy: TpmPolicy) -> None:
    with software_tpm(is_certified=False) as bare:
        with pytest.raises(CheckFailedError) as refused, asked(bare, policy):
            pass
        assert refused.value.code is Code.TPM_ENDORSEMENT
        collector = bare.collector()
        listed = dataclasses.replace(policy, aks=(check_ak(collector.prepare().ak).hex(),), ek_roots=())
        collector.close()
        with asked(bare, listed) as session:
            assert session.credential is None
            found = session.appraise(session.collect())
            assert "ek_sha256" not in found.claims
            stranger = dataclasses.replace(session.collect(), ek=b"a certificate of some other machine")
            assert session.refusal(stranger).code is Code.TPM_ENDORSEMENT


def test_a_p256_endorsement_key_whose_issuer_lies_beside_it_activates(policy: TpmPolicy) -> None:
    root = EkAuthority("the root")
    issuer = EkAuthority("a factory", root, path_length=0)
    with software_tpm(is_certified=False) as bare:
        tpm = TestersTpm(bare.path)
        template, unique = tpm_module._TEMPLATES[0x01C0000A]
        _, public = tpm.create_primary(template + unique)
        x, y = (int.from_bytes(one, "big") for one in split(public[-68:], 2))
        certificate = issuer.endorse(ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())
        tpm.write_nv(0x01C0000A, certificate + b"\xff" * 700)  # padded, as some makers do
        tpm.write_nv(0x01C00100, issuer.der)
        tpm.close()
        with asked(bare, dataclasses.replace(policy, ek_roots=(root.der,))) as session:
            assert session.keys.ek == certificate + issuer.der
            session.appraise(session.collect())


def test_an_rsa_attestation_key_is_appraised_by_its_own_scheme(
    machine: SoftwareTpm, policy: TpmPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rsa = struct.pack(">HHI5HIH", 0x01, 0x0B, 0x50072, 0, 0x10, 0x14, 0x0B, 2048, 0, 0)
    with asked(machine, policy) as session:
        by_ecc = session.collect()
    monkeypatch.setattr(tpm_module, "_AK", rsa)
    with asked(machine, policy) as session:
        blob = session.collect()
        session.appraise(blob)
        mixed = dataclasses.replace(blob, signature=by_ecc.signature)
        assert session.refusal(mixed).code is Code.HARDWARE_SIGNATURE


def test_a_device_takes_the_same_bytes_as_a_socket(machine: SoftwareTpm, policy: TpmPolicy) -> None:
    """A terminal in raw mode plays the character device: it hands over what is written, and what comes back."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    server = socket.socket(socket.AF_UNIX)
    server.connect(machine.path)

    def relay() -> None:
        while message := os.read(master, 4096):
            if message == b"end":
                return
            server.sendall(message)
            os.write(master, server.recv(4096))

    thread = threading.Thread(target=relay)
    thread.start()
    collector = TpmCollector(os.ttyname(slave), machine.log)
    try:
        session = GateSession(collector, policy)
        session.appraise(session.collect())
    finally:
        collector.close()
        os.write(slave, b"end")
        thread.join()
        server.close()
        os.close(master)
        os.close(slave)


def test_what_is_no_tpm_is_told_in_one_sentence(machine: SoftwareTpm, tmp_path: Path) -> None:
    assert "there is no TPM" in TpmCollector(str(tmp_path / "tpmrm0")).look()
    (tmp_path / "silent").touch()
    with pytest.raises(PlatformError, match="no whole answer") as refused:
        TpmCollector(str(tmp_path / "silent")).prepare()
    assert refused.value.code is Code.HARDWARE_UNAVAILABLE
    with pytest.raises(PlatformError, match="not open"):
        machine.collector().collect(bound=Bound(composite=COMPOSITE), credential=None)
