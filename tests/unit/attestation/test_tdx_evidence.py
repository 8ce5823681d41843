"""A quote of TDX stands for a machine whose processor Intel certified, and every demand of the policy holds of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised, EarStatus
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.tdx import tdx_evidence
from glasshouse.attestation.roots.tdx.tdx_quote import TdxQuote
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import b64encode, encode
from simulators.tdx_machine import EVALUATION, FMSPC, TdxMachine

NOW = datetime(2026, 11, 1, tzinfo=UTC)
BOUND = Bound(composite=bytes(range(32)))


@pytest.fixture
def machine() -> TdxMachine:
    return TdxMachine(now=NOW)


def policy(machine: TdxMachine, **changed: Any) -> HardwarePolicy:
    images = [machine.registers.image()]
    terms = {"chain": "image", "fmspcs": [FMSPC], "images": images, "tcb_evaluation": EVALUATION, **changed}
    return HardwarePolicy.from_json({"tdx": terms})


def blob(machine: TdxMachine, **changed: Any) -> bytes:
    return encode({"quote": b64encode(machine.quote(BOUND.report_data, **changed))})


def appraise(
    machine: TdxMachine,
    evidence: bytes | None = None,
    *,
    bound: Bound = BOUND,
    pack: Pack | None = None,
    terms: HardwarePolicy | None = None,
    days: int = 0,
) -> Appraised:
    return tdx_evidence.appraise_blob(
        evidence or blob(machine),
        bound.report_data,
        now_us=int((NOW + timedelta(days=days)).timestamp()) * 1_000_000,
        collateral=pack or machine.pack(),
        policy=terms or policy(machine),
        root_sha256=machine.root_sha256,
    )


@contextlib.contextmanager
def refused(code: Code, words: str = "") -> Any:
    with pytest.raises(CheckFailedError, match=words or None) as raised:
        yield
    assert (raised.value.code, raised.value.check) == (code, "12"), raised.value


@pytest.mark.parametrize("version", [4, 5])
def test_a_good_machine_is_accepted(machine: TdxMachine, version: int) -> None:
    found = appraise(machine, blob(machine, version=version))
    assert found.status is EarStatus.AFFIRMING
    assert found.vector["hardware"] == 2
    assert found.not_after_us == int((NOW + timedelta(days=29)).timestamp()) * 1_000_000
    assert found.claims == {"advisories": [], "fmspc": FMSPC, "tcb_evaluation": EVALUATION, "tcb_status": "UpToDate"}


def test_the_product_takes_intels_root_alone(machine: TdxMachine) -> None:
    with refused(Code.HARDWARE_CERTIFICATE, "Intel's root"):
        tdx_evidence.appraise(
            blob(machine),
            bound=BOUND,
            now_us=int(NOW.timestamp()) * 1_000_000,
            collateral=machine.pack(),
            policy=policy(machine),
        )


def test_another_runs_or_without_the_gpus_it_is_of_no_use(machine: TdxMachine) -> None:
    with refused(Code.HARDWARE_BINDING):
        appraise(machine, bound=Bound(composite=bytes(32)))
    with refused(Code.HARDWARE_BINDING):
        appraise(machine, bound=replace(BOUND, gpus_sha256=bytes(32)))


@pytest.mark.parametrize("by", ["attestation", "pck"])
def test_another_key_does_not_sign_for_it(machine: TdxMachine, by: str) -> None:
    with refused(Code.HARDWARE_SIGNATURE):
        appraise(machine, blob(machine, **{by: ec.generate_private_key(ec.SECP256R1())}))


def test_an_attestation_key_is_the_quoting_enclaves(machine: TdxMachine) -> None:
    with refused(Code.HARDWARE_SIGNATURE):
        appraise(machine, blob(machine, authentication=bytes(32)))


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("attributes", "0100001000000000", Code.HARDWARE_DEBUG, "debug"),
        ("attributes", "8000001000000000", Code.HARDWARE_DEBUG, "debug"),
        ("attributes", "0000000000000000", Code.REFERENCE_VALUE, "attributes"),  # without SEPT_VE_DISABLE
        ("attributes", "0000003000000000", Code.REFERENCE_VALUE, "attributes"),  # migratable
        ("attributes", "0000001001000000", Code.REFERENCE_VALUE, "attributes"),  # a reserved bit
        ("xfam", "e602060000000000", Code.REFERENCE_VALUE, "xfam"),  # without x87
        ("xfam", "e702060000000080", Code.REFERENCE_VALUE, "xfam"),  # a bit that Intel did not define
        ("seam_attributes", "01" + "00" * 7, Code.REFERENCE_VALUE, "seam attributes"),
        *(
            (name, "99" * 48, Code.REFERENCE_VALUE, name)
            for name in ("mrsignerseam", "mrconfigid", "mrowner", "mrownerconfig", "mrtd", "rtmr0", "rtmr1", "rtmr2")
        ),
    ],
)
def test_a_machine_that_is_not_as_listed(machine: TdxMachine, name: str, value: str, code: Code, words: str) -> None:
    listed = policy(machine)
    setattr(machine.registers, name, bytes.fromhex(value))
    with refused(code, words):
        appraise(machine, terms=listed)


def test_a_service_beside_it_is_refused(machine: TdxMachine) -> None:
    machine.registers.service_td = b"\x01" * 48
    with refused(Code.REFERENCE_VALUE, "mrservicetd"):
        appraise(machine, blob(machine, version=5))


def test_what_a_runtime_extends_proves_nothing(machine: TdxMachine) -> None:
    machine.registers.rtmr3 = b"\x77" * 48
    assert appraise(machine).status is EarStatus.AFFIRMING


def test_what_the_policy_lists_is_accepted(machine: TdxMachine) -> None:
    ones, shown = "11" * 48, machine.registers
    shown.mrconfigid = shown.mrowner = shown.mrownerconfig = bytes.fromhex(ones)
    shown.xfam, shown.attributes = bytes.fromhex("e718060000000000"), bytes.fromhex("000000d000000080")
    listed = {"config_ids": [ones], "owner": ones, "owner_config": ones, "xfam": [shown.xfam.hex()]}
    assert appraise(machine, terms=policy(machine, **listed)).status is EarStatus.AFFIRMING


def test_registers_of_two_images_are_no_image(machine: TdxMachine) -> None:
    own = machine.registers.image()
    images = [{**own, "rtmr1": "aa" * 48}, {**own, "rtmr2": "bb" * 48}]
    with refused(Code.REFERENCE_VALUE, "rtmr2"):
        appraise(machine, terms=policy(machine, images=images))
    assert appraise(machine, terms=policy(machine, images=[*images, own])).status is EarStatus.AFFIRMING


def test_the_platforms_state_is_excepted_by_name_or_refused(machine: TdxMachine) -> None:
    machine.status, machine.advisories = "OutOfDate", ["INTEL-SA-00837"]
    statuses, advisories = ["OutOfDate"], ["INTEL-SA-00837"]
    for terms in ({}, {"statuses": statuses}, {"advisories": advisories}, {"statuses": ["SWHardeningNeeded"]}):
        with refused(Code.HARDWARE_TCB, "does not except"):
            appraise(machine, terms=policy(machine, **terms))
    found = appraise(machine, terms=policy(machine, statuses=statuses, advisories=advisories))
    assert (found.vector["hardware"], found.claims["tcb_status"]) == (32, "OutOfDate")
    machine.status = "Revoked"
    with refused(Code.HARDWARE_TCB):
        appraise(machine, terms=policy(machine, statuses=statuses, advisories=advisories))


def test_the_quoting_enclaves_state_counts_too(machine: TdxMachine) -> None:
    machine.enclave_status = "OutOfDate"
    with refused(Code.HARDWARE_TCB):
        appraise(machine)


def test_an_older_module_than_all_that_intel_lists_is_refused(machine: TdxMachine) -> None:
    machine.registers.tee_tcb_svn = bytes([3, 1, 3]).ljust(16, b"\x00")
    with refused(Code.HARDWARE_TCB):
        appraise(machine)


def test_a_revoked_signer_of_lists(machine: TdxMachine) -> None:
    machine.revoked = [2]
    with refused(Code.COLLATERAL_INVALID, "on its issuer's list"):
        appraise(machine)


@pytest.mark.parametrize(
    ("version", "at", "new"),
    [
        (4, 0, "0300"),  # of SGX
        (4, 0, "0600"),
        (4, 2, "0300"),  # a key on P-384
        (4, 4, "00000000"),  # an enclave's
        (4, 12, "00"),  # a quoting enclave of another maker
        (4, 632, "00"),  # of all that follows
        (4, 764, "05"),  # what certifies the attestation key
        (4, 766, "00"),
        (4, 1218, "2100"),  # authentication data
        (4, 1252, "06"),  # what certifies the quoting enclave
        (4, 1254, "00"),
        (5, 48, "0100"),
        (5, 48, "0200"),  # a report of TDX 1.0, as long as one of 1.5
        (5, 50, "00"),
    ],
)
def test_a_quote_has_the_kinds_and_lengths_that_it_states(machine: TdxMachine, version: int, at: int, new: str) -> None:
    quote, other = machine.quote(BOUND.report_data, version=version), bytes.fromhex(new)
    assert quote[at : at + len(other)] != other
    assert TdxQuote.parse(quote).raw == quote
    with pytest.raises(FormatError, match=r"of version|lengths|cannot be read"):
        TdxQuote.parse(quote[:at] + other + quote[at + len(other) :])


@pytest.mark.parametrize("place", [0, 1])
def test_a_revoked_certificate(machine: TdxMachine, place: int) -> None:
    machine.revoked = [place]
    with refused(Code.HARDWARE_REVOKED):
        appraise(machine)


@pytest.mark.parametrize(
    ("days", "code"),
    [(-2, Code.COLLATERAL_EXPIRED), (30, Code.COLLATERAL_EXPIRED), (3000, Code.HARDWARE_CERTIFICATE),
     (-401, Code.HARDWARE_CERTIFICATE)],
)  # fmt: skip
def test_everything_is_of_this_time(machine: TdxMachine, days: int, code: Code) -> None:
    with refused(code, "the verifier's clock"):  # which may be the one that is wrong
        appraise(machine, days=days)


def test_the_policys_own_ages_count(machine: TdxMachine) -> None:
    for kind in ("crl", "tcb"):
        terms = HardwarePolicy.from_json({**policy(machine).to_json(), "collateral": {kind: 3600}})
        with refused(Code.COLLATERAL_EXPIRED):
            appraise(machine, terms=terms)


def test_all_that_a_policy_needs_is_demanded(machine: TdxMachine) -> None:
    needed = set(policy(machine).needed) - {"intel/pck-crl/processor"}  # this machine's issuer is the other
    for name in needed:
        pack = Pack(items=tuple(item for item in machine.pack().items if item.name != name))
        with refused(Code.COLLATERAL_MISSING, name):
            appraise(machine, pack=pack)


def _of(pack: Pack, name: str) -> Any:
    return json.loads(pack.named(name))


@pytest.mark.parametrize(
    "change",
    [
        lambda m, p: {"intel/root-crl": p.named("intel/pck-crl/platform")},
        lambda m, p: {"intel/pck-crl/platform": TdxMachine(now=NOW).pack().named("intel/pck-crl/platform")},
        lambda m, p: {"intel/pck-crl/platform": p.named("intel/pck-crl/processor")},  # the same key, of another name
        lambda m, p: {"intel/pck-crl/platform": b"no list"},
        lambda m, p: {"intel/qe-identity": TdxMachine(now=NOW).pack().named("intel/qe-identity")},
        lambda m, p: {"intel/qe-identity/chain": TdxMachine(now=NOW).pack().named("intel/qe-identity/chain")},
        lambda m, p: {"intel/qe-identity/chain": b"no certificates"},
        lambda m, p: {"intel/qe-identity": p.named("intel/qe-identity") + b"\n"},
        lambda m, p: {"intel/qe-identity": p.named(f"intel/tcb/{FMSPC}")},
        lambda m, p: {f"intel/tcb/{FMSPC}": p.named(f"intel/tcb/{FMSPC}").replace(b'"svn":5', b'"svn":1')},
        lambda m, p: {
            "intel/qe-identity": m.signed_list(
                "enclaveIdentity", {**_of(p, "intel/qe-identity")["enclaveIdentity"], "id": "QE"}
            )
        },
        lambda m, p: {
            f"intel/tcb/{FMSPC}": m.signed_list("tcbInfo", {**_of(p, f"intel/tcb/{FMSPC}")["tcbInfo"], "id": "SGX"})
        },
        lambda m, p: {
            f"intel/tcb/{FMSPC}": m.signed_list(
                "tcbInfo", {**_of(p, f"intel/tcb/{FMSPC}")["tcbInfo"], "fmspc": "00" * 6}
            )
        },
        lambda m, p: {
            f"intel/tcb/{FMSPC}": m.signed_list("tcbInfo", {**_of(p, f"intel/tcb/{FMSPC}")["tcbInfo"], "pceId": "0100"})
        },
        lambda m, p: {f"intel/tcb/{FMSPC}": m.signed_list("tcbInfo", {"fmspc": FMSPC, "id": "TDX"})},
    ],
)
def test_a_pack_is_not_trusted(machine: TdxMachine, change: Callable[[TdxMachine, Pack], dict[str, bytes]]) -> None:
    with refused(Code.COLLATERAL_INVALID):
        appraise(machine, pack=machine.pack(**change(machine, machine.pack())))


def test_a_list_of_a_part_of_what_is_revoked_is_none(machine: TdxMachine) -> None:
    part = x509.IssuingDistributionPoint(None, None, True, False, None, False, False)
    machine.list_extensions = [part]
    with refused(Code.COLLATERAL_INVALID, "of a part"):
        appraise(machine)


@pytest.mark.parametrize(("place", "is_authority"), [(0, True), (1, False)])
def test_each_certificate_is_for_its_own_use(machine: TdxMachine, place: int, is_authority: bool) -> None:
    """A key that Intel let sign no certificate signs none, and what signs some signs no report."""
    machine.certify(place, is_authority=is_authority)
    with refused(Code.HARDWARE_CERTIFICATE):
        appraise(machine)


def test_lists_of_an_older_evaluation_than_the_policys(machine: TdxMachine) -> None:
    with refused(Code.COLLATERAL_EXPIRED, "older evaluation"):
        appraise(machine, terms=policy(machine, tcb_evaluation=EVALUATION + 1))
    enclave = _of(machine.pack(), "intel/qe-identity")["enclaveIdentity"]
    older = machine.signed_list("enclaveIdentity", {**enclave, "tcbEvaluationDataNumber": EVALUATION - 1})
    with refused(Code.COLLATERAL_EXPIRED, "older evaluation"):
        appraise(machine, pack=machine.pack(**{"intel/qe-identity": older}))


def test_a_quote_of_version_5_has_a_report_of_tdx(machine: TdxMachine) -> None:
    quote = machine.quote(BOUND.report_data)
    head = b"\x05\x00" + quote[2:48]
    assert TdxQuote.parse(head + b"\x02\x00\x48\x02\x00\x00" + quote[48:]).report.mrtd == machine.registers.mrtd
    for kind in (b"\x01", b"\x04"):
        with pytest.raises(FormatError, match="of version 5"):
            TdxQuote.parse(head + kind + b"\x00\x48\x02\x00\x00" + quote[48:])


def test_a_quotes_certificates_have_one_form(machine: TdxMachine) -> None:
    quote = machine.quote(BOUND.report_data)
    at = quote.index(b"-----BEGIN")
    pem = quote[at:].removesuffix(b"\x00")
    one = pem[: pem.index(b"-----BEGIN", 1)]

    def of(other: bytes) -> bytes:
        """The same quote with other certificates, whose lengths are stated again."""
        grown = len(other) - len(quote[at:])
        made = bytearray(quote[:at])
        for place in (632, 766, at - 4):
            size = int.from_bytes(quote[place : place + 4], "little") + grown
            made[place : place + 4] = size.to_bytes(4, "little")
        return bytes(made) + other

    assert TdxQuote.parse(of(pem)).chain == tuple(machine.chain)
    for other in (one + pem, pem[len(one) :], b"\n" + pem, pem.replace(b"\n", b"\r\n"), pem + b"\x00\x00", pem + b"#"):
        with pytest.raises(FormatError, match="not in their one form"):
            TdxQuote.parse(of(other))


def test_no_other_form_of_a_blob_is_accepted(machine: TdxMachine) -> None:
    """Here and there a bit is flipped, an end is cut off, and a byte is put behind."""
    for version in (4, 5):
        quote, pack, terms = machine.quote(BOUND.report_data, version=version), machine.pack(), policy(machine)
        whole = encode({"quote": b64encode(quote)})
        others = [encode({"quote": b64encode(_flipped(quote, at))}) for at in range(0, len(quote), 23)]
        others += [_flipped(whole, at) for at in range(0, len(whole), 37)]
        others += [encode({"quote": b64encode(quote[:at])}) for at in range(1, len(quote), 211)]
        others += [encode({"quote": b64encode(quote + b"\x00")}), whole + b"\x00", whole[:-1]]
        for other in others:
            with pytest.raises(CheckFailedError):
                appraise(machine, other, pack=pack, terms=terms)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


def test_a_policy_names_its_chain_and_something_to_compare_with(machine: TdxMachine) -> None:
    with pytest.raises(FormatError) as raised:
        policy(machine, chain="")
    assert raised.value.code is Code.SCHEMA
    good = policy(machine).to_json()["tdx"]
    assert isinstance(good, dict)
    with pytest.raises(FormatError) as raised:
        HardwarePolicy.from_json({"tdx": {name: value for name, value in good.items() if name != "chain"}})
    assert raised.value.code is Code.CHAIN_MISSING
    for changed in ({"images": []}, {"statuses": ["Revoked"]}, {"fmspcs": []}, {"advisories": ["all"]}):
        with pytest.raises(FormatError):
            policy(machine, **changed)
