"""The parameters of each workload, checked without any training framework.

Laws: ``parse(kind, canonical(kind, p)) == parse(kind, p)``; `canonical` is idempotent.

Every workload takes `paced`: the job is measured, so it stands at its first step until it is told to go on and
ends when it is told to (ADR 0009). Such a job has no target of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeAlias

from glasshouse.errors import Code, UsageError
from glasshouse.wire.canonical import Json
from glasshouse.workloads.fields import Table, invalid

__all__ = ["CONFIGS", "KINDS", "LoraParams", "MlpParams", "Params", "ScriptParams", "canonical", "measured", "parse"]

# Architectures with random weights; their dimensions are in `architectures`.
CONFIGS = ("qwen2-tiny", "qwen2.5-0.5b", "qwen2.5-7b")

_DEVICES = ("auto", "cpu", "cuda")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[A-Za-z0-9._,\s-]*\])?\s*([<>=!~][^;@]*)?")
# Parts of a path that are neither `.` nor `..`, and a slash at the end or none.
_FOLDER = re.compile(r"(?=.{1,100}\Z)(?!\.{1,2}(/|\Z))[^/\x00-\x1f\x7f\\]+(/(?!\.{1,2}(/|\Z))[^/\x00-\x1f\x7f\\]+)*/?")
_MAX_FOLDERS = 16
_MAX_STEPS = 10**9
_MAX_RESTARTS = 100
_MAX_SECONDS = 30 * 86400.0
_TARGETS = ("epochs", "seconds", "steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpParams:
    """Parameters of `mlp`.

    Attributes:
        data: input with a CSV table with a header line; absent means synthetic data.
        label: its column to predict; the last one by default.
        synthetic_rows, synthetic_features, synthetic_classes: size of synthetic data.
        held_out: share of the rows kept out of training, to report accuracy on.
        width, depth: hidden units and number of hidden layers.
        epochs, seconds: when to stop, whichever comes first; 200 epochs where neither is given.
        learning_rate: of Adam.
        dtype: `float32` or `bfloat16`.
        device: `auto` takes a GPU where there is one.
        seed, deterministic, threads, paced: see `lora`.
    """

    KIND: ClassVar[str] = "mlp"

    data: str | None
    label: str | None
    synthetic_rows: int
    synthetic_features: int
    synthetic_classes: int
    held_out: float
    width: int
    depth: int
    epochs: int | None
    seconds: float | None
    learning_rate: float
    dtype: str
    device: str
    seed: int
    deterministic: bool
    threads: int | None
    paced: bool

    @classmethod
    def from_table(cls, table: Table) -> MlpParams:
        common = _common(table)
        data, label = table.optional_text("data"), table.optional_text("label")
        epochs = table.optional_integer("epochs", low=1, high=_MAX_STEPS)
        seconds = table.optional_number("seconds", low=0.01, high=_MAX_SECONDS)
        if data is None and label is not None:
            raise invalid("label", "absent where there is no data")
        return cls(
            data=data,
            label=label,
            synthetic_rows=table.integer("synthetic_rows", 4096, low=2, high=10**8),
            synthetic_features=table.integer("synthetic_features", 32, low=1, high=10**5),
            synthetic_classes=table.integer("synthetic_classes", 2, low=2, high=10**4),
            held_out=table.number("held_out", 0.0, low=0.0, high=0.9),
            width=table.integer("width", 64, low=1, high=10**6),
            depth=table.integer("depth", 2, low=1, high=1000),
            epochs=_target("epochs", epochs, seconds, common, otherwise=200),
            seconds=seconds,
            learning_rate=table.number("learning_rate", 1e-3, low=1e-9, high=100.0),
            dtype=table.choice("dtype", "float32", ("float32", "bfloat16")),
            **common,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraParams:
    """Parameters of `lora`.

    Attributes:
        model: ``config:NAME`` (random weights), ``inputs:FOLDER`` (a model in the package) or a hub id.
        revision: of a hub id; name a commit, so that it cannot change under you.
        base_name: what the adapter's file says its base is, for whoever loads it with peft: a hub id, or a folder
            beside them; by default the hub id, the last part of the packed folder's name, or the architecture's name.
        data: input with one JSON object a line: instruction, optional input, output.
        rank, alpha, dropout: of the adapter; updates are scaled by alpha / rank, 2 by default.
        target_modules: names of the linear layers that get an adapter.
        dtype: of the base weights; the adapter itself is trained in float32.
        learning_rate, weight_decay, warmup_steps: of AdamW, constant after the warm-up.
        batch_size: examples in a step.
        max_length: tokens of an example; longer ones are cut, those left without an answer skipped.
        answers_only: whether only the tokens of the answer count in the loss.
        gradient_clip: largest norm of the gradient; 0 turns clipping off.
        steps, seconds: when to stop, whichever comes first; 100 steps where neither is given.
        checkpoint_every: steps between checkpoints of the adapter; 0 for none.
        fail_on_nonfinite: end the run with `nonfinite-loss` when the loss is no finite number.
        gradient_checkpointing: trade time for memory.
        device: `auto` takes a GPU where there is one.
        seed: of weights, adapter and order of examples.
        deterministic: bit-equal results from run to run on the same machine and versions.
        threads: of the CPU; 1 in deterministic mode, else the framework's choice.
        paced: whether the job is measured: it then has neither `steps` nor `epochs` nor `seconds`.
    """

    KIND: ClassVar[str] = "lora"

    model: str
    revision: str | None
    base_name: str
    data: str
    rank: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    dtype: str
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    batch_size: int
    max_length: int
    answers_only: bool
    gradient_clip: float
    steps: int | None
    seconds: float | None
    checkpoint_every: int
    fail_on_nonfinite: bool
    gradient_checkpointing: bool
    device: str
    seed: int
    deterministic: bool
    threads: int | None
    paced: bool

    @classmethod
    def from_table(cls, table: Table) -> LoraParams:
        common = _common(table)
        steps = table.optional_integer("steps", low=1, high=_MAX_STEPS)
        seconds = table.optional_number("seconds", low=0.01, high=_MAX_SECONDS)
        targets = table.texts("target_modules", ("q_proj", "v_proj"))
        if not targets or len(set(targets)) != len(targets) or not all(targets):
            raise invalid("target_modules", "a list of different module names")
        model = _model(table.text("model"))
        return cls(
            model=model,
            revision=table.optional_text("revision"),
            base_name=table.optional_text("base_name") or _base_name(model),
            data=table.text("data", "train.jsonl"),
            rank=table.integer("rank", 4, low=1, high=4096),
            alpha=table.integer("alpha", 8, low=1, high=65536),
            dropout=table.number("dropout", 0.0, low=0.0, high=0.9),
            target_modules=targets,
            dtype=table.choice("dtype", "bfloat16", ("float32", "bfloat16")),
            learning_rate=table.number("learning_rate", 2e-4, low=1e-9, high=10.0),
            weight_decay=table.number("weight_decay", 0.0, low=0.0, high=1.0),
            warmup_steps=table.integer("warmup_steps", 0, low=0, high=_MAX_STEPS),
            batch_size=table.integer("batch_size", 4, low=1, high=65536),
            max_length=table.integer("max_length", 512, low=8, high=1 << 20),
            answers_only=table.flag("answers_only", True),
            gradient_clip=table.number("gradient_clip", 1.0, low=0.0, high=1e6),
            steps=_target("steps", steps, seconds, common, otherwise=100),
            seconds=seconds,
            checkpoint_every=table.integer("checkpoint_every", 0, low=0, high=_MAX_STEPS),
            fail_on_nonfinite=table.flag("fail_on_nonfinite", True),
            gradient_checkpointing=table.flag("gradient_checkpointing", False),
            **common,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptParams:
    """Parameters of `script`.

    Attributes:
        script: the input to run, by its name in the package.
        arguments: its command line.
        requirements: distributions that must be installed, as ``name`` or ``name>=1.2,<2``.
        outputs: folders, relative to the working directory, whose files come back; what is written elsewhere is lost.
        allow_pickle: let outputs be pickles, which run code when they are loaded.
        seed, deterministic, threads: for frameworks that the script imports.
        paced: whether the job is measured.
        max_restarts: how often all ranks begin again after one failed; for a job with `--ranks` alone.
    """

    KIND: ClassVar[str] = "script"

    script: str
    arguments: tuple[str, ...]
    requirements: tuple[str, ...]
    outputs: tuple[str, ...]
    seed: int
    deterministic: bool
    threads: int | None
    paced: bool
    allow_pickle: bool
    max_restarts: int

    @classmethod
    def from_table(cls, table: Table) -> ScriptParams:
        requirements = table.texts("requirements")
        for requirement in requirements:
            if not _REQUIREMENT.fullmatch(requirement.strip()):
                raise invalid("requirements", f"a list of names with versions; {requirement[:60]!r} is not")
        outputs = table.texts("outputs", ("outputs/",), max_items=_MAX_FOLDERS)
        if not outputs or not all(_FOLDER.fullmatch(folder) for folder in outputs):
            raise invalid("outputs", 'a list of folders inside the working directory, such as ["outputs/"]')
        folders = tuple(folder.rstrip("/") for folder in outputs)
        if any(a != b and f"{b}/".startswith(f"{a}/") for a in folders for b in folders) or len(set(folders)) < len(
            folders
        ):
            raise invalid("outputs", "a list of different folders, none inside another")
        return cls(
            script=table.text("script"),
            arguments=table.texts("arguments"),
            requirements=requirements,
            outputs=folders,
            allow_pickle=table.flag("allow_pickle", False),
            max_restarts=table.integer("max_restarts", 0, low=0, high=_MAX_RESTARTS),
            **_common(table, device=False),
        )


Params: TypeAlias = MlpParams | LoraParams | ScriptParams
_TYPES: dict[str, type[MlpParams] | type[LoraParams] | type[ScriptParams]] = {
    kind.KIND: kind for kind in (MlpParams, LoraParams, ScriptParams)
}
KINDS = tuple(_TYPES)


def parse(kind: str, table: Mapping[str, Any]) -> Params:
    """Check the `[params]` of a job file.

    Args:
        kind: the workload.
        table: as parsed from TOML, or what `canonical` returned.

    Raises:
        UsageError: `job-invalid`, naming the field.
    """
    if kind not in _TYPES:
        raise UsageError(Code.JOB_INVALID, f"workload must be one of {', '.join(KINDS)}, not {kind[:40]!r}")
    fields_left = Table(table)
    found = _TYPES[kind].from_table(fields_left)
    fields_left.end([field.name for field in fields(_TYPES[kind])])
    return found


def canonical(kind: str, table: Mapping[str, Any]) -> dict[str, Json]:
    """Return checked `[params]` as they travel in the sealed index: a float becomes a decimal string.

    Raises:
        UsageError: as `parse`.
    """
    parse(kind, table)
    # A job that is not paced is the same job as ever, to the bit.
    return {name: _travelling(value) for name, value in table.items() if (name, value) != ("paced", False)}


def measured(kind: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `[params]` of the same job to be measured: paced, and without a target of its own.

    Raises:
        UsageError: as `parse`.
    """
    parse(kind, table)
    return {name: value for name, value in table.items() if name not in _TARGETS} | {"paced": True}


def _travelling(value: Any) -> Json:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [_travelling(item) for item in value]
    checked: Json = value
    return checked


def _common(table: Table, *, device: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seed": table.integer("seed", 0, low=0, high=2**31 - 1),
        "deterministic": table.flag("deterministic", False),
        "threads": table.optional_integer("threads", low=1, high=4096),
        "paced": table.flag("paced", False),
    }
    if device:
        found["device"] = table.choice("device", "auto", _DEVICES)
    return found


def _target(
    name: str, count: int | None, seconds: float | None, common: Mapping[str, Any], *, otherwise: int
) -> int | None:
    """Return how many steps a job takes at the most; a paced one has no target, and none is put in its place."""
    if common["paced"]:
        for given, value in ((name, count), ("seconds", seconds)):
            if value is not None:
                raise invalid(given, "absent in a paced job, which ends when it is told to")
        return None
    return otherwise if count is None and seconds is None else count


def _model(name: str) -> str:
    scheme, _, rest = name.partition(":")
    if scheme == "config" and rest not in CONFIGS:
        raise invalid("model", "one of " + ", ".join(f"config:{known}" for known in CONFIGS))
    if scheme == "inputs" and not rest:
        raise invalid("model", "inputs: and the name of a folder in [inputs]")
    if scheme not in ("config", "inputs") and not _HUB_ID.fullmatch(name):
        raise invalid("model", "config:NAME, inputs:FOLDER or a hub id")
    return name


def _base_name(model: str) -> str:
    scheme, _, rest = model.partition(":")
    # The last part alone: `models/x` would name somebody else's model on the hub.
    return PurePosixPath(rest).name if scheme in ("config", "inputs") else model
