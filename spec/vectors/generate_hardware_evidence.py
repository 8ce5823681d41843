"""Writes spec/vectors/hardware-evidence/ again: bodies in two parts, what binds evidence, levels, policies and packs.

Run: python spec/vectors/generate_hardware_evidence.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "hardware-evidence"
sys.path.insert(0, str(_HERE.parents[1] / "tests"))

from glasshouse.attestation.detached import MIN_FIRST_BYTES  # noqa: E402
from glasshouse.attestation.evidence import EVIDENCE_TYPE, MAX_EVIDENCE_BYTES  # noqa: E402
from glasshouse.attestation.roots.appraised import Blob  # noqa: E402
from glasshouse.attestation.roots.binding import Bound, activation_mac  # noqa: E402
from glasshouse.attestation.roots.collateral import MAX_ITEMS, Item, Pack  # noqa: E402
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy  # noqa: E402
from glasshouse.attestation.roots.kinds import MAX_BLOB_BYTES  # noqa: E402
from glasshouse.errors import Code  # noqa: E402
from glasshouse.wire import dsse  # noqa: E402
from glasshouse.wire.canonical import Json, b64encode, encode  # noqa: E402
from glasshouse.wire.crypto import sha256  # noqa: E402
from glasshouse.wire.policy import Assurance  # noqa: E402
from simulators.hardware_objects import hardware_objects  # noqa: E402
from simulators.key_release_world import World, digest, signing_key  # noqa: E402

Case = tuple[str, dict[str, Any]]
_DEFAULT_AGES = {"crl": 30 * 86_400, "ocsp": 86_400, "tcb": 30 * 86_400}
GPUS, REPORT = b"eight GPUs " * 20, b"a processor's report " * 20
MISSING, UNEXPECTED, INVALID = (
    code.value for code in (Code.HARDWARE_MISSING, Code.HARDWARE_UNEXPECTED, Code.MESSAGE_INVALID)
)


def case(kind: str, name: str, description: str, given: dict[str, Any], code: str | None = None, **found: Json) -> Case:
    return f"{kind}-{name}", {
        "description": description,
        "expect": {"code": code, **found},
        "input": given,
        "kind": kind,
    }


def body_cases() -> Iterator[Case]:
    """Section 2: what follows the envelope."""
    world = World()
    claims = world.claims(assurance=Assurance.GPU_TEE)
    listed = [Blob.of("nvidia", GPUS), Blob.of("sev-snp", REPORT)]

    def signed(hardware: Sequence[Blob] = listed) -> bytes:
        return world.message(claims, hardware=hardware)

    def told(listing: list[Json]) -> bytes:
        payload = json.loads(dsse.Envelope.parse(signed(), max_bytes=MAX_EVIDENCE_BYTES).payload)
        keys = [world.evidence_key, world.launch_key]
        return dsse.sign(EVIDENCE_TYPE, encode({**payload, "hardware": listing}), keys).encode()

    def body(envelope: bytes, rest: bytes = GPUS + REPORT, length: int | None = None) -> dict[str, Any]:
        framed = (len(envelope) if length is None else length).to_bytes(4, "big") + envelope + rest
        return {"body": b64encode(framed), "launch_public": b64encode(world.launch.launch_public)}

    alone = world.message()
    bare = {"body": b64encode(alone), "launch_public": b64encode(world.launch.launch_public)}
    yield case("body", "bare", "Without a blob it is the envelope.", bare, blobs={})
    blobs: Json = {"nvidia": sha256(GPUS).hex(), "sev-snp": sha256(REPORT).hex()}
    given, digest_hex = body(signed()), sha256(signed()).hex()
    yield case("body", "two", "Two blobs, in the order of the list.", given, blobs=blobs, evidence_sha256=digest_hex)
    short, other = Code.HARDWARE_LENGTH.value, Code.HARDWARE_DIGEST.value
    for name, description, rest, code in (
        ("cut", "One byte less.", (GPUS + REPORT)[:-1], short),
        ("longer", "One byte more.", GPUS + REPORT + b"\0", short),
        ("nothing", "Nothing behind it.", b"", short),
        ("swapped", "In the other order.", REPORT + GPUS, other),
        ("changed", "One byte is another.", b"E" + (GPUS + REPORT)[1:], other),
    ):
        yield case("body", name, description, body(signed(), rest), code)
    lonely = {**bare, "body": b64encode(signed())}
    yield case("body", "alone", "The envelope without what it lists.", lonely, short)
    yield case("body", "framed-bare", "A length before an envelope that lists nothing.", body(alone, b""), short)
    yield case("body", "unasked", "Bytes behind an envelope that lists nothing.", body(alone), short)
    yield case("body", "length-cut", "A length that ends within the envelope.", body(signed(), length=5000), INVALID)
    least = MIN_FIRST_BYTES - 1
    yield case("body", "length-small", "An envelope of 4,095 bytes.", body(b"{" * least), INVALID)
    large = body(b"{" * 5000, length=MAX_EVIDENCE_BYTES + 1)
    yield case("body", "length-large", "A length above 32,768.", large, Code.MESSAGE_TOO_LARGE.value)
    forged = world.message(claims, hardware=listed, keys=[world.evidence_key, signing_key("thief")])
    forged_code = Code.EVIDENCE_SIGNATURE.value
    yield case("body", "unsigned", "Not signed by the launch key.", body(forged, GPUS), forged_code)
    one: dict[str, Json] = {"bytes": 1, "kind": "tpm", "sha256": "00" * 32}
    for name, description, listing in (
        ("unsorted", "A list that is not sorted by kind.", [{**one, "kind": kind} for kind in ("tpm", "tdx")]),
        ("unknown-kind", "A kind that there is not.", [{**one, "kind": "sgx"}]),
        ("empty-blob", "A blob of no bytes.", [{**one, "bytes": 0}]),
        ("large-blob", "A blob of one byte too many.", [{**one, "bytes": MAX_BLOB_BYTES + 1}]),
        ("large", "Blobs that are too large together.", [{**one, "bytes": MAX_BLOB_BYTES}] * 2),
        ("many", "Seventeen blobs.", [one] * 17),
        ("data", "A blob in the envelope.", [{**one, "data": "AA"}]),
    ):
        yield case("body", name, description, body(told(listing)), INVALID)


def binding_cases() -> Iterator[Case]:
    """Section 3: what evidence carries."""
    secret = digest("secret")
    for name, composite, gpus in (("plain", digest("composite"), b""), ("gpus", digest("another"), sha256(GPUS))):
        bound = Bound(composite=composite, gpus_sha256=gpus)
        yield case(
            "binding",
            name,
            "Every value that follows from a composite.",
            {"composite": composite.hex(), "nvidia_sha256": gpus.hex(), "secret": secret.hex()},
            activation=activation_mac(secret, composite).hex(),
            gcp_nonce=bound.gcp_nonce,
            gpu_nonce=bound.gpu_nonce.hex(),
            report_data=bound.report_data.hex(),
        )


def level_cases() -> Iterator[Case]:
    """Section 1: which kinds complete a level."""
    for number, (level, kinds, code) in enumerate(
        (
            ("software", (), None),
            ("software", ("nvidia",), UNEXPECTED),
            ("tpm", ("tpm",), None),
            ("tpm", ("gcp",), None),
            ("tpm", (), MISSING),
            ("tpm", ("gcp", "tpm"), UNEXPECTED),
            ("tpm", ("nvidia", "tpm"), UNEXPECTED),
            ("cpu-tee", ("azure",), None),
            ("cpu-tee", ("dstack",), None),
            ("cpu-tee", ("tpm",), MISSING),
            ("cpu-tee", ("gcp",), MISSING),
            ("cpu-tee", ("sev-snp", "tdx"), UNEXPECTED),
            ("cpu-tee", ("nvidia", "tdx"), UNEXPECTED),
            ("gpu-tee", ("nvidia", "tdx"), None),
            ("gpu-tee", ("nvidia", "tpm"), MISSING),
            ("gpu-tee", ("tdx",), MISSING),
            ("gpu-tee", ("nvidia", "nvidia", "tdx"), UNEXPECTED),
        )
    ):
        given = {"kinds": list(kinds), "level": level}
        yield case("level", f"{number:02}", f"{', '.join(kinds) or 'nothing'} at {level}.", given, code)


def pack_cases() -> Iterator[Case]:
    """Section 5: the form of a pack."""
    first, second = (
        Item(name="amd/crl/Milan", data=b"\x30\x00"),
        Item(name="nvidia/rim/NV_GPU_DRIVER_GH100_1", data=b"<x/>"),
    )
    pack = Pack(items=(first, second))
    value: dict[str, Any] = pack.to_json()
    schema = Code.SCHEMA.value
    for name, description, items, changes, code in (
        ("empty", "Nothing in it.", [], {}, None),
        ("two", "Two items.", value["items"], {}, None),
        ("unsorted", "Not sorted by name.", value["items"][::-1], {}, schema),
        ("twice", "One item twice.", value["items"][:1] * 2, {}, schema),
        ("maker", "Of another maker.", [{**value["items"][0], "name": "arm/crl/x"}], {}, schema),
        ("path", "A name that leads elsewhere.", [{**value["items"][0], "name": "amd/../x"}], {}, schema),
        ("many", "One item too many.", [{"data": "", "name": f"amd/{n:03}"} for n in range(MAX_ITEMS + 1)], {}, schema),
        ("kind", "Of another version.", [], {"kind": "https://glasshouse.dev/collateral/v2"}, schema),
        ("roots", "With roots of its own.", [], {"roots": []}, schema),
    ):
        text = encode({**value, "items": items, **changes})
        found = {} if code else {"sha256": sha256(text).hex()}
        yield case("pack", name, description, {"pack": text.decode()}, code, **found)
    spaced = encode(value).replace(b'"items":', b'"items": ').decode()
    yield case("pack", "spaced", "Not canonical.", {"pack": spaced}, Code.NOT_CANONICAL.value)


def policy_cases() -> Iterator[Case]:
    """Section 4, and the objects of section 7."""
    objects, levels = hardware_objects(), {"gcp": "tpm", "nvidia": "gpu-tee", "tpm": "tpm"}
    schema, chain, impossible = (code.value for code in (Code.SCHEMA, Code.CHAIN_MISSING, Code.POLICY_IMPOSSIBLE))

    def of(
        name: str, description: str, hardware: dict[str, Any], code: str | None = None, *, level: str = "cpu-tee"
    ) -> Case:
        found: dict[str, Json] = {}
        if code is None:
            policy = HardwarePolicy.from_json(hardware)
            found = {"kinds": list(policy.wanted(Assurance(level))), "sha256": sha256(policy.encode()).hex()}
        return case("policy", name, description, {"assurance": level, "hardware": hardware}, code, **found)

    for kind, whole in objects.items():
        level = levels.get(kind, "cpu-tee")
        beside = {"tdx": objects["tdx"]} if kind == "nvidia" else {}
        yield of(kind, f"What {kind} has to show, at {level}.", {kind: whole, **beside}, level=level)
        unknown = {kind: {**whole, "debug": True}, **beside}
        yield of(f"{kind}-unknown", "A member that there is not.", unknown, schema, level=level)
        if "chain" in whole:
            lacking = {name: value for name, value in whole.items() if name != "chain"}
            yield of(f"{kind}-chain", "Nothing leads to the runtime.", {kind: lacking}, chain, level=level)
            yield of(f"{kind}-ima", "A chain that counts for nothing.", {kind: {**whole, "chain": "ima"}}, schema)
    for name, word in (("word", {}), ("word-false", {"accept_issuers_word": False})):
        silent = {member: value for member, value in objects["gcp"].items() if member != "accept_issuers_word"}
        yield of(f"gcp-{name}", "Google's word, which no one took.", {"gcp": silent | word}, impossible, level="tpm")
    tdx, tpm, snp = objects["tdx"], objects["tpm"], objects["sev-snp"]
    for name, description, hardware, code, level in (
        ("none", "No kind.", {}, chain, "tpm"),
        ("two", "Two processors' kinds.", {"sev-snp": snp, "tdx": tdx}, chain, "cpu-tee"),
        ("below", "A TPM for a processor's level.", {"tpm": tpm}, chain, "cpu-tee"),
        ("gpus-alone", "GPUs without a processor.", {"nvidia": objects["nvidia"]}, chain, "gpu-tee"),
        ("no-gpus", "A processor without GPUs.", {"tdx": tdx}, chain, "gpu-tee"),
        ("sgx", "A kind that there is not.", {"sgx": {}, "tdx": tdx}, schema, "cpu-tee"),
    ):
        yield of(name, description, hardware, code, level=level)
    for register in ("10", "16", "23"):
        more = {"tpm": tpm | {"pcrs": tpm["pcrs"] | {register: ["ab" * 32]}}}
        yield of(f"tpm-pcr-{register}", "A register that all can extend or reset.", more, impossible, level="tpm")
    for missing in ("0", "4", "8"):
        fewer = {"tpm": tpm | {"pcrs": {name: value for name, value in tpm["pcrs"].items() if name != missing}}}
        yield of(f"tpm-no-pcr-{missing}", "Without a register that an image boots by.", fewer, chain, level="tpm")
    anyone = {"tpm": {name: value for name, value in tpm.items() if name not in {"aks", "ek_roots"}}}
    yield of("tpm-any", "Any TPM.", anyone, impossible, level="tpm")
    root = {"tpm": tpm | {"ek_roots": [b64encode(b"root")]}}
    yield of("tpm-root", "A root that is no certificate.", root, impossible, level="tpm")
    hosts = {name: value for name, value in snp.items() if name != "measurements"} | {"host_data": ["ab" * 32]}
    yield of("sev-snp-host-data", "What the host chooses, alone.", {"sev-snp": hosts}, chain)
    yield of("sev-snp-zero-key", "A key of zeros.", {"sev-snp": snp | {"id_keys": ["00" * 48]}}, impossible)
    azure = objects["azure"]
    above = {"azure": azure | {"sev-snp": azure["sev-snp"] | {"vmpl": 2}}}
    yield of("azure-vmpl", "A paravisor that another is above of.", above, impossible)
    yield of("tdx-revoked", "A platform that is revoked, excepted.", {"tdx": tdx | {"statuses": ["Revoked"]}}, schema)
    nothing = {"dstack": objects["dstack"] | {"compose_hashes": []}}
    yield of("dstack-anything", "Any compose file.", nothing, schema)
    for name, description, ages, code in (
        ("one", "One age, and the others by default.", {"ocsp": 3600}, None),
        ("all", "Each by its default, told: the same policy as without.", _DEFAULT_AGES, None),
        ("empty", "Each by default.", {}, None),
        ("short", "Less than a minute.", {"crl": 59}, schema),
        ("long", "More than 400 days.", {"tcb": 400 * 86_400 + 1}, schema),
        ("null", "Null for a default.", {"crl": None}, schema),
        ("unknown", "An age of what there is not.", {"rim": 3600}, schema),
    ):
        yield of(f"ages-{name}", description, {"collateral": ages, "tdx": tdx}, code)


def build() -> dict[str, bytes]:
    """Return every file's name and content."""
    files: dict[str, bytes] = {}
    for cases in (body_cases(), binding_cases(), level_cases(), pack_cases(), policy_cases()):
        for name, document in cases:
            if f"{name}.json" in files:
                raise ValueError(f"two vectors with the name {name}")
            files[f"{name}.json"] = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
    return files


def main() -> None:
    files = build()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    print(f"{len(files)} vectors in {FOLDER.relative_to(_HERE.parents[1])}")


if __name__ == "__main__":
    main()
