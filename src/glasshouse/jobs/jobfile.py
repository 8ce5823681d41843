"""The job file: what to train, on what, under which policy. Strict: what it does not know, it refuses.

Every error is one sentence that names the key and what it may be. Assurance and profile have no default:
what a run must prove is the owner's decision.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glasshouse.attestation.policy import MAX_DURATION_S, MAX_LEASE_S, MAX_RELEASES
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.durations import parse_s
from glasshouse.jobs.files import read_bounded
from glasshouse.jobs.table import Table
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from glasshouse.wire.aead import Suite
from glasshouse.wire.canonical import Json
from glasshouse.wire.policy import GROUP_EGRESS, Assurance, Floor, Profile
from glasshouse.workloads.params import KINDS, canonical

__all__ = ["REACHABLE", "Deployment", "Job", "check_reachable", "load", "parse"]

MAX_JOB_BYTES = 1 << 20
MAX_INPUTS = 4096
REACHABLE = frozenset({Assurance.SOFTWARE})
"""Levels that this version can prove on the placements that it knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """The part of the policy that belongs to a deployment, not to the package.

    Attributes:
        max_duration_s: a longer run is wiped.
        lease_s: a run without broker contact for so long is wiped.
        releases: how many runtimes may be given the key.
        valid_s: for how long the broker may give it.
    """

    max_duration_s: int = 24 * 3600
    lease_s: int = 600
    releases: int = 1
    valid_s: int = 24 * 3600

    def to_json(self) -> dict[str, int]:
        return {
            "lease_s": self.lease_s,
            "max_duration_s": self.max_duration_s,
            "releases": self.releases,
            "valid_s": self.valid_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A checked job file.

    Attributes:
        name: a label for people; stays on the owner's side.
        folder: where the job file lies; inputs are below it.
        workload: `mlp`, `lora` or `script`.
        inputs: name in the package → path below `folder`.
        params: the workload's own, as it wants them in the package.
        floor: what the owner signs into the package.
        deployment: the rest of the policy.
        suite: the bulk cipher.
        chunk_bytes: the package's chunk size.
        backups: owner files whose keys may open key store entry and outputs too.
        follow_links: whether links to regular files are inputs, wherever those files lie.
    """

    name: str
    folder: Path
    workload: str
    inputs: Mapping[str, str]
    params: Mapping[str, Json]
    floor: Floor
    deployment: Deployment
    suite: Suite
    chunk_bytes: int
    backups: tuple[Path, ...]
    follow_links: bool = False


def load(path: Path) -> Job:
    """Read a job file.

    Raises:
        UsageError: `file-missing`, `job-invalid` or `policy-impossible`.
    """
    data = read_bounded(path, max_bytes=MAX_JOB_BYTES, what="job file")
    return parse(data, folder=path.absolute().parent, default_name=path.stem)


def parse(data: bytes, *, folder: Path, default_name: str) -> Job:
    """Check a job file's bytes; raises `UsageError` as `load` does."""
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(Code.JOB_INVALID, f"the job file is not TOML: {str(error).splitlines()[0]}") from None
    job = Table(document, "")
    workload = job.choice("workload", sorted(KINDS))
    name = job.text("name", default=default_name, max_chars=80)
    inputs = job.table("inputs", required=True).texts()
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise UsageError(Code.JOB_INVALID, f"[inputs] must name 1 to {MAX_INPUTS} files or folders")
    params = _params(workload, job.table("params").rest())
    floor, deployment = _policy(job.table("policy", required=True))
    package = job.table("package")
    suite = Suite(package.choice("suite", [suite.value for suite in Suite], default=Suite.AES_256_GCM.value))
    chunk_bytes = package.integer("chunk_bytes", low=MIN_CHUNK_BYTES, high=MAX_CHUNK_BYTES, default=DEFAULT_CHUNK_BYTES)
    if chunk_bytes & (chunk_bytes - 1):
        raise package.wrong("chunk_bytes", "a power of two", chunk_bytes)
    backups = tuple(folder / path for path in package.text_list("backup", max_items=7))
    follow_links = package.flag("follow_links", default=False)
    package.end()
    job.end()
    return Job(
        name=name,
        folder=folder,
        workload=workload,
        inputs=inputs,
        params=params,
        floor=floor,
        deployment=deployment,
        suite=suite,
        chunk_bytes=chunk_bytes,
        backups=backups,
        follow_links=follow_links,
    )


def check_reachable(floor: Floor) -> None:
    """Refuse a policy that no placement of this version can satisfy, before anything is rented.

    Raises:
        UsageError: `policy-impossible`.
    """
    if floor.assurance not in REACHABLE:
        raise UsageError(
            Code.POLICY_IMPOSSIBLE,
            f"policy.assurance = {floor.assurance.value!r} cannot be proven on this placement by this version; "
            "it can prove: software",
            hint="read docs/security/threat-model.md before you lower it to software",
        )
    if set(floor.egress) - {GROUP_EGRESS}:
        raise UsageError(
            Code.POLICY_IMPOSSIBLE,
            "policy.egress cannot be held to a list of peers on this placement by this version; "
            'it can be: [] or ["group"]',
            hint="put what the job needs into the package; a model of the hub is packed when the job is sealed",
        )


def _policy(policy: Table) -> tuple[Floor, Deployment]:
    assurance = Assurance(policy.choice("assurance", [level.value for level in Assurance]))
    # `off` would be a package that anything may open.
    profile = Profile(policy.choice("profile", [Profile.STANDARD.value, Profile.STRICT.value]))
    egress = policy.text_list("egress", max_items=16)
    unset = Deployment()
    deployment = Deployment(
        max_duration_s=_duration(policy, "max_duration", MAX_DURATION_S, unset.max_duration_s),
        lease_s=_duration(policy, "lease", MAX_LEASE_S, unset.lease_s),
        releases=policy.integer("releases", low=1, high=MAX_RELEASES, default=unset.releases),
        valid_s=_duration(policy, "valid", MAX_DURATION_S, unset.valid_s),
    )
    policy.end()
    try:
        floor = Floor(assurance=assurance, profile=profile, egress=tuple(sorted(set(egress))))
    except FormatError as error:
        raise UsageError(Code.JOB_INVALID, f"policy.egress: {error.message}; write it as host:port, or group") from None
    check_reachable(floor)
    return floor, deployment


def _duration(policy: Table, key: str, limit_s: int, default_s: int) -> int:
    text = policy.text(key, default=f"{default_s}s")
    seconds = parse_s(text)
    if seconds is None or seconds > limit_s:
        raise policy.wrong(key, f"a time such as '90s', '10m', '2h' or '7d', at most {limit_s // 3600}h")
    return seconds


def _params(workload: str, params: dict[str, Any]) -> dict[str, Json]:
    try:
        return canonical(workload, params)
    except UsageError as error:
        raise UsageError(Code.JOB_INVALID, f"the job file's {error.message}", hint=error.hint) from None
