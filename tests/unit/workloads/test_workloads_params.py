"""Job parameters: everything wrong is said by name, before any framework is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import Code, UsageError
from glasshouse.wire.canonical import decode, encode
from glasshouse.workloads.builtin.mlp import MlpParams
from glasshouse.workloads.builtin.script import ScriptParams
from glasshouse.workloads.job_keys import declared
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.registry import MODULES, canonical, load, parse

KINDS = tuple(MODULES)

GOOD: dict[str, dict[str, Any]] = {
    "mlp": {"data": "a.csv", "epochs": 5, "learning_rate": 0.01},
    "lora": {"model": "config:qwen2-tiny", "learning_rate": 2e-4, "seconds": 1.5, "target_modules": ["q_proj"]},
    "script": {"script": "train.py", "arguments": ["--lr", "1"], "requirements": ["torch>=2.11,<3", "numpy"]},
}

WRONG = [
    ("mlp", "epochs", 0),
    ("mlp", "epochs", "5"),
    ("mlp", "epochs", True),
    ("mlp", "learning_rate", "fast"),
    ("mlp", "learning_rate", float("nan")),
    ("mlp", "learning_rate", True),
    ("mlp", "device", "tpu"),
    ("mlp", "data", ""),
    ("mlp", "surprise", 1),
    ("mlp", "allow_pickle", True),
    ("lora", "model", "config:gpt-9"),
    ("lora", "model", "inputs:"),
    ("lora", "model", "../../etc"),
    ("lora", "model", "a/b/c"),
    ("lora", "r", 0),
    ("lora", "warmup_steps", -1),
    ("lora", "eval_split", 1.0),
    ("lora", "lr_scheduler_type", "cosin"),
    ("lora", "optim", "lion"),
    ("lora", "target_modules", []),
    ("lora", "target_modules", ["q_proj", "q_proj"]),
    ("lora", "target_modules", "q_proj"),
    ("lora", "dtype", "float64"),
    ("lora", "max_steps", -1),
    ("lora", "seed", 2**31),
    ("lora", "data", "a\x00b"),
    ("script", "arguments", [1]),
    ("script", "requirements", ["torch; os_name=='x'"]),
    ("script", "requirements", ["x @ http://evil"]),
    ("script", "outputs", "outputs"),
    ("script", "outputs", []),
    ("script", "outputs", ["../up"]),
    ("script", "outputs", ["a/../b"]),
    ("script", "outputs", ["/abs"]),
    ("script", "outputs", ["a", "a"]),
    ("script", "outputs", ["a\n"]),
    ("script", "outputs", ["a", "a/"]),
    ("script", "outputs", ["a/b", "c", "a"]),
    ("script", "allow_pickle", "yes"),
    ("script", "device", "cpu"),
    ("script", "module", "train"),
    ("lora", "env", {"A": "b"}),
]


@pytest.mark.parametrize("kind", KINDS)
def test_good_parameters_are_taken(kind: str) -> None:
    found = parse(kind, GOOD[kind])
    assert type(found) is load(kind).Params


@pytest.mark.parametrize(("kind", "field", "value"), WRONG)
def test_a_wrong_parameter_is_named(kind: str, field: str, value: object) -> None:
    with pytest.raises(UsageError) as refused:
        parse(kind, GOOD[kind] | {field: value})
    assert refused.value.code is Code.JOB_INVALID
    assert f"params.{field}" in refused.value.message


@pytest.mark.parametrize(("kind", "field"), [("lora", "model"), ("script", "script")])
def test_a_missing_parameter_is_named(kind: str, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        parse(kind, {name: value for name, value in GOOD[kind].items() if name != field})


@pytest.mark.parametrize(
    ("kind", "typed", "meant"),
    [
        ("lora", "max_step", "max_steps"),
        ("lora", "learningrate", "learning_rate"),
        ("lora", "max-length", "max_length"),
        ("mlp", "Epochs", "epochs"),
        ("script", "args", "arguments"),
        ("script", "output", "outputs"),
    ],
)
def test_an_unknown_parameter_is_told_the_nearest(kind: str, typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"params.{typed} is not") as refused:
        parse(kind, GOOD[kind] | {typed: 1})
    assert refused.value.hint.startswith(f"did you mean '{meant}'? known: ")


TRAINED_ELSEWHERE = {
    "bf16": True,
    "lora_r": 8,
    "model_name_or_path": "x",
    "output_dir": "out",
    "report_to": "wandb",
    "warmup_ratio": 0.03,
}


def test_names_that_people_train_with_elsewhere_are_told_all_at_once() -> None:
    with pytest.raises(UsageError, match=r"params\.bf16, params\.lora_r, .* are not known") as refused:
        parse("lora", GOOD["lora"] | TRAINED_ELSEWHERE)
    for words in ('bf16: the base has `dtype = "bfloat16"`', "lora_r: it is `r`", "it is `model`", "below 1"):
        assert words in refused.value.hint
    assert all(f"{name}: " in refused.value.hint for name in TRAINED_ELSEWHERE)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_steps": 5, "num_train_epochs": 2}, "max_steps may not be beside num_train_epochs"),
        ({"eval_data": "a", "eval_split": 0.1}, "may not be beside"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "may not be beside"),
        ({"adapter": "a", "r": 8, "use_dora": True}, "adapter may not be beside r, target_modules, use_dora"),
        ({"eval_steps": 10}, "absent where there is no eval_data or eval_split"),
        ({"early_stopping_patience": 2}, "absent where there is no eval_data or eval_split"),
        ({"lr_scheduler_type": "cosine"}, "the clock ends"),
        ({"warmup_steps": 0.1}, "the clock ends"),
        ({"warmup_steps": "0.1"}, "the clock ends"),
        ({"eval_strategy": "epoch"}, "there is nothing to evaluate on"),
        (
            {"eval_split": 0.1, "eval_strategy": "epoch", "eval_steps": 5},
            "eval_steps must be absent where eval_strategy",
        ),
        ({"eval_split": 0.1, "eval_strategy": "no", "load_best_model_at_end": True}, "load_best_model_at_end must be"),
        ({"eval_split": 0.1, "eval_strategy": "no", "early_stopping_patience": 2}, "early_stopping_patience must be"),
        ({"save_strategy": "no", "save_steps": 5}, "save_steps must be absent where save_strategy is 'no'"),
    ],
)
def test_what_cannot_be_beside_each_other_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse("lora", GOOD["lora"] | given)


@pytest.mark.parametrize(
    ("given", "saved", "evaluated"),
    [
        ({}, "no", "no"),
        ({"save_steps": 5}, "steps", "no"),
        ({"save_strategy": "epoch", "eval_split": 0.1}, "epoch", "epoch"),
        ({"eval_data": "e.jsonl", "eval_steps": 5}, "no", "steps"),
        ({"eval_data": "e.jsonl", "eval_strategy": "no"}, "no", "no"),
        ({"eval_strategy": "no", "load_best_model_at_end": False}, "no", "no"),
    ],
)
def test_when_to_save_and_to_evaluate_follows_from_what_is_given(
    given: dict[str, Any], saved: str, evaluated: str
) -> None:
    found = parse("lora", GOOD["lora"] | given)
    assert isinstance(found, LoraParams)
    assert (found.save_strategy, found.eval_strategy) == (saved, evaluated)


def test_a_job_without_an_end_goes_through_its_data_three_times_and_a_schedule_may_go_down() -> None:
    found = parse("lora", {"model": "config:qwen2-tiny", "lr_scheduler_type": "cosine", "warmup_steps": 0.1})
    assert isinstance(found, LoraParams)
    assert (found.max_steps, found.num_train_epochs, found.seconds) == (None, 3.0, None)
    timed = parse("lora", {"model": "config:qwen2-tiny", "lr_scheduler_type": "linear", "seconds": 5, "max_steps": 9})
    assert isinstance(timed, LoraParams)
    assert (timed.max_steps, timed.num_train_epochs) == (9, None)


def test_keys_that_are_missing_or_unknown_are_told_together() -> None:
    with pytest.raises(UsageError, match=r"params\.maks, params\.modle are not known") as refused:
        parse("lora", GOOD["lora"] | {"modle": "x", "maks": 1})
    assert refused.value.hint.startswith("maks: nothing like it; modle: did you mean 'model'?")


def test_every_name_that_is_told_is_one() -> None:
    known = {field.name for field in declared(LoraParams)}
    for name, told in LoraParams.ELSEWHERE.items():
        assert name not in known
        named = re.findall(r"`(\w+)(?: = [^`]*)?`", told)
        assert {one for one in named if one not in known} == set()


def test_a_parameter_like_no_other_is_told_all() -> None:
    with pytest.raises(UsageError) as refused:
        parse("mlp", {"zzz": 1})
    assert refused.value.hint.startswith("known: data, depth, ")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("config:qwen2-tiny", "qwen2-tiny"),
        ("inputs:base/", "base"),
        ("inputs:models/Qwen2.5-0.5B", "Qwen2.5-0.5B"),  # with its folder it would name another on the hub
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_a_base_is_called_by_a_name_that_peft_can_look_for(model: str, name: str) -> None:
    found = parse("lora", {"model": model})
    assert isinstance(found, LoraParams)
    assert found.base_name == name


@pytest.mark.parametrize("module", ["train.py", "-m", "pkg..train", "pkg.", "1pkg", "pkg/train"])
def test_what_is_no_module_is_refused(module: str) -> None:
    with pytest.raises(UsageError, match=r"params.module must be a module's name"):
        parse("script", {"module": module})


def test_a_module_stands_in_for_a_script() -> None:
    found = parse("script", {"module": "pkg.train"})
    assert isinstance(found, ScriptParams)
    assert (found.script, found.module, found.what) == (None, "pkg.train", "python -m pkg.train")


OBEYED = [
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "GLIBC_TUNABLES", "MALLOC_CHECK_", "GCONV_PATH"),
    *("PYTHONPATH", "PYTHONSTARTUP", "PYTHON_GIL", "GLASSHOUSE_OUTPUTS", "GLASSHOUSE_RANK_TOKEN"),
    *("OPENSSL_CONF", "OPENSSL_MODULES", "SSLKEYLOGFILE", "BASH_ENV"),
]


@pytest.mark.parametrize("name", [*OBEYED, "", "A=B", "1A", "A B", "A\n", "Ä"])
def test_names_that_loader_python_or_glasshouse_obey_are_refused_wherever_they_are_read(name: str) -> None:
    """The same check runs when a job is sealed and when the worker has the parameters."""
    with pytest.raises(UsageError, match="in env must be a name") as refused:
        parse("script", GOOD["script"] | {"env": {name: "x"}})
    assert repr(name) in refused.value.message


@pytest.mark.parametrize("env", [{"A": 1}, {"A": "x\x00"}, {"A": "x" * 4097}, {f"A{n}": "" for n in range(65)}, []])
def test_values_that_are_no_texts_or_too_many_are_refused(env: Any) -> None:
    with pytest.raises(UsageError, match=r"^env"):
        parse("script", GOOD["script"] | {"env": env})


def test_other_names_are_taken_and_travel() -> None:
    env = {"WANDB_MODE": "offline", "LDAP": "", "PYTORCH": "1", "ENVIRONMENT": "ä"} | {f"A{n}": "" for n in range(60)}
    found = parse("script", canonical("script", GOOD["script"] | {"env": env}))
    assert isinstance(found, ScriptParams)
    assert found.env == env


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(UsageError, match="workload"):
        parse("diffusion", {})


def test_defaults_are_those_of_the_documentation() -> None:
    lora = parse("lora", {"model": "Qwen/Qwen2.5-0.5B"})
    assert isinstance(lora, LoraParams)
    assert (lora.r, lora.lora_alpha, lora.target_modules, lora.dtype) == (4, 8, ("q_proj", "v_proj"), "bfloat16")
    assert (lora.num_train_epochs, lora.seconds, lora.max_grad_norm, lora.fail_on_nonfinite) == (3.0, None, 1.0, True)
    mlp, script = parse("mlp", {}), parse("script", {"script": "a.py"})
    assert isinstance(mlp, MlpParams)
    assert isinstance(script, ScriptParams)
    assert (mlp.epochs, mlp.seconds, mlp.device) == (200, None, "auto")
    assert (script.outputs, script.allow_pickle) == (("outputs",), False)


def test_a_target_in_seconds_leaves_the_steps_open() -> None:
    lora = parse("lora", {"model": "config:qwen2-tiny", "seconds": 2})
    assert isinstance(lora, LoraParams)
    assert (lora.max_steps, lora.num_train_epochs, lora.seconds) == (None, None, 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_travelling_form_is_canonical_json_and_means_the_same(kind: str) -> None:
    travelling = canonical(kind, GOOD[kind])
    assert decode(encode(travelling), max_bytes=10_000) == travelling
    assert parse(kind, travelling) == parse(kind, GOOD[kind])
    assert canonical(kind, travelling) == travelling


@given(st.floats(min_value=1e-9, max_value=10.0))
def test_a_number_travels_exactly(rate: float) -> None:
    table = {"model": "config:qwen2-tiny", "learning_rate": rate}
    found = parse("lora", canonical("lora", table))
    assert isinstance(found, LoraParams)
    assert found.learning_rate == rate


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=3)
NAMES = st.sampled_from(["model", "data", "max_steps", "seed", "script", "arguments", "threads", "learning_rate", "x"])


@given(st.sampled_from(KINDS), st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=3), max_size=5))
def test_no_table_crashes_the_parser(kind: str, table: dict[str, Any]) -> None:
    try:
        found = parse(kind, table)
    except UsageError as error:
        refused = error
    else:
        assert type(found) is load(kind).Params
        return
    assert refused.code is Code.JOB_INVALID


def test_checking_parameters_loads_no_framework() -> None:
    code = (
        "import sys; from glasshouse.workloads.registry import MODULES, load; [load(kind) for kind in MODULES]; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_clinics_job_files_hold() -> None:
    folder = Path(__file__).parents[3] / "examples" / "clinic"
    jobs = sorted(folder.glob("*.toml"))
    assert [job.stem for job in jobs] == ["lora", "mlp", "script"]
    for job in jobs:
        table = tomllib.loads(job.read_text())
        parse(table["workload"], table["params"])
        assert all((folder / source).exists() for source in table["inputs"].values())
