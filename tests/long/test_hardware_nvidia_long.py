"""Evidence of 8 GPUs and 4 switches, altered at every byte, and of one GPU for ten minutes: none of it is accepted."""

from __future__ import annotations

import os
import random
import time

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.nvidia.reference_manifest import manifest_of
from glasshouse.errors import FormatError
from simulators.nvidia_machine import DRIVER_MANIFEST, NvidiaMachine, accepted_forms
from tools.corpus import altered

pytestmark = [
    # The library's word about certificates that have a negative number; it is none of ours.
    pytest.mark.filterwarnings("ignore:Parsed a serial number"),
]

SECONDS = float(os.environ.get("GLASSHOUSE_CORPUS_S", "600"))


def test_no_byte_of_a_node_s_evidence_may_differ() -> None:
    node = NvidiaMachine(gpus=8, switches=4)
    assert accepted_forms(node, node.pack(), 1) == []


def test_altered_evidence_is_refused() -> None:
    """Its certificates among it, which the cases of public evidence leave as they are."""
    machine = NvidiaMachine()
    pack, bound, policy = machine.pack(), machine.bound(), machine.policy()
    end = time.monotonic() + SECONDS
    for form in altered(machine.blob(), random.Random("nvidia")):
        if time.monotonic() > end:
            break
        with pytest.raises(CheckFailedError):
            machine.appraise(form, pack=pack, bound=bound, policy=policy)


def test_altered_manifests_are_refused_or_say_the_same() -> None:
    """Space within the base64 of a signature is in no signature."""
    machine = NvidiaMachine()
    right, root = machine.manifests[DRIVER_MANIFEST], machine.roots["manifest_root_sha256"]
    found = manifest_of(right, root)
    end = time.monotonic() + SECONDS
    for form in altered(right, random.Random("manifest")):
        if time.monotonic() > end:
            break
        try:
            assert manifest_of(form, root) == found
        except FormatError:
            continue
