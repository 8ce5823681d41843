"""What is trained while it is measured: built-in jobs, or the owner's; both arms get the same one.

Laws: the raw and the sealed form are made of one `Job`, so that inputs and parameters are equal; the job says
`paced`, and goes on for as long as it is let.
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from glasshouse.bench.overhead.facts import plain
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.home import Home
from glasshouse.jobs.identity import Identity
from glasshouse.jobs.jobfile import Deployment, Job, load
from glasshouse.jobs.raw import Plain, of_job
from glasshouse.jobs.seal import seal
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES
from glasshouse.wire.aead import Suite
from glasshouse.wire.canonical import Json
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.workloads.params import canonical, measured

__all__ = ["MODELS", "WORKLOADS", "Subject", "builtin", "owners"]

WORKLOADS = ("mlp", "lora", "script")
MODELS = ("config:qwen2-tiny", "config:qwen2.5-0.5b", "config:qwen2.5-7b")
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
    "rank": 4,
    "alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "gradient_clip": 1.0,
    "max_length": 64,
}
_TINY: dict[str, Any] = {"dtype": "float32", "batch_size": 4, "learning_rate": 1e-6}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "batch_size": 1, "learning_rate": 1e-5}
_EXAMPLES = 256
# Facts of the parameters that a reader of the report wants to know.
_SHOWN = (
    "batch_size",
    "deterministic",
    "device",
    "dtype",
    "max_length",
    "model",
    "rank",
    "synthetic_features",
    "synthetic_rows",
    "threads",
    "width",
    "depth",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A job that can be measured.

    Args:
        job: for both arms.
    """

    _: KW_ONLY
    job: Job

    @property
    def plain(self) -> Plain:
        """The job in the clear; raises `UsageError`."""
        return of_job(self.job)

    def sealed(self, home: Home, identity: Identity) -> Path:
        """Seal the job into the measurement's home, and return the package; raises `UsageError`."""
        return seal(self.job, out=home.path / "job.sealed", home=home, identity=identity).path

    @property
    def unit(self) -> str:
        return "epoch" if self.job.workload == "mlp" else "step"

    def to_json(self) -> dict[str, Json]:
        """Return the workload as the statement describes it (`Facts.workload`)."""
        params = self.job.params
        facts: dict[str, Json] = {}
        for name in _SHOWN:
            value = params.get(name)
            if isinstance(value, str):
                value = value.removeprefix("config:")
                value = value if value.replace("-", "").replace(".", "").isalnum() and len(value) < 32 else None
            if isinstance(value, (str, int)):
                facts[name] = value
        return {
            "facts": facts,
            "kind": self.job.workload,
            "name": plain(self.job.name) or self.job.workload,
            "unit": self.unit,
        }


def builtin(workload: str, folder: Path, *, model: str | None = None, device: str = "auto") -> Subject:
    """Return a built-in job, its data written into a folder.

    Args:
        workload: `mlp` or `lora`.
        folder: gets the data.
        model: one of `MODELS`, for `lora`; the tiny one by default.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        UsageError: `usage` for another workload or model.
    """
    if workload == "script":
        raise UsageError(Code.USAGE, "the workload script is your own: name its job file with --job")
    if model is not None and (workload != "lora" or model not in MODELS):
        raise UsageError(
            Code.USAGE, f"--model goes with --workload lora and is one of {', '.join(MODELS)}, not {model!r}"
        )
    if workload == "mlp":
        params: dict[str, Any] = dict(_MLP)
        (folder / "note.txt").write_text("synthetic data, made from the seed\n")
        inputs = {"note.txt": "note.txt"}
    elif workload == "lora":
        chosen = model or MODELS[0]
        params = _LORA | (_TINY if chosen == MODELS[0] else _LARGE) | {"model": chosen}
        _write_examples(folder / "train.jsonl")
        inputs = {"train.jsonl": "train.jsonl"}
    else:
        raise UsageError(Code.USAGE, f"the workload is one of {', '.join(WORKLOADS)}, not {workload!r}")
    params |= {"device": device, "deterministic": True}
    name = workload if model is None else f"{workload} {model.removeprefix('config:')}"
    return Subject(
        job=Job(
            name=name,
            folder=folder,
            workload=workload,
            inputs=inputs,
            params=canonical(workload, measured(workload, params)),
            floor=Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD, egress=()),
            deployment=Deployment(max_duration_s=_DAY_S),
            suite=Suite.AES_256_GCM,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            backups=(),
        )
    )


def owners(path: Path, workload: str, *, device: str | None = None) -> Subject:
    """Return the owner's own job, made to go on for as long as it is let; a script ends when it ends.

    Args:
        path: the job file.
        workload: what it has to be.
        device: in the place of the job's own, for `mlp` and `lora`.

    Raises:
        UsageError: as `jobfile.load`; `usage` for a job of another workload.
    """
    job = load(path)
    if job.workload != workload:
        raise UsageError(Code.USAGE, f"{path} is a job of the workload {job.workload}, not {workload}")
    params: dict[str, Any] = {"deterministic": True, **job.params}
    if device is not None and workload != "script":
        params["device"] = device
    deployment = replace(job.deployment, releases=1, max_duration_s=max(job.deployment.max_duration_s, _DAY_S))
    checked = canonical(workload, measured(workload, params))
    return Subject(job=replace(job, params=checked, deployment=deployment))


def _write_examples(path: Path) -> None:
    """Write sums as instructions: the same file on every machine."""
    with path.open("w", encoding="ascii") as out:
        for number in range(_EXAMPLES):
            left, right = number * 7 % 100, number * 13 % 100
            # Short, for a tokenizer of bytes: the prompt around it takes most of the 64 tokens.
            record = {"instruction": f"{left}+{right}", "output": f"{left + right}, which is the sum of both"}
            out.write(json.dumps(record) + "\n")
