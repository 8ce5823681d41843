"""The parameters of each workload, checked without any training framework.

Laws: ``parse(kind, canonical(kind, p)) == parse(kind, p)``; `canonical` is idempotent.

Every workload takes `slots`: its steps are measured by a schedule (spec/measurement.md).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeAlias

from glasshouse.package.limits import DEFAULT_BYTES, MAX_BYTES, MAX_COUNT
from glasshouse.wire.canonical import Json
from glasshouse.workloads.fields import (
    Choice,
    ExactlyOne,
    Field,
    Flag,
    Integer,
    Mapped,
    Needs,
    Number,
    Rule,
    Table,
    Text,
    Texts,
    invalid,
    read,
)

__all__ = [
    "CONFIGS",
    "ENVIRONMENT",
    "KINDS",
    "TYPES",
    "LoraParams",
    "MlpParams",
    "Params",
    "ScriptParams",
    "canonical",
    "parse",
]

# Architectures with random weights; their dimensions are in `architectures`.
CONFIGS = ("qwen2-tiny", "qwen2.5-0.5b", "qwen2.5-7b")

_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[A-Za-z0-9._,\s-]*\])?\s*([<>=!~][^;@]*)?")
_MAX_STEPS = 10**9
_MAX_SECONDS = 30 * 86400.0

_TEXT = Text(form=r"[^\x00]*")
_STEPS = Integer(low=1, high=_MAX_STEPS)
_SECONDS = Number(low=0.01, high=_MAX_SECONDS)
# Parts that are neither `.` nor `..`, a slash at the end or none.
_PART = r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f\\]+"
_FOLDER = Text(form=rf"{_PART}(?:/{_PART})*/?", words="a folder inside the working directory", max_chars=100)
_MODULE = Text(
    form=r"(?!.*\.py$)[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*", words="a module's name, as pkg.train"
)
_HUB = "[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL = Text(
    form=rf"config:(?:{'|'.join(map(re.escape, CONFIGS))})|inputs:[^\x00]+|{_HUB}(?:/{_HUB})?",
    words="one of " + ", ".join(f"config:{known}" for known in CONFIGS) + ", or inputs:FOLDER, or a hub id",
)
# What the loader, the interpreter, the C library and the ciphers' library obey, and what is Glasshouse's own.
_REFUSED = (
    r"(?!(?:LD_|DYLD_|GLIBC_|MALLOC_|PYTHON|GLASSHOUSE_)|(?:GCONV_PATH|LOCPATH|NLSPATH|SSLKEYLOGFILE"
    r"|OPENSSL_(?:CONF|CONF_INCLUDE|ENGINES|MODULES)|BASH_ENV|ENV)$)"
)
ENVIRONMENT = Mapped(
    key=Text(
        form=_REFUSED + r"[A-Za-z_][A-Za-z0-9_]*",
        words="a name of letters, digits and _ that neither the loader (LD_, DYLD_, GLIBC_, MALLOC_, OPENSSL_, …) nor "
        "Python (PYTHON) obeys and that is not Glasshouse's own (GLASSHOUSE_)",
        max_chars=128,
    ),
    value=Text(form=r"[^\x00]*", words="a text of at most 4096 characters", min_chars=0, max_chars=4096),
)
"""Environment variables of a script."""
_SLOTS = Table(
    (
        Field("arm", Choice(("A", "P", "R")), "Whose slots these are; A for a worker that has the machine for itself."),
        Field("seed", Text(form="[0-9a-f]{64}", words="64 hexadecimal digits"), "From which the order follows."),
        Field("slot_ns", Integer(low=10**6, high=60 * 10**9), "Length of a slot in nanoseconds."),
        Field("steps", Integer(low=1, high=64), "Counted steps in a slot."),
        Field("uncounted", Integer(low=1, high=4), "Steps before them."),
        Field("warmup_steps", Integer(low=0, high=2**18 - 1), "Steps until the worker is warm."),
        Field(
            "end_ns",
            Text(form="0|[1-9][0-9]{0,18}", words="nanoseconds as a text of at most 19 digits", max_chars=19),
            "When it is over, by CLOCK_MONOTONIC of the machine that it runs on.",
        ),
    )
)

_PROFILED = Needs("profile", "slots")


def _common(*, device: bool = True) -> tuple[Field, ...]:
    found = (
        Field("seed", Integer(low=0, high=2**31 - 1), "Of everything random: weights, the order of examples.", 0),
        Field("deterministic", Flag(), "Bit-equal results from run to run on the same machine and versions.", False),
        Field(
            "threads",
            Integer(low=1, high=4096),
            "Threads of the CPU; 1 in deterministic mode, else the framework's choice.",
            None,
        ),
        Field("max_outputs", Integer(low=1, high=MAX_COUNT), "How many outputs may come back.", MAX_COUNT),
        Field("max_output_bytes", Integer(low=1, high=MAX_BYTES), "How large they may be together.", DEFAULT_BYTES),
        Field(
            "slots",
            _SLOTS,
            "The schedule of a job that is measured (spec/measurement.md): the job ends with it, or by a target named "
            "here; its record is one more output.",
            None,
        ),
        Field(
            "profile",
            Integer(low=1, high=256),
            "How many steps after the warm-up of a measured job are profiled by phase.",
            None,
        ),
    )
    choice = Field("device", Choice(("auto", "cpu", "cuda")), "`auto` takes a GPU where there is one.", "auto")
    return (*found, choice) if device else found


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpParams:
    """Parameters of `mlp`; `FIELDS` says what each is."""

    KIND: ClassVar[str] = "mlp"
    RULES: ClassVar[tuple[Rule, ...]] = (Needs("label", "data"), _PROFILED)
    FIELDS: ClassVar[tuple[Field, ...]] = (
        Field("data", _TEXT, "Input with a CSV table with a header line; without it the data is synthetic.", None),
        Field("label", _TEXT, "Its column to predict; the last one by default.", None),
        Field("synthetic_rows", Integer(low=2, high=10**8), "Rows of synthetic data.", 4096),
        Field("synthetic_features", Integer(low=1, high=10**5), "Columns of synthetic data.", 32),
        Field("synthetic_classes", Integer(low=2, high=10**4), "Classes of synthetic data.", 2),
        Field("held_out", Number(low=0.0, high=0.9), "Share of the rows kept to report accuracy on.", 0.0),
        Field("width", Integer(low=1, high=10**6), "Units of a hidden layer.", 64),
        Field("depth", Integer(low=1, high=1000), "Hidden layers.", 2),
        Field("epochs", _STEPS, "When to stop; 200 where neither this nor `seconds` is given.", None),
        Field("seconds", _SECONDS, "When to stop, if that comes first.", None),
        Field("learning_rate", Number(low=1e-9, high=100.0), "Of Adam.", 1e-3),
        Field("dtype", Choice(("float32", "bfloat16")), "Of weights and data.", "float32"),
        *_common(),
    )

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
    max_outputs: int
    max_output_bytes: int
    slots: Mapping[str, Json] | None
    profile: int | None

    @classmethod
    def from_table(cls, values: Mapping[str, Any]) -> MlpParams:
        found = read(cls.FIELDS, values, "params", rules=cls.RULES)
        return cls(**_with_target(found, "epochs", otherwise=200))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraParams:
    """Parameters of `lora`; `FIELDS` says what each is."""

    KIND: ClassVar[str] = "lora"
    RULES: ClassVar[tuple[Rule, ...]] = (_PROFILED,)
    FIELDS: ClassVar[tuple[Field, ...]] = (
        Field("model", _MODEL, "`config:NAME` (random weights), `inputs:FOLDER` (a packed model) or a hub id."),
        Field("revision", _TEXT, "Of a hub id; name a commit, so that it cannot change under you.", None),
        Field(
            "base_name",
            _TEXT,
            "What the adapter's file calls its base, for peft: a hub id, or a folder beside them; by default the hub "
            "id, the last part of the packed folder's name, or the architecture's name.",
            None,
        ),
        Field("data", _TEXT, "Input with one JSON object a line: instruction, optional input, output.", "train.jsonl"),
        Field("rank", Integer(low=1, high=4096), "Of the adapter.", 4),
        Field("alpha", Integer(low=1, high=65536), "Updates are scaled by alpha / rank.", 8),
        Field("dropout", Number(low=0.0, high=0.9), "Of the adapter's input.", 0.0),
        Field(
            "target_modules",
            Texts(item=Text(form=r"[^\x00]*"), words="module names", min_items=1, distinct=True),
            "Names of the linear layers that get an adapter.",
            ("q_proj", "v_proj"),
        ),
        Field(
            "dtype",
            Choice(("float32", "bfloat16")),
            "Of the base weights; the adapter itself is trained in float32.",
            "bfloat16",
        ),
        Field("learning_rate", Number(low=1e-9, high=10.0), "Of AdamW, constant after the warm-up.", 2e-4),
        Field("weight_decay", Number(low=0.0, high=1.0), "Of AdamW.", 0.0),
        Field("warmup_steps", Integer(low=0, high=_MAX_STEPS), "Steps of linear warm-up.", 0),
        Field("batch_size", Integer(low=1, high=65536), "Examples in a step.", 4),
        Field(
            "max_length",
            Integer(low=8, high=1 << 20),
            "Tokens of an example; longer ones are cut, those left without an answer skipped.",
            512,
        ),
        Field("answers_only", Flag(), "Only the tokens of the answer count in the loss.", True),
        Field("gradient_clip", Number(low=0.0, high=1e6), "Largest norm of the gradient; 0 turns clipping off.", 1.0),
        Field("steps", _STEPS, "When to stop; 100 where neither this nor `seconds` is given.", None),
        Field("seconds", _SECONDS, "When to stop, if that comes first.", None),
        Field("checkpoint_every", Integer(low=0, high=_MAX_STEPS), "Steps between checkpoints; 0 for none.", 0),
        Field("fail_on_nonfinite", Flag(), "End with `nonfinite-loss` when the loss is no finite number.", True),
        Field("gradient_checkpointing", Flag(), "Trade time for memory.", False),
        *_common(),
    )

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
    max_outputs: int
    max_output_bytes: int
    slots: Mapping[str, Json] | None
    profile: int | None

    @classmethod
    def from_table(cls, values: Mapping[str, Any]) -> LoraParams:
        found = read(cls.FIELDS, values, "params", rules=cls.RULES)
        found["base_name"] = found["base_name"] or _base_name(found["model"])
        return cls(**_with_target(found, "steps", otherwise=100))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptParams:
    """Parameters of `script`; `FIELDS` says what each is."""

    KIND: ClassVar[str] = "script"
    RULES: ClassVar[tuple[Rule, ...]] = (ExactlyOne("script", "module"), _PROFILED)
    FIELDS: ClassVar[tuple[Field, ...]] = (
        Field("script", _TEXT, "The input to run, by its name in the package.", None),
        Field("module", _MODULE, "The module to run, as `python -m` does from the folder of the inputs.", None),
        Field(
            "arguments",
            Texts(item=Text(form=r"[^\x00]*", words="a text", min_chars=0, max_chars=4096)),
            "Its command line.",
            (),
        ),
        Field(
            "requirements",
            Texts(
                item=Text(
                    form=rf"\s*{_REQUIREMENT.pattern}",
                    words="a distribution's name with versions, as name>=1.2,<2",
                ),
                words="distributions with versions",
            ),
            "Distributions that must be installed, as `name` or `name>=1.2,<2`; checked before anything runs.",
            (),
        ),
        Field(
            "outputs",
            Texts(item=_FOLDER, words="folders", min_items=1, max_items=16, distinct=True),
            "Folders, relative to the working directory, whose files come back; what is written elsewhere is lost, and "
            "the summary says so. Of several, each file comes back under its folder's name.",
            ("outputs/",),
        ),
        Field("allow_pickle", Flag(), "Let outputs be pickles, which run code when they are loaded.", False),
        Field(
            "max_restarts",
            Integer(low=0, high=100),
            "How often all ranks begin again after one failed; for a job with `--ranks` alone.",
            0,
        ),
        *_common(device=False),
    )

    script: str | None
    module: str | None
    arguments: tuple[str, ...]
    requirements: tuple[str, ...]
    outputs: tuple[str, ...]
    env: Mapping[str, str]
    seed: int
    deterministic: bool
    threads: int | None
    max_outputs: int
    max_output_bytes: int
    slots: Mapping[str, Json] | None
    profile: int | None
    allow_pickle: bool
    max_restarts: int

    @classmethod
    def from_table(cls, values: Mapping[str, Any]) -> ScriptParams:
        # In the job file it is a table of its own; it is sealed with the parameters, and checked again where they are.
        env = read((_ENV,), {name: value for name, value in values.items() if name == "env"}, "")
        rest = {name: value for name, value in values.items() if name != "env"}
        found = read(cls.FIELDS, rest, "params", rules=cls.RULES)
        folders = found["outputs"] = tuple(folder.rstrip("/") for folder in found["outputs"])
        # A file in both would come back twice under one name, which is refused after the training.
        if any(f"{one}/".startswith(f"{other}/") for one, other in itertools.permutations(folders, 2)):
            raise invalid("params.outputs", "folders of which none lies in another", list(values["outputs"]))
        return cls(**env, **found)

    @property
    def what(self) -> str:
        """The script's or the module's name."""
        return self.script or f"python -m {self.module}"


_ENV = Field("env", ENVIRONMENT, "", {})
Params: TypeAlias = MlpParams | LoraParams | ScriptParams
TYPES: dict[str, type[MlpParams] | type[LoraParams] | type[ScriptParams]] = {
    kind.KIND: kind for kind in (MlpParams, LoraParams, ScriptParams)
}
KINDS = tuple(TYPES)


def parse(kind: str, table: Mapping[str, Any]) -> Params:
    """Check the `[params]` of a job file.

    Args:
        kind: the workload.
        table: as parsed from TOML, or what `canonical` returned.

    Raises:
        UsageError: `job-invalid`, naming the field.
    """
    if kind not in TYPES:
        raise invalid("workload", f"one of {', '.join(KINDS)}", kind)
    return TYPES[kind].from_table(table)


def canonical(kind: str, table: Mapping[str, Any]) -> dict[str, Json]:
    """Return checked `[params]` as they travel in the sealed index: a float becomes a decimal string.

    Raises:
        UsageError: as `parse`.
    """
    parse(kind, table)
    return {name: _travelling(value) for name, value in table.items()}


def _travelling(value: Any) -> Json:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [_travelling(item) for item in value]
    checked: Json = value
    return checked


def _with_target(found: dict[str, Any], count: str, *, otherwise: int) -> dict[str, Any]:
    """Give a job without a target one; a measured one has none, and none is put in its place."""
    if found["slots"] is None and found[count] is None and found["seconds"] is None:
        found[count] = otherwise
    return found


def _base_name(model: str) -> str:
    scheme, _, rest = model.partition(":")
    # The last part alone: `models/x` would name somebody else's model on the hub.
    return PurePosixPath(rest).name if scheme in ("config", "inputs") else model
