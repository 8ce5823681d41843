"""What is trained while it is measured: built-in jobs, or the owner's; both arms get the same one.

Law: the raw and the sealed form are made of one `Job`, and differ in the arm of the schedule alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.jobfile import Job, load
from glasshouse.jobs.define.raw_job import Plain, of_job
from glasshouse.jobs.define.seal_job import content_of
from glasshouse.jobs.define.wanted import Deployment
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES
from glasshouse.package.limits import MAX_COUNT
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.crypto import SigningKey, Suite, salted, sha256
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.workloads.measurement.slots import Plan
from glasshouse.workloads.registry import MODULES, canonical

__all__ = ["MODELS", "WORKLOADS", "Subject", "builtin", "commitment", "owners"]

WORKLOADS = tuple(MODULES)
MODELS = ("config:qwen2-tiny", "config:qwen2.5-0.5b", "config:qwen2.5-7b")
_COMMITMENT = b"glasshouse/measurement/v1/commitment\x00"
_TARGETS = ("epochs", "max_steps", "num_train_epochs", "profile", "seconds")
# Learning rates that follow from a target, at each of which a step takes as long; and what is between two steps.
_BESIDE = (
    *("lr_scheduler_type", "warmup_steps"),
    *("early_stopping_patience", "eval_data", "eval_split", "eval_steps", "eval_strategy", "load_best_model_at_end"),
    *("save_steps", "save_strategy"),
)
_DAY_S = 24 * 3600
# A few milliseconds a step on one CPU core; on a GPU it is bound by the host. It hardly learns, on purpose: a model
# that fits its data has gradients among the subnormal numbers, on which a CPU takes three times as long.
_MLP: dict[str, Any] = {
    "synthetic_rows": 2048,
    "synthetic_features": 32,
    "width": 128,
    "depth": 2,
    "learning_rate": 1e-7,
}
_LORA: dict[str, Any] = {
    "data": "train.jsonl",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "max_grad_norm": 1.0,
    "max_length": 64,
}
_TINY: dict[str, Any] = {"dtype": "float32", "per_device_train_batch_size": 4, "learning_rate": 1e-6}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "per_device_train_batch_size": 1, "learning_rate": 1e-5}
_EXAMPLES = 256


@dataclass(frozen=True, slots=True)
class Subject:
    """A job that can be measured: for both arms, without a schedule."""

    job: Job

    def planned(self, plan: Plan, **targets: Json) -> Job:
        """Return the job under a schedule.

        Args:
            targets: at which it ends before its schedule, such as ``seconds=10``.

        Raises:
            UsageError: `job-invalid`.
        """
        table: dict[str, Any] = {**self.job.params, **targets, "slots": plan.to_json()}
        return replace(self.job, params=canonical(self.job.workload, table))

    def plain(self, plan: Plan, **targets: Json) -> Plain:
        """Return the job in the clear; raises `UsageError`."""
        return of_job(self.planned(plan, **targets))

    def timed(self, seconds: float) -> Mapping[str, Json]:
        """Return the target with which a job ends by itself after a time; a script has none, and is stopped."""
        return {} if self.job.workload == "script" else {"seconds": repr(float(seconds))}

    @property
    def sha256(self) -> bytes:
        """Return the digest of all that is trained and how it is sealed; anyone could compare it with a guess.

        Raises:
            UsageError: as `content_of`, or `source-changed`.
        """
        job, files = self.job, {}
        for source in content_of(job).sources:
            digest = hashlib.sha256()
            with source.open() as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
            files[source.path] = digest.hexdigest()
        sealed = {"chunk_bytes": job.chunk_bytes, "profile": job.floor.profile.value, "suite": job.suite.value}
        return sha256(encode({"files": files, "params": job.params, **sealed}))

    @property
    def threads(self) -> int | None:
        """Of each arm; None where the framework chooses."""
        params = self.job.params
        found = params.get("threads")
        return found if isinstance(found, int) else 1 if params.get("deterministic") is True else None


def builtin(workload: str, folder: Path, *, model: str | None = None, device: str = "auto") -> Subject:
    """Return a built-in job, its data written into a folder.

    Args:
        workload: `mlp` or `lora`.
        model: one of `MODELS`, for `lora`; the tiny one by default.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        UsageError: `usage` for another model.
    """
    if model is not None and (workload != "lora" or model not in MODELS):
        raise UsageError(
            Code.USAGE, f"--model goes with --workload lora and is one of {', '.join(MODELS)}, not {model!r}"
        )
    if workload == "mlp":
        params: dict[str, Any] = dict(_MLP)
        (folder / "note.txt").write_text("synthetic data, made from the seed\n")
        inputs = {"note.txt": "note.txt"}
    else:
        chosen = model or MODELS[0]
        params = _LORA | (_TINY if chosen == MODELS[0] else _LARGE) | {"model": chosen}
        _write_examples(folder / "train.jsonl")
        inputs = {"train.jsonl": "train.jsonl"}
    params |= {"device": device, "deterministic": True}
    return Subject(
        Job(
            name=workload if model is None else f"{workload} {model.removeprefix('config:')}",
            folder=folder,
            workload=workload,
            inputs=inputs,
            params=canonical(workload, params),
            floor=Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD, egress=()),
            deployment=Deployment(max_duration_s=_DAY_S),
            suite=Suite.AES_256_GCM,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            backups=(),
        )
    )


def owners(path: Path, workload: str, *, device: str | None = None) -> Subject:
    """Return the owner's own job, which goes on until its schedule ends; a script may end before.

    Args:
        workload: what it has to be.
        device: in the place of the job's own, for `mlp` and `lora`.

    Raises:
        UsageError: as `jobfile.load`; `usage` for a job of another workload.
    """
    job = load(path)
    if job.workload != workload:
        raise UsageError(Code.USAGE, f"{path} is a job of the workload {job.workload}, not {workload}")
    params: dict[str, Any] = {"deterministic": True, **job.params}
    params = {name: value for name, value in params.items() if name not in (*_TARGETS, *_BESIDE)}
    if device is not None and workload != "script":
        params["device"] = device
    # The record is one output more than the job has.
    if isinstance(params.get("max_outputs"), int):
        params["max_outputs"] = min(params["max_outputs"] + 1, MAX_COUNT)
    deployment = replace(job.deployment, releases=1, max_duration_s=max(job.deployment.max_duration_s, _DAY_S))
    return Subject(replace(job, params=canonical(workload, params), deployment=deployment))


def commitment(owner: SigningKey, seed: bytes, subject_sha256: bytes) -> bytes:
    """Return what a design has of its job: only the owner can make it again, and compare (spec section 8).

    Args:
        owner: whose Ed25519 signatures are a function of key and message, so that nothing has to be kept.
        seed: the design's.
    """
    return salted(sha256(owner.sign(_COMMITMENT + seed)), subject_sha256)


def _write_examples(path: Path) -> None:
    """Write sums as instructions: the same file on every machine."""
    with path.open("w", encoding="ascii") as out:
        for number in range(_EXAMPLES):
            left, right = number * 7 % 100, number * 13 % 100
            # Short, for a tokenizer of bytes: the prompt around it takes most of the 64 tokens.
            record = {"instruction": f"{left}+{right}", "output": f"{left + right}, which is the sum of both"}
            out.write(json.dumps(record) + "\n")
