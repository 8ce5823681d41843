"""What Google says of a machine of its own counts for an owner who takes its word, for this run, and for no more."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised, EarStatus
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import EMPTY
from glasshouse.attestation.roots.gcp import gcp_evidence
from glasshouse.attestation.roots.gcp.gcp_blob import MAX_TOKEN_BYTES
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import b64encode
from glasshouse.wire.policy import Assurance
from simulators.confidential_space import IMAGE_DIGEST, ConfidentialSpace

NOW = datetime(2026, 11, 1, tzinfo=UTC)
BOUND = Bound(composite=bytes(range(32)))


@pytest.fixture(scope="module")
def made() -> ConfidentialSpace:
    return ConfidentialSpace(now=NOW)  # keys of RSA take a while


@pytest.fixture
def space(made: ConfidentialSpace, monkeypatch: pytest.MonkeyPatch) -> ConfidentialSpace:
    monkeypatch.setattr(gcp_evidence, "GOOGLE_ROOT_SHA256", made.root_sha256)
    monkeypatch.setattr(made, "said", {})
    monkeypatch.setattr(made, "chain", list(made.chain))
    return made


def appraise(space: ConfidentialSpace, token: bytes | None = None, *, later: float = 0, **terms: Any) -> Appraised:
    return gcp_evidence.appraise(
        space.token(BOUND.gcp_nonce) if token is None else token,
        bound=BOUND,
        now_us=int((NOW.timestamp() + later) * 1_000_000),
        collateral=EMPTY,
        policy=HardwarePolicy.from_json({"gcp": space.terms(**terms)}),
    )


@contextlib.contextmanager
def refused(code: Code) -> Any:
    with pytest.raises(CheckFailedError) as raised:
        yield
    assert (raised.value.code, raised.value.check) == (code, "12"), raised.value


def test_a_token_is_googles_word_and_never_more_than_a_warning(space: ConfidentialSpace) -> None:
    found = appraise(space, projects=["ours"], zones=["us-west1-b"])
    assert found.status is EarStatus.WARNING
    assert found.not_after_us == int(NOW.timestamp() + 3600) * 1_000_000
    assert found.claims["image_digest"] == f"sha256:{IMAGE_DIGEST.hex()}"
    assert found.claims["word"] == "Google's word about Google's machine"
    assert HardwarePolicy.from_json({"gcp": space.terms()}).wanted(Assurance.TPM) == ("gcp",)


def test_one_nonce_in_a_list_is_that_nonce(space: ConfidentialSpace) -> None:
    space.said["eat_nonce"] = [BOUND.gcp_nonce]
    assert appraise(space).status is EarStatus.WARNING


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("iss", "https://confidentialcomputing.example.com", Code.GCP_TOKEN),
        ("iss", None, Code.GCP_TOKEN),
        ("aud", "https://sts.googleapis.com", Code.GCP_TOKEN),
        ("aud", ["https://glasshouse.dev/hardware/gcp/v1"], Code.GCP_TOKEN),
        ("exp", None, Code.GCP_TOKEN),
        ("exp", 9e9, Code.GCP_TOKEN),
        ("exp", 1 << 40, Code.GCP_TOKEN),
        ("nbf", True, Code.GCP_TOKEN),
        ("iat", "0", Code.GCP_TOKEN),
        ("dbgstat", "enabled", Code.HARDWARE_DEBUG),
        ("dbgstat", "disabled", Code.HARDWARE_DEBUG),
        ("dbgstat", None, Code.HARDWARE_DEBUG),
        ("secboot", False, Code.REFERENCE_VALUE),
        ("secboot", 1, Code.REFERENCE_VALUE),
        ("swname", "GCE", Code.REFERENCE_VALUE),
        ("hwmodel", "GCP_SHIELDED_VM", Code.REFERENCE_VALUE),
        ("hwmodel", ["GCP_AMD_SEV"], Code.REFERENCE_VALUE),
        ("submods.container.image_digest", f"sha256:{'00' * 32}", Code.REFERENCE_VALUE),
        ("submods.container.image_digest", IMAGE_DIGEST.hex(), Code.REFERENCE_VALUE),
        ("submods.container", None, Code.REFERENCE_VALUE),
        ("submods", [], Code.REFERENCE_VALUE),
        ("submods.container.restart_policy", "Always", Code.REFERENCE_VALUE),
        ("submods.container.cmd_override", ["sh"], Code.REFERENCE_VALUE),
        ("submods.container.env_override", {"PYTHONPATH": "/mnt"}, Code.REFERENCE_VALUE),
        ("submods.gce.project_id", "theirs", Code.REFERENCE_VALUE),
        ("submods.gce", None, Code.REFERENCE_VALUE),
        ("submods.confidential_space.support_attributes", ["USABLE"], Code.HARDWARE_TCB),
        ("submods.confidential_space.support_attributes", "UNSTABLE", Code.HARDWARE_TCB),
        ("submods.confidential_space", None, Code.HARDWARE_TCB),
        ("swversion", ["250799"], Code.HARDWARE_TCB),
        ("swversion", ["250800", "200000"], Code.HARDWARE_TCB),
        ("swversion", "250800", Code.HARDWARE_TCB),
        ("swversion", ["9999999"], Code.HARDWARE_TCB),
        ("swversion", [], Code.HARDWARE_TCB),
        ("tdx.gcp_attester_tcb_status", "OutOfDate", Code.HARDWARE_TCB),
        ("tdx", None, Code.HARDWARE_TCB),
        ("eat_nonce", Bound(composite=bytes(32)).gcp_nonce, Code.HARDWARE_BINDING),
        ("eat_nonce", [BOUND.gcp_nonce, "a nonce of another's"], Code.HARDWARE_BINDING),
        ("eat_nonce", None, Code.HARDWARE_BINDING),
    ],
)
def test_what_google_says_of_another_machine_image_or_run(
    space: ConfidentialSpace, name: str, value: object, code: Code
) -> None:
    space.said[name] = value
    with refused(code):
        appraise(space, projects=["ours"])


def test_a_machine_of_amds_has_no_status_of_intels(space: ConfidentialSpace) -> None:
    space.said |= {"hwmodel": "GCP_AMD_SEV", "tdx": None}
    assert appraise(space).status is EarStatus.WARNING


@pytest.mark.parametrize("changed", [{"projects": ["theirs"]}, {"zones": ["us-east1-a"]}])
def test_a_policy_may_name_projects_and_zones(space: ConfidentialSpace, changed: dict[str, Any]) -> None:
    with refused(Code.REFERENCE_VALUE):
        appraise(space, **changed)


def test_a_token_has_its_hour(space: ConfidentialSpace) -> None:
    for later in (-60, 0, 3599):
        assert appraise(space, later=later).status is EarStatus.WARNING
    for later in (-61, 3600, 86400):
        with refused(Code.GCP_TOKEN):
            appraise(space, later=later)
    for later in (-86401, 60 * 86400):
        with refused(Code.HARDWARE_CERTIFICATE):
            appraise(space, later=later)


Chain = Callable[[ConfidentialSpace], list[x509.Certificate]]


def of_nobody(space: ConfidentialSpace) -> list[x509.Certificate]:
    return ConfidentialSpace(now=NOW).chain


def that_ends_in_another_root(space: ConfidentialSpace) -> list[x509.Certificate]:
    return [*ConfidentialSpace(now=NOW).chain[:2], space.chain[2]]


def without_its_issuer(space: ConfidentialSpace) -> list[x509.Certificate]:
    return [space.chain[0], space.chain[2], space.chain[2]]


def of_an_issuer_that_may_not(space: ConfidentialSpace) -> list[x509.Certificate]:
    """Who has a certificate for tokens makes another one of it."""
    issued = space.certificate("Leaf", space.signer, "Intermediate", space.issuer)
    return [issued, space.certificate("Intermediate", space.issuer, "Root", space.root), space.chain[2]]


def that_is_over(space: ConfidentialSpace) -> list[x509.Certificate]:
    over = space.certificate("Leaf", space.signer, "Intermediate", space.issuer, until=timedelta(hours=-1))
    return [over, *space.chain[1:]]


def of_an_authority(space: ConfidentialSpace) -> list[x509.Certificate]:
    return [
        space.certificate("Leaf", space.signer, "Intermediate", space.issuer, is_authority=True),
        *space.chain[1:],
    ]


def that_asks_for_more(space: ConfidentialSpace) -> list[x509.Certificate]:
    unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")
    return [
        space.certificate("Leaf", space.signer, "Intermediate", space.issuer, critical=unknown),
        *space.chain[1:],
    ]


def for_another_use(space: ConfidentialSpace) -> list[x509.Certificate]:
    enciphers = x509.KeyUsage(False, False, True, False, False, False, False, False, False)
    return [
        space.certificate("Leaf", space.signer, "Intermediate", space.issuer, critical=enciphers),
        *space.chain[1:],
    ]


def with_another_kind_of_key(space: ConfidentialSpace) -> list[x509.Certificate]:
    key: Any = ec.generate_private_key(ec.SECP256R1())
    return [space.certificate("Leaf", key, "Intermediate", space.issuer), *space.chain[1:]]


@pytest.mark.parametrize(
    "chain",
    [
        of_nobody,
        that_ends_in_another_root,
        without_its_issuer,
        of_an_issuer_that_may_not,
        that_is_over,
        of_an_authority,
        that_asks_for_more,
        for_another_use,
        with_another_kind_of_key,
    ],
)
def test_certificates_lead_to_googles_root(space: ConfidentialSpace, chain: Chain) -> None:
    space.chain = chain(space)
    with refused(Code.HARDWARE_CERTIFICATE):
        appraise(space)


def test_without_the_tests_trust_its_root_is_none(space: ConfidentialSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with refused(Code.HARDWARE_CERTIFICATE):
        appraise(space)


def test_another_signer_or_what_was_put_beneath_a_signature(space: ConfidentialSpace) -> None:
    nonce = BOUND.gcp_nonce
    with refused(Code.HARDWARE_SIGNATURE):
        appraise(space, space.token(nonce, signer=space.issuer))
    head, payload, signature = space.token(nonce).split(b".")
    other = b64encode(json.dumps({**space.claims(nonce), "iat": 1}).encode()).encode()
    with refused(Code.HARDWARE_SIGNATURE):
        appraise(space, b".".join((head, other, signature)))
    with refused(Code.HARDWARE_SIGNATURE):
        appraise(space, b".".join((head, payload, b64encode(bytes(256)).encode())))


_CHAIN = {"x5c": ["AA", "AA"]}


@pytest.mark.parametrize(
    "header",
    [
        {"alg": "none"},
        {"alg": "HS256"},
        {"alg": "PS256"},
        {"crit": ["exp"]},
        _CHAIN,
        {"x5c": ["AA"] * 4},
        {"x5c": None},
        {"x5c": "AAA"},
        {"x5c": [1, 2, 3]},
        {"x5c": ["A*", "AA==", "AA=="]},
    ],
    ids=repr,
)
def test_a_header_of_another_form(space: ConfidentialSpace, header: dict[str, Any]) -> None:
    with refused(Code.HARDWARE_MALFORMED):
        appraise(space, space.token(BOUND.gcp_nonce, header=header))


@pytest.mark.parametrize(
    "token",
    [b"", b"..", b"e30.e30.", b"e30.e30.e30.e30", b"e30=.e30.e30", b"e31.e30.e30", b"\xff.e30.e30", b"e30.e30.e30\n"],
)
def test_what_is_no_token(space: ConfidentialSpace, token: bytes) -> None:
    with refused(Code.HARDWARE_MALFORMED):
        appraise(space, token)


def test_a_token_is_bounded_and_its_claims_are_read_in_one_way(space: ConfidentialSpace) -> None:
    nonce = BOUND.gcp_nonce
    said = json.dumps(space.claims(nonce))
    for payload in (
        (said[:-1] + ', "dbgstat": "enabled"}').encode(),  # a key twice: which one counts is the reader's choice
        said.replace('"secboot": true', '"secboot": true, "secboot": true').encode(),
        b"[" * 5000,
        b"[]",
        b"\xff",
    ):
        with refused(Code.HARDWARE_MALFORMED):
            appraise(space, space.token(nonce, payload=payload))
    with refused(Code.HARDWARE_MALFORMED):
        appraise(space, space.token(nonce, payload=(said + " " * MAX_TOKEN_BYTES).encode()))


def test_no_other_form_of_a_token_is_accepted(space: ConfidentialSpace) -> None:
    whole = space.token(BOUND.gcp_nonce)
    others = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 19)]
    others += [whole[:at] for at in range(1, len(whole), 307)]
    # The last of 342 characters has four bits of no byte.
    others += [whole[:-1] + one for one in (b"A", b"Q", b"g", b"w", b"B", b"R", b"h", b"x") if whole[-1:] != one]
    for other in (*others, whole + b"\n", whole + b"\x00", whole + b"A", b" " + whole):
        with pytest.raises(CheckFailedError):
            appraise(space, other)


def test_a_certificate_is_one_text(space: ConfidentialSpace) -> None:
    chain = [base64.b64encode(one.public_bytes(Encoding.DER)).decode() for one in space.chain]
    with refused(Code.HARDWARE_MALFORMED):
        appraise(space, space.token(BOUND.gcp_nonce, header={"x5c": [one + "\n" for one in chain]}))


@pytest.mark.parametrize(
    ("changed", "code", "why"),
    [
        ({"accept_issuers_word": None}, Code.POLICY_IMPOSSIBLE, "Google's word about Google's machine"),
        ({"accept_issuers_word": False}, Code.POLICY_IMPOSSIBLE, "Google's word about Google's machine"),
        ({"chain": None}, Code.CHAIN_MISSING, "names no chain"),
        ({"image_digests": []}, Code.SCHEMA, "image_digests"),
        ({"hwmodels": []}, Code.SCHEMA, "hwmodels"),
        ({"hwmodels": None}, Code.SCHEMA, "hwmodels"),
        ({"least_swversion": None}, Code.SCHEMA, "least_swversion"),
    ],
)
def test_a_policy_takes_googles_word_in_so_many_words(
    space: ConfidentialSpace, changed: dict[str, Any], code: Code, why: str
) -> None:
    with pytest.raises(FormatError, match=why) as raised:
        HardwarePolicy.from_json({"gcp": space.terms(**changed)})
    assert raised.value.code is code


def test_a_policy_without_it(space: ConfidentialSpace) -> None:
    policy = replace(HardwarePolicy.from_json({"gcp": space.terms()}), gcp=None)
    with refused(Code.CHAIN_MISSING):
        gcp_evidence.appraise(b"", bound=BOUND, now_us=1, collateral=EMPTY, policy=policy)
