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

from glasshouse.attestation.measurements.measured import MAX_REFERENCES
from glasshouse.attestation.policy import MAX_DURATION_S, MAX_LEASE_S, MAX_RELEASES
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.define.hardware_file import kinds_wanted, read_hardware
from glasshouse.jobs.define.private import ALWAYS_LEFT_OUT, Excluded
from glasshouse.jobs.define.wanted import MACHINE, MAX_RETRIES, Deployment, Wanted, duration, wanted
from glasshouse.jobs.owner.home import read_bounded
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from glasshouse.package.limits import DEFAULT_BYTES, LEAST_INTERVAL_S, MAX_BYTES, CheckpointLimits
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import Suite
from glasshouse.wire.group import MAX_MACHINES, MAX_RANKS
from glasshouse.wire.lines.checkpoint import MAX_WORLD
from glasshouse.wire.policy import GROUP_EGRESS, RANKED, SCRIPT, WORKLOADS, Assurance, Floor, Profile
from glasshouse.workloads.builtin.script import ENVIRONMENT
from glasshouse.workloads.job_keys import (
    FLAG,
    Field,
    Kind,
    choice,
    integer,
    invalid,
    mapped,
    read,
    table,
    text,
    texts,
)
from glasshouse.workloads.registry import canonical

MAX_JOB_BYTES = 1 << 20


def _any_table(value: Any, _path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


_ANYTHING = Kind("a table", {"type": "object"}, _any_table)  # checked elsewhere: by the workload
_UNSET = Deployment()
_POLICY = (
    # Neither has a default: what a run must prove is the owner's decision.
    Field("assurance", choice(*(level.value for level in Assurance)), "What must stand behind the evidence."),
    # `off` would be a package that anything may open.
    Field("profile", choice(Profile.STANDARD.value, Profile.STRICT.value), "How much hardening a runtime must show."),
    Field("egress", texts(text(), max_items=16), 'Peers of the worker; `["group"]`: a run\'s other machines.', ()),
    Field("workspace", choice("memory", "disk"), "Of the worker's files, where nothing can be mounted.", "memory"),
    Field("max_duration", duration(MAX_DURATION_S), "A longer run is wiped.", _UNSET.max_duration_s),
    Field("lease", duration(MAX_LEASE_S), "A run without broker contact for so long is wiped.", _UNSET.lease_s),
    Field("releases", integer(1, MAX_RELEASES), "How many runtimes may be given the key.", _UNSET.releases),
    Field("valid", duration(MAX_DURATION_S), "For how long the broker may give the key.", _UNSET.valid_s),
    Field(
        "reference",
        texts(text(max_chars=64), words="names", max_items=MAX_REFERENCES),
        "Which installations may be given the key: names of `glasshouse reference`, and `this` for the one at hand; "
        "without any, that one alone.",
        (),
    ),
    Field(
        "hardware",
        text(max_chars=4096),
        "Above `software`: a TOML file beside the job file that says which machines count; stays here.",
        None,
    ),
)
_CHECKPOINTS = (
    Field("every", duration(30 * 86400, least_s=LEAST_INTERVAL_S), "The least time between two.", 600),
    Field("most", integer(1, 100_000), "How many a machine, or a group of them, may make.", 1000),
    Field("bytes", integer(4096, MAX_BYTES), "How large one may be, of each rank.", DEFAULT_BYTES),
    Field("retries", integer(0, MAX_RETRIES), "How many lost machines are replaced by the next; stays here.", 0),
)
_CHUNKS = tuple(1 << bit for bit in range(MIN_CHUNK_BYTES.bit_length() - 1, MAX_CHUNK_BYTES.bit_length()))
_PACKAGE = (
    Field("suite", choice(*(suite.value for suite in Suite)), "The bulk cipher.", Suite.AES_256_GCM.value),
    Field("chunk_bytes", choice(*_CHUNKS), "Bytes sealed at once: a power of two.", DEFAULT_CHUNK_BYTES),
    Field("backup", texts(text(), words="paths", max_items=7), "Other `owner.pub` files for key and outputs.", ()),
    Field("follow_links", FLAG, "Whether links to regular files are inputs, wherever those files lie.", False),
    Field(
        "exclude",
        texts(text(), words="gitignore patterns"),
        "What folders among the inputs do not bring along, from the job file's folder; besides "
        + ", ".join(f"`{pattern.rstrip('/')}`" for pattern in ALWAYS_LEFT_OUT)
        + " and our own runs and packages (`*.sealed`).",
        (),
    ),
)
FIELDS = (
    Field("workload", choice(*sorted(WORKLOADS)), "What is trained."),
    Field("name", text(max_chars=80), "A label for people, which stays here; by default the job file's name.", None),
    Field("gate", text(max_chars=300), "A gate, by name or URL; by default a broker on this machine.", None),
    Field(
        "inputs",
        mapped(
            text(r"[^\x00]*", words="a path"),
            text(r"[^\x00]*", words="a path: text", max_chars=4096),
            min_items=1,
            max_items=4096,
        ),
        "Name in the package = file or folder, beside the job file or below it.",
    ),
    Field("params", _ANYTHING, "What the workload takes.", {}),
    Field("env", ENVIRONMENT, "Environment of a script, sealed; what the loader or Python obeys is refused.", {}),
    Field("policy", table(*_POLICY), "What a machine must show before it gets the key, and for how long."),
    Field("package", table(*_PACKAGE), "The sealed file itself.", {}),
    Field(
        "checkpoints",
        table(*_CHECKPOINTS),
        "Sealed checkpoints, by which the run goes on at another machine; without this table, even an empty one, there "
        "are none.",
        None,
    ),
    Field("machine", table(*MACHINE), "The machine to run on, and what it may cost; stays here.", {}),
)
"""Every key of a job file, but those of `[params]`, which the workload declares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A checked job file."""

    name: str  # a label for people; stays on the owner's side
    folder: Path  # where the job file lies; inputs are below it
    workload: str  # `mlp`, `lora` or `script`
    inputs: Mapping[str, str]  # name in the package → path below `folder`
    params: Mapping[str, Json]  # the workload's own, as it wants them in the package
    floor: Floor  # what the owner signs into the package
    deployment: Deployment  # the rest of the policy
    suite: Suite  # the bulk cipher
    chunk_bytes: int  # the package's chunk size
    backups: tuple[Path, ...]  # owner files whose keys may open key store entry and outputs too
    follow_links: bool = False  # whether links to regular files are inputs, wherever those files lie
    exclude: tuple[str, ...] = ()  # gitignore patterns of what the inputs' folders do not bring along
    gate: str | None = None  # the name or URL of the gate that releases its key; None for a broker on this machine
    machine: Wanted | None = None  # where it shall run, and what that may cost


def load(path: Path) -> Job:
    """Read a job file; raises `UsageError`: `file-missing`, `job-invalid` or `policy-impossible`."""
    data = read_bounded(path, max_bytes=MAX_JOB_BYTES, what="job file")
    return parse(data, folder=path.absolute().parent, default_name=path.stem)


def parse(data: bytes, *, folder: Path, default_name: str) -> Job:
    """Check a job file's bytes; raises `UsageError` as `load` does."""
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(
            Code.JOB_INVALID,
            f"the job file is not TOML: {str(error).splitlines()[0]}",
            hint='texts stand in quotes: name = "text"; a key stands once in its table',
        ) from None
    try:
        found = read(FIELDS, document, "")
        params = _params(found["workload"], found["params"], found["env"], found["checkpoints"])
    except UsageError as error:
        raise UsageError(Code.JOB_INVALID, f"the job file's {error.message}", hint=error.hint) from None
    package = found["package"]
    Excluded(package["exclude"])
    floor, deployment = _policy(found["policy"], found["checkpoints"], folder)
    return Job(
        name=found["name"] or default_name,
        folder=folder,
        workload=found["workload"],
        inputs=found["inputs"],
        params=params,
        floor=floor,
        deployment=deployment,
        suite=Suite(package["suite"]),
        chunk_bytes=package["chunk_bytes"],
        backups=tuple(folder / path for path in package["backup"]),
        follow_links=package["follow_links"],
        exclude=package["exclude"],
        gate=found["gate"],
        machine=wanted(found["machine"], folder),
    )


def check_reachable(floor: Floor) -> None:
    """Refuse a policy that no placement of this version can satisfy; raises `UsageError`: `policy-impossible`."""
    if set(floor.egress) - {GROUP_EGRESS}:
        raise UsageError(
            Code.POLICY_IMPOSSIBLE,
            "policy.egress cannot be held to a list of peers on this placement by this version; "
            'it can be: [] or ["group"]',
            hint="put what the job needs into the package; a model of the hub is packed when the job is sealed",
        )


def _policy(policy: Mapping[str, Any], checkpoints: Mapping[str, Any] | None, folder: Path) -> tuple[Floor, Deployment]:
    try:
        floor = Floor(
            assurance=Assurance(policy["assurance"]),
            profile=Profile(policy["profile"]),
            egress=tuple(sorted(set(policy["egress"]))),
            disk=policy["workspace"] == "disk",
        )
    except FormatError as error:
        raise UsageError(Code.JOB_INVALID, f"policy.egress: {error.message}; write it as host:port, or group") from None
    check_reachable(floor)
    hardware = None if policy["hardware"] is None else read_hardware(folder / policy["hardware"])
    kinds_wanted(floor.assurance, hardware)
    deployment = Deployment(
        max_duration_s=policy["max_duration"],
        lease_s=policy["lease"],
        releases=policy["releases"],
        valid_s=policy["valid"],
        reference=policy["reference"],
        retries=0 if checkpoints is None else checkpoints["retries"],
        hardware=hardware,
    )
    return floor, deployment


def _params(
    workload: str, params: dict[str, Any], env: Mapping[str, str], checkpoints: Mapping[str, Any] | None
) -> dict[str, Json]:
    if own := [name for name in ("checkpoints", "env") if name in params]:
        raise invalid(f"params.{own[0]}", f"a table of its own: write [{own[0]}]")
    if env and workload != SCRIPT:
        raise invalid("env", "absent: it is for scripts, and this workload's settings are its [params]")
    sealed: dict[str, Any] = {"env": dict(env)} if env else {}
    if checkpoints is not None:
        found = {"every_s": checkpoints["every"], "most": checkpoints["most"], "bytes": checkpoints["bytes"]}
        sealed["checkpoints"] = CheckpointLimits(**found).to_json()
    return canonical(workload, params | sealed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """In how many processes a job runs; raises `UsageError` for a number that no group can have."""

    each: int  # on each machine
    machines: int = 1

    def __post_init__(self) -> None:
        for name, number, most in (("ranks", self.each, MAX_RANKS), ("machines", self.machines, MAX_MACHINES)):
            if not 1 <= number <= most:
                raise UsageError(Code.USAGE, f"--{name} must be from 1 to {most}, not {number}")

    def check_line(self) -> None:
        """Refuse more ranks than a checkpoint has parts; raises `UsageError`."""
        if self.each * self.machines > MAX_WORLD:
            raise UsageError(
                Code.USAGE,
                f"a job with [checkpoints] runs in at most {MAX_WORLD} ranks, not {self.each * self.machines}",
                hint="take fewer --ranks or --machines, or take [checkpoints] out",
            )

    def check(self, workload: str, floor: Floor) -> None:
        """Refuse a workload of one process, or machines that may not talk to each other; raises `UsageError`."""
        if self.machines > 1 and GROUP_EGRESS not in floor.egress:
            raise UsageError(
                Code.POLICY_IMPOSSIBLE,
                f"on {self.machines} machines the ranks talk over the network, which policy.egress does not allow",
                hint=f'egress = ["{GROUP_EGRESS}"] allows sealed connections between the run\'s own machines alone',
            )
        if workload not in RANKED:
            raise UsageError(
                Code.JOB_INVALID,
                f"the workload {workload!r} runs in one process",
                hint=f"--ranks and --machines are for the workloads {' and '.join(RANKED)}",
            )
