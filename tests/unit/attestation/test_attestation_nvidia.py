"""Evidence of NVIDIA's GPUs: what a host could hand in instead of theirs is refused, by the code that says why."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.attestation.roots.appraised import EarStatus
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.kinds import MAX_BLOBS_BYTES
from glasshouse.attestation.roots.nvidia.nvidia_blob import GpuMode, NvidiaBlob
from glasshouse.attestation.roots.nvidia.nvidia_certificates import ocsp_name
from glasshouse.attestation.roots.nvidia.nvidia_policy import NvidiaPolicy
from glasshouse.attestation.roots.nvidia.reference_manifest import manifest_of
from glasshouse.attestation.roots.nvidia.spdm_report import SpdmReport
from glasshouse.errors import Code, FormatError
from simulators.nvidia_machine import (
    DRIVER_MANIFEST,
    NOW,
    SWITCH_MANIFEST,
    VBIOS_MANIFEST,
    NvidiaMachine,
    accepted_forms,
    certified,
    measured,
    named,
    refused,
    signed_manifest,
)

OTHER = hashlib.sha384(b"other").digest()


@pytest.fixture(scope="module")
def machine() -> NvidiaMachine:
    """A machine with one GPU; tests leave it as it is."""
    return NvidiaMachine()


@pytest.fixture(scope="module")
def node() -> NvidiaMachine:
    """A node of 8 GPUs behind 4 switches; tests leave it as it is."""
    return NvidiaMachine(gpus=8, switches=4)


@pytest.fixture(scope="module")
def pack(node: NvidiaMachine) -> Pack:
    return node.pack()


def test_a_gpu_by_itself_is_accepted(machine: NvidiaMachine) -> None:
    found = machine.appraise()
    assert found.status is EarStatus.AFFIRMING
    assert found.vector == {"configuration": 2, "executables": 2, "hardware": 2, "instance-identity": 2}
    assert found.claims["gpus"] == [machine.gpus[0].pdi.hex()]
    # OCSP's answers are the first to end: a day after they were given.
    assert found.not_after_us == int((NOW + timedelta(hours=23)).timestamp()) * 1_000_000


def test_a_node_is_accepted_and_its_evidence_is_small(node: NvidiaMachine, pack: Pack) -> None:
    blob = node.blob()
    assert node.appraise(blob, pack=pack).claims["mode"] == "ppcie"
    assert len(blob) < MAX_BLOBS_BYTES // 4


def test_a_device_about_which_nvidia_was_not_asked_is_no_known_instance(machine: NvidiaMachine) -> None:
    unasked = machine.pack(without=ocsp_name(machine.gpus[0].chain[1].der))
    assert refused(machine, Code.COLLATERAL_MISSING, pack=unasked).expected.startswith("nvidia/ocsp/")
    found = machine.appraise(pack=unasked, policy=machine.policy(device_ocsp=False))
    assert "instance-identity" not in found.vector


# Another's GPU, or too few of them.


def test_a_report_of_another_gpu_is_refused(node: NvidiaMachine, pack: Pack) -> None:
    reports = [node.report(each) for each in node.gpus]
    swapped = [(reports[1][0], reports[0][1]), *reports[1:]]
    refused(node, Code.HARDWARE_SIGNATURE, node.blob(gpus=swapped), pack=pack)


def test_a_gpu_counts_once(node: NvidiaMachine, pack: Pack) -> None:
    reports = [node.report(each) for each in node.gpus]
    refused(node, Code.GPU_COUNT, node.blob(gpus=[*reports[:7], reports[0]]), pack=pack)


def test_a_gpu_counts_once_with_another_certificate_too(node: NvidiaMachine, pack: Pack) -> None:
    reports = [node.report(each) for each in node.gpus]
    again = node.made_device("gpu 0")
    answers = {ocsp_name(each.der): node.answer(each, node.provisioner) for each in again.chain[1:2]}
    blob = node.blob(gpus=[*reports[:7], node.report(again)])
    refused(node, Code.GPU_COUNT, blob, pack=node.pack(instead=answers))


def test_one_gpu_of_eight_without_evidence_is_refused(node: NvidiaMachine, pack: Pack) -> None:
    seven = node.blob(gpus=[node.report(each) for each in node.gpus[:7]])
    refused(node, Code.GPU_COUNT, seven, pack=pack)
    # Nor by a policy for seven while the claims have eight, or the reverse.
    refused(node, Code.GPU_COUNT, seven, pack=pack, policy=node.policy(gpus=7))
    few = node.bound()
    refused(node, Code.GPU_COUNT, pack=pack, bound=replace(few, gpus=few.gpus[:7]))


def test_a_missing_switch_is_missed_by_count_and_by_the_gpus(node: NvidiaMachine, pack: Pack) -> None:
    three = node.blob(switches=[node.report(each) for each in node.switches[:3]])
    refused(node, Code.GPU_COUNT, three, pack=pack)
    refused(node, Code.GPU_TOPOLOGY, three, pack=pack, policy=node.policy(switches=3))


@pytest.mark.parametrize("kind", ["gpu", "switch"])
def test_a_device_of_another_machine_is_not_connected_with_these(node: NvidiaMachine, pack: Pack, kind: str) -> None:
    elsewhere = node.made_device(f"elsewhere {kind}", is_switch=kind == "switch")
    answer = {ocsp_name(elsewhere.chain[1].der): node.answer(elsewhere.chain[1], node.provisioner)}
    gpus, switches = ([node.report(each) for each in devices] for devices in (node.gpus, node.switches))
    (switches if kind == "switch" else gpus)[-1] = node.report(elsewhere)
    refused(node, Code.GPU_TOPOLOGY, node.blob(gpus=gpus, switches=switches), pack=node.pack(instead=answer))


def test_what_is_connected_beside_them_is_refused(node: NvidiaMachine, pack: Pack) -> None:
    more = [*(each.pdi for each in node.switches), b"8 bytes!"]
    gpus = [node.report(node.gpus[0], connected=more), *map(node.report, node.gpus[1:])]
    assert "GPU 0" in refused(node, Code.GPU_TOPOLOGY, node.blob(gpus=gpus), pack=pack).message
    switches = [node.report(node.switches[0], connected=[]), *map(node.report, node.switches[1:])]
    assert "switch 0" in refused(node, Code.GPU_TOPOLOGY, node.blob(switches=switches), pack=pack).message


def test_a_gpu_is_no_switch_and_a_switch_is_itself(node: NvidiaMachine, pack: Pack) -> None:
    gpus = [*map(node.report, node.gpus[:7]), node.report(node.switches[0])]
    switches = [*map(node.report, node.switches[1:]), node.report(node.gpus[7])]
    refused(node, Code.GPU_IDENTITY, node.blob(gpus=gpus, switches=switches), pack=pack)
    renamed = [node.report(node.switches[0], opaque={22: node.switches[1].pdi}), *map(node.report, node.switches[1:])]
    refused(node, Code.GPU_IDENTITY, node.blob(switches=renamed), pack=pack)


# Another run's, or a driver in another mode.


def test_evidence_of_another_run_is_refused(machine: NvidiaMachine) -> None:
    refused(machine, Code.HARDWARE_BINDING, bound=machine.bound(b"\1" * 32))


def test_developer_tools_are_refused(machine: NvidiaMachine) -> None:
    refused(machine, Code.HARDWARE_DEBUG, machine.blob(devtools=True))


def test_confidential_computing_that_is_off_is_refused(machine: NvidiaMachine, node: NvidiaMachine) -> None:
    refused(machine, Code.GPU_MODE, machine.blob(mode=GpuMode.OFF))
    refused(node, Code.GPU_MODE, node.blob(mode=GpuMode.OFF))


@pytest.mark.parametrize(
    "opaque", [{36: b"\1\0"}, {36: b"\2\0", 21: b"\xaa"}, {36: None, 21: b"\xaa"}], ids=["mpt", "ppcie", "before"]
)
def test_a_gpu_in_another_mode_than_its_driver_says_is_refused(
    machine: NvidiaMachine, opaque: dict[int, bytes | None]
) -> None:
    blob = machine.blob(gpus=[machine.report(machine.gpus[0], opaque=opaque)])
    refused(machine, Code.GPU_MODE, blob)


@pytest.mark.parametrize(
    "opaque",
    [
        {36: b"\3\0"},
        {36: b"\0"},
        {36: b"\0\0", 21: b"\xaa"},
        {21: b"\0"},
        {3: b"\xff"},
        {6: bytes(7)},
        {17: b"../x"},
        {22: b"7 bytes"},
    ],
    ids=str,
)
def test_opaque_data_of_another_form_is_refused(machine: NvidiaMachine, opaque: dict[int, bytes | None]) -> None:
    refused(machine, Code.HARDWARE_MALFORMED, machine.blob(gpus=[machine.report(machine.gpus[0], opaque=opaque)]))


def test_an_unlocked_switch_is_refused(node: NvidiaMachine, pack: Pack) -> None:
    switches = [node.report(node.switches[0], opaque={25: b"\0\0"}), *map(node.report, node.switches[1:])]
    refused(node, Code.GPU_MODE, node.blob(switches=switches), pack=pack)


def test_a_node_by_a_policy_without_switches_is_refused(machine: NvidiaMachine) -> None:
    refused(machine, Code.GPU_MODE, machine.blob(mode=GpuMode.PPCIE))


def test_a_chip_that_came_later_than_this_verifier_is_refused_in_words(machine: NvidiaMachine) -> None:
    later = machine.made_device("of a later product line", chip="GR100")
    answers = {ocsp_name(later.chain[1].der): machine.answer(later.chain[1], later.chain[2])}
    blob = machine.blob(gpus=[machine.report(later)])
    found = refused(machine, Code.GPU_IDENTITY, blob, pack=machine.pack(instead=answers))
    assert "none of Hopper, Blackwell or their switches" in found.message


# Firmware and drivers.


def test_an_older_driver_than_the_policy_names_is_refused(machine: NvidiaMachine) -> None:
    newer = machine.policy(manifests=("NV_GPU_DRIVER_GH100_580.95.05", VBIOS_MANIFEST))
    assert refused(machine, Code.GPU_MANIFEST, policy=newer).actual == DRIVER_MANIFEST


def test_a_driver_other_than_the_claims_say_is_refused(machine: NvidiaMachine) -> None:
    bound = machine.bound()
    refused(machine, Code.GPU_IDENTITY, bound=replace(bound, gpus=(replace(bound.gpus[0], driver="580.95.05"),)))


@pytest.mark.parametrize(
    ("blocks", "index"), [({7: OTHER}, "7"), ({3: bytes(48)}, "3"), ({45: OTHER}, "45")], ids=["other", "none", "more"]
)
def test_a_measurement_that_no_manifest_has_is_refused(
    machine: NvidiaMachine, blocks: dict[int, bytes], index: str
) -> None:
    blob = machine.blob(gpus=[machine.report(machine.gpus[0], blocks=blocks)])
    assert refused(machine, Code.GPU_MEASUREMENT, blob).message.endswith(f": {index}")


def test_a_policy_excepts_a_measurement_by_its_index(machine: NvidiaMachine) -> None:
    blob = machine.blob(gpus=[machine.report(machine.gpus[0], blocks={45: OTHER})])
    assert machine.appraise(blob, policy=machine.policy(unlisted=(45,))).status is EarStatus.AFFIRMING
    refused(machine, Code.GPU_MEASUREMENT, blob, policy=machine.policy(unlisted=(44,)))


def test_a_key_of_other_firmware_is_refused(machine: NvidiaMachine) -> None:
    blob = machine.blob(gpus=[machine.report(machine.gpus[0], opaque={20: OTHER})])
    refused(machine, Code.GPU_IDENTITY, blob)
    refused(machine, Code.GPU_IDENTITY, machine.blob(gpus=[machine.report(machine.gpus[0], opaque={20: None})]))


def with_manifest(machine: NvidiaMachine, name: str, data: bytes) -> Pack:
    return machine.pack(instead={f"nvidia/rim/{name}": data})


def test_two_manifests_of_one_measurement_are_refused(machine: NvidiaMachine) -> None:
    both = {**measured(VBIOS_MANIFEST), 7: measured(DRIVER_MANIFEST)[7]}
    data = signed_manifest(
        VBIOS_MANIFEST, machine.signing_chain, values={index: [value] for index, value in both.items()}
    )
    refused(machine, Code.GPU_MANIFEST, pack=with_manifest(machine, VBIOS_MANIFEST, data))


def test_a_manifest_may_have_alternatives(machine: NvidiaMachine) -> None:
    values = {index: [OTHER, value] for index, value in measured(VBIOS_MANIFEST).items()}
    data = signed_manifest(VBIOS_MANIFEST, machine.signing_chain, values=values)
    assert machine.appraise(pack=with_manifest(machine, VBIOS_MANIFEST, data)).status is EarStatus.AFFIRMING


@pytest.mark.parametrize(
    "edit",
    [
        (b'active="False"', b'active="True"'),
        (b"<SoftwareIdentity", b"<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><SoftwareIdentity"),
        (b"<SoftwareIdentity", b"<?xml version='1.0'?><SoftwareIdentity"),
        (b"<ns0:Payload>", b"<ns0:Payload><!-- -->"),
        (b"<ns0:Payload>", b"<ns0:Payload>&#32;"),
        (b"<ns0:Payload>", b"<ns0:Payload xml:space='preserve'>"),
        (b"</SoftwareIdentity>", b" </SoftwareIdentity>"),
        (b"</SoftwareIdentity>", b"<ns0:Payload/></SoftwareIdentity>"),
        (b"enveloped-signature", b"base64"),
        (b'URI=""', b'URI="#x"'),
        (b"xml-c14n11", b"xml-c14n11#WithComments"),
        (b"<ds:SignatureValue>", b"<ds:SignatureValue>AAAA"),
    ],
    ids=str,
)
def test_a_manifest_that_is_not_as_it_was_signed_is_refused(machine: NvidiaMachine, edit: tuple[bytes, bytes]) -> None:
    data = signed_manifest(DRIVER_MANIFEST, machine.signing_chain, edit=edit)
    refused(machine, Code.COLLATERAL_INVALID, pack=with_manifest(machine, DRIVER_MANIFEST, data))


def test_a_manifest_by_another_signer_or_of_another_version_is_refused(machine: NvidiaMachine) -> None:
    theirs = NvidiaMachine().signing_chain
    posing = [*theirs[:3], machine.manifest_root]
    responder = certified(named("R"), machine.signer_issuer, is_authority=False, extensions=[x509.ExtendedKeyUsage([])])
    for chain in (theirs, posing, [responder, *machine.signing_chain[1:]]):
        data = signed_manifest(DRIVER_MANIFEST, chain)
        refused(machine, Code.COLLATERAL_INVALID, pack=with_manifest(machine, DRIVER_MANIFEST, data))
    data = signed_manifest(DRIVER_MANIFEST, machine.signing_chain, version="580.95.05")
    refused(machine, Code.COLLATERAL_INVALID, pack=with_manifest(machine, DRIVER_MANIFEST, data))


@pytest.mark.parametrize(
    "method",
    [('URI=""', 'URI="#x"'), ("enveloped-signature", "base64"), ("xml-c14n11", "xml-c14n11#WithComments")],
    ids=str,
)
def test_a_manifest_that_is_signed_by_other_methods_is_refused(machine: NvidiaMachine, method: tuple[str, str]) -> None:
    """The signature holds, and would be of something else than what is read."""
    data = signed_manifest(DRIVER_MANIFEST, machine.signing_chain, method=method)
    refused(machine, Code.COLLATERAL_INVALID, pack=with_manifest(machine, DRIVER_MANIFEST, data))


@pytest.mark.parametrize("about", [("GPU", "GB100"), ("SWITCH", "GH100")], ids=["chip", "edition"])
def test_a_manifest_of_another_product_with_this_version_is_refused(
    machine: NvidiaMachine, about: tuple[str, str]
) -> None:
    """NVIDIA signs no name into it: one of another chip's firmware could lie in a pack under this one's."""
    data = signed_manifest(DRIVER_MANIFEST, machine.signing_chain, about=about)
    found = refused(machine, Code.COLLATERAL_INVALID, pack=with_manifest(machine, DRIVER_MANIFEST, data))
    assert found.actual.startswith(", ".join(about))


@pytest.mark.parametrize(
    "before",
    [
        (' name="GH100"', ' name="GB100"'),
        ('index="8"', 'index="7"'),
        ('index="8"', 'index="08"'),
        ('index="7" active="True"', 'index="7" active="true"'),
        ('size="48"', 'size="32"'),
        ('alternatives="1"', 'alternatives="0"'),
        ('alternatives="1"', 'alternatives="2"'),
        ("ns0:Resource", "ns0:File"),
        ("</ns0:Payload>", "</ns0:Payload><ns0:Payload/>"),
    ],
    ids=str,
)
def test_a_manifest_of_another_form_is_refused(machine: NvidiaMachine, before: tuple[str, str]) -> None:
    """As a careless signer, or one of another format, might have signed it."""
    data = signed_manifest(DRIVER_MANIFEST, machine.signing_chain, before=before)
    refused(machine, Code.COLLATERAL_INVALID, pack=with_manifest(machine, DRIVER_MANIFEST, data))


def test_a_manifest_whose_signer_has_ended_or_is_held_is_refused(machine: NvidiaMachine) -> None:
    past = machine.made_signer(until=NOW - timedelta(days=1))
    data = signed_manifest(DRIVER_MANIFEST, [past, *machine.signing_chain[1:]])
    refused(machine, Code.COLLATERAL_EXPIRED, pack=with_manifest(machine, DRIVER_MANIFEST, data))
    machine.revoked[machine.signer.der] = x509.ReasonFlags.certificate_hold
    held = machine.pack()
    machine.revoked.clear()
    refused(machine, Code.HARDWARE_REVOKED, pack=held)


# Forms.


# The library's word about certificates that have a negative number; it is none of ours.
@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_altered_evidence_is_accepted(machine: NvidiaMachine, node: NvidiaMachine, pack: Pack) -> None:
    """Of one GPU every byte, of a node here and there: all of it in tests/long."""
    for subject, around, step in ((machine, machine.pack(), 1), (node, pack, 997)):
        assert accepted_forms(subject, around, step) == []


def test_one_evidence_has_one_form(machine: NvidiaMachine) -> None:
    whole: Any = NvidiaBlob.parse(machine.blob()).to_json()
    table, report = whole["certificates"], whole["gpus"][0]["report"]
    for certificates, chain in (
        ([*table, "AAAA"], [0, 1, 2, 3, 4]),  # one that is not used
        ([table[1], table[0], *table[2:]], [1, 0, 2, 3, 4]),  # in another order
        ([*table[:4], table[3]], [0, 1, 2, 3, 4]),  # one twice
        (table, [0, 1, 2, 3, 5]),
    ):
        with pytest.raises(FormatError):
            NvidiaBlob.from_json({**whole, "certificates": certificates, "gpus": [{"chain": chain, "report": report}]})


@given(st.binary(max_size=400))
def test_parsers_refuse_in_one_way(data: bytes) -> None:
    head = bytes.fromhex("11e001ff") + bytes(33) + bytes.fromhex("11600000")
    for parse in (SpdmReport.parse, NvidiaBlob.parse, lambda data: manifest_of(data, b"")):
        for form in (data, head + data):
            with pytest.raises(FormatError):
                parse(form)


def test_a_report_has_one_form(machine: NvidiaMachine) -> None:
    """Also where its signer is careless: each block once and in order, each field once, and nothing beside them."""
    report = machine.report(machine.gpus[0])[0]
    assert SpdmReport.parse(report).nonce == machine.bound().gpu_nonce
    block, fields = 45, 45 + 64 * 55 + 34
    changes = {
        "request": (0, b"\x12"),
        "response": (37, b"\x10"),
        "how many blocks": (41, b"\x3f"),
        "their length": (42, b"\0"),
        "index": (block, b"\2"),
        "form": (block + 1, b"\2"),
        "digest": (block + 5, b"\x20"),
        "a field twice": (fields + 4 + 8, b"\6\0"),
        "a field cut short": (fields + 2, b"\xff\xff"),
    }
    altered = {name: report[:at] + new + report[at + len(new) :] for name, (at, new) in changes.items()}
    for name, form in {**altered, "longer": report + b"\0", "shorter": report[:-1]}.items():
        with pytest.raises(FormatError):
            pytest.fail(f"{name}: {SpdmReport.parse(form)}")


def test_a_policy_names_what_it_needs() -> None:
    policy = NvidiaPolicy(device_ocsp=True, gpus=1, manifests=(SWITCH_MANIFEST,))
    assert policy.needed == (f"nvidia/rim/{SWITCH_MANIFEST}",)
    for terms in ({"manifests": []}, {"manifests": ["../x"]}, {"gpus": 0}, {"device_ocsp": None}, {"debug": True}):
        with pytest.raises(FormatError):
            NvidiaPolicy.from_json({**policy.to_json(), **terms})  # type: ignore[dict-item]
