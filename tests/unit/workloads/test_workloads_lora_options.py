"""LoRA as people set it up elsewhere: epochs, accumulation, schedules, evaluation, early stops, packing, variants."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from glasshouse.errors import Code, PlatformError, RunError, UsageError
from glasshouse.workloads.lora import lora
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.process.job_control import JobControl, Result
from tools.recorder import Recorder, recorded_task

pytestmark = [
    pytest.mark.usefixtures("framework"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

RECORDS = b"".join(
    json.dumps({"prompt": f"Even? {n}", "completion": "no" if n % 2 else "yes, it is"}).encode() + b"\n"
    for n in range(24)
)
OTHERS = b"".join(json.dumps({"prompt": f"Odd? {n}", "completion": "!?!"}).encode() + b"\n" for n in range(6))
TINY = {"model": "config:qwen2-tiny", "dtype": "float32", "device": "cpu", "deterministic": True}


def run(
    tmp_path: Path, *, records: bytes = RECORDS, files: Mapping[str, bytes] = MappingProxyType({}), **params: Any
) -> tuple[Result, Recorder]:
    given = {"train.jsonl": records, "other.jsonl": OTHERS, **files}
    task, found, channel = recorded_task("lora", TINY | params, given, tmp_path)
    result = lora.run(task, found, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    task.close()
    return result, channel


def history(channel: Recorder) -> list[dict[str, Any]]:
    return list(json.loads(channel.outputs["log_history.json"]))


def rates(channel: Recorder) -> list[float]:
    return [line["learning_rate"] for line in history(channel) if "loss" in line]


def test_epochs_go_through_the_data_with_what_is_left_over_in_a_last_smaller_batch(tmp_path: Path) -> None:
    result, channel = run(tmp_path, num_train_epochs=2, per_device_train_batch_size=5, logging_steps=1)
    assert (result.done, result.stop_reason) == (10, "steps")
    assert [line["epoch"] for line in history(channel)][4::5] == [1.0, 2.0]
    assert {one["total"] for one in channel.messages if one["type"] == "progress"} == {10}


def test_batches_that_are_accumulated_make_the_step_of_one_large_batch(tmp_path: Path) -> None:
    # By tokens, as Trainer does: means of batches with different numbers of tokens would not add up.
    large, one = run(tmp_path / "1", max_steps=3, per_device_train_batch_size=8)
    small, two = run(tmp_path / "2", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert small.done == large.done == 3
    assert float(small.loss_final or 0) == pytest.approx(float(large.loss_final or 1), rel=1e-4)
    first, second = (load(channel.outputs["adapter_model.safetensors"]) for channel in (one, two))
    assert all(torch.allclose(first[name], second[name], atol=2e-5) for name in first)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("constant_with_warmup", [0, 0.5, 1, 1]),
        ("linear", [0, 0.5, 1, 0.5]),
        ("cosine", [0, 0.5, 1, 0.5]),
    ],
)
def test_the_learning_rate_follows_its_schedule(tmp_path: Path, schedule: str, expected: list[float]) -> None:
    for warmup in (2, 0.5):
        params = {"lr_scheduler_type": schedule, "learning_rate": 0.01, "warmup_steps": warmup}
        _, channel = run(tmp_path / str(warmup), max_steps=4, logging_steps=1, **params)
        assert rates(channel) == pytest.approx([0.01 * part for part in expected])


def test_an_evaluation_is_of_the_other_data_and_in_the_history(tmp_path: Path) -> None:
    _, channel = run(tmp_path, max_steps=4, eval_data="other.jsonl", eval_steps=2)
    found = [line for line in history(channel) if "eval_loss" in line]
    assert [line["step"] for line in found] == [2, 4]
    assert all(math.isfinite(line["eval_loss"]) for line in found)
    assert not any("runtime" in name or "per_second" in name for line in found for name in line)


def test_a_part_of_the_data_that_is_held_out_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glasshouse.workloads.lora import batches

    made: list[set[int]] = []
    real = batches.Rows.__init__

    def watched(self: Any, examples: Any, chosen: Any) -> None:
        made.append({number for row in chosen for number in row})
        real(self, examples, chosen)

    monkeypatch.setattr(batches.Rows, "__init__", watched)
    _, channel = run(tmp_path, num_train_epochs=1, eval_split=0.25)
    held_out, trained = sorted(made, key=len)
    assert (len(held_out), len(trained), held_out & trained) == (6, 18, set())
    assert [line["step"] for line in history(channel) if "eval_loss" in line] == [5]


def test_a_part_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaves none to train on"):
        run(tmp_path, records=RECORDS.splitlines()[0], eval_split=0.9)


# At this rate, losses on the other data rise from the first evaluation on.
RISING = {"eval_data": "other.jsonl", "eval_steps": 1, "learning_rate": 0.05}


def test_it_stops_early_where_evaluations_get_no_better(tmp_path: Path) -> None:
    result, channel = run(tmp_path, max_steps=50, early_stopping_patience=2, early_stopping_threshold=0.01, **RISING)
    losses = [line["eval_loss"] for line in history(channel) if "eval_loss" in line]
    assert (result.stop_reason, result.done) == ("finished", len(losses))
    assert result.done < 50
    best = min(losses[:-2])
    assert all(loss > best - 0.01 for loss in losses[-2:])


def test_the_best_adapter_is_returned_where_the_job_asks_for_it(tmp_path: Path) -> None:
    _, channel = run(tmp_path, max_steps=12, load_best_model_at_end=True, save_steps=1, **RISING)
    losses = {line["step"]: line["eval_loss"] for line in history(channel) if "eval_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best < 12
    adapter = channel.outputs["adapter_model.safetensors"]
    assert adapter == channel.outputs[f"checkpoints/step-{best}/adapter_model.safetensors"]
    assert adapter != channel.outputs["checkpoints/step-12/adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("params", "setting"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"target_modules": "all-linear", "r": 2}, ""),
        ({"lora_dropout": 0.1, "r": 16, "lora_alpha": 32}, ""),
        ({"gradient_checkpointing": True, "packing": True}, ""),
    ],
)
def test_adapters_of_each_kind_train_and_load_in_peft(tmp_path: Path, params: dict[str, Any], setting: str) -> None:
    from peft import PeftModel

    from glasshouse.workloads.lora import models

    result, channel = run(tmp_path, max_steps=8, learning_rate=0.01, **params)
    assert float(result.loss_final or 9) < float(result.loss_first or 0)
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, data in channel.outputs.items():
        (folder / name).write_bytes(data)
    config = json.loads(channel.outputs["adapter_config.json"])
    assert not setting or config[setting] is True
    assert config["r"] == params.get("r", 4)
    torch.manual_seed(0)
    base = models.random_model("qwen2-tiny", torch.float32, torch.device("cpu"))
    merged = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    assert merged.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
    if params.get("target_modules") == "all-linear":
        assert set(config["target_modules"]) == {
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        }


# packing


def examples_of(**params: Any) -> Any:
    from glasshouse.workloads.lora.data_forms import read_records
    from glasshouse.workloads.lora.encoding import ByteTokenizer, encode_records

    found = read_records(lambda _: io.BytesIO(RECORDS), ["t"], "t")
    return encode_records(found, "t", ByteTokenizer(), LoraParams.read(TINY | params))


def test_rows_are_filled_with_whole_examples_and_none_is_lost() -> None:
    from glasshouse.workloads.lora.batches import packed

    lengths = [7, 3, 5, 5, 2, 8, 1, 4]
    rows = packed(lengths, range(8), 8)
    assert sorted(number for row in rows for number in row) == list(range(8))
    assert all(sum(lengths[number] for number in row) <= 8 for row in rows)
    assert len(rows) == math.ceil(sum(lengths) / 8)
    assert rows == packed(lengths, range(8), 8)
    assert all(lengths[one[0]] >= lengths[other[0]] for one, other in pairwise(rows))


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2", "gpt2", "mistral"])
def test_losses_of_packed_examples_are_those_of_each_alone(kind: str) -> None:
    from glasshouse.workloads.lora.batches import Rows, collator, leaks

    model, examples = tiny(kind), examples_of()
    collate = collator(0, packing=True)

    def loss(numbers: list[int]) -> tuple[float, int]:
        """Return the sum of the losses of tokens, and their number."""
        batch = collate([Rows(examples, [numbers])[0]])
        counted = int((batch["labels"] != -100).sum())
        with torch.no_grad():
            return float(model(**batch, use_cache=False).loss) * counted, counted

    alone = [loss([number]) for number in range(6)]
    together, counted = loss(list(range(6)))
    assert counted == sum(count for _, count in alone)
    assert together / counted == pytest.approx(sum(one for one, _ in alone) / counted, abs=1e-6)
    assert not leaks(model)


def test_a_model_whose_examples_would_see_each_other_is_not_packed_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2ForCausalLM

    forward = Qwen2ForCausalLM.forward

    def one_long_text(self: Any, *given: Any, position_ids: Any = None, **more: Any) -> Any:
        return forward(self, *given, **more)

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", one_long_text)
    with pytest.raises(UsageError, match="would see each other") as refused:
        run(tmp_path, packing=True, max_steps=1)
    assert refused.value.code is Code.JOB_INVALID


def test_packed_training_takes_fewer_rows(tmp_path: Path) -> None:
    result, channel = run(tmp_path, packing=True, max_length=64, num_train_epochs=1, per_device_train_batch_size=1)
    alone, _ = run(tmp_path / "alone", max_length=64, num_train_epochs=1, per_device_train_batch_size=1)
    assert (alone.done, result.done) == (24, 6)
    assert "adapter_model.safetensors" in channel.outputs


def tiny(kind: str) -> Any:
    """Return a small model of a kind, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    width: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    if kind == "gpt2":
        width = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, vocab_size=264, **width)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_a_stop_ends_an_evaluation_and_the_adapter_so_far_is_there(tmp_path: Path) -> None:
    params = {"eval_data": "other.jsonl", "eval_steps": 2, "per_device_eval_batch_size": 1, "max_steps": 50}
    task, found, channel = recorded_task(
        "lora", TINY | params, {"train.jsonl": RECORDS, "other.jsonl": OTHERS}, tmp_path
    )
    asked, should_stop = 0, task.should_stop

    def second_batch_of_the_evaluation() -> bool:
        nonlocal asked
        asked += 1
        channel.stopping = asked >= 5  # before the first step, after two, and for each batch
        return should_stop()

    task.should_stop = second_batch_of_the_evaluation  # type: ignore[method-assign]
    result = lora.run(task, found, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    assert (result.done, result.stop_reason, asked) == (2, "stopped", 5)
    assert "adapter_model.safetensors" in channel.outputs
    assert "log_history.json" not in channel.outputs


@pytest.mark.parametrize("done", [5, 6])
def test_a_stop_at_the_end_of_an_epoch_or_of_the_job_waits_for_no_evaluation(tmp_path: Path, done: int) -> None:
    params = {"eval_data": "other.jsonl", "num_train_epochs": 1 if done == 6 else 2, "save_strategy": "epoch"}
    task, found, channel = recorded_task(
        "lora", TINY | params, {"train.jsonl": RECORDS, "other.jsonl": OTHERS}, tmp_path
    )
    progress = task.progress

    def stop_then(count: int, *rest: Any, **more: Any) -> bool:
        channel.stopping = count >= done
        return progress(count, *rest, **more)

    task.progress = stop_then  # type: ignore[method-assign]
    result = lora.run(task, found, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    assert (result.done, result.stop_reason) == (done, "steps" if done == 6 else "stopped")
    assert channel.outputs.keys() == {"adapter_model.safetensors", "adapter_config.json"}


def test_a_stop_with_the_best_adapter_brings_back_the_last_one_too(tmp_path: Path) -> None:
    params = RISING | {"max_steps": 50, "load_best_model_at_end": True}
    task, found, channel = recorded_task(
        "lora", TINY | params, {"train.jsonl": RECORDS, "other.jsonl": OTHERS}, tmp_path
    )
    progress = task.progress

    def stop_at_the_ninth(count: int, *rest: Any, **more: Any) -> bool:
        channel.stopping = count >= 9
        return progress(count, *rest, **more)

    task.progress = stop_at_the_ninth  # type: ignore[method-assign]
    lora.run(task, found, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    last = channel.outputs["checkpoints/step-9/adapter_model.safetensors"]
    assert channel.outputs["adapter_model.safetensors"] != last


def test_examples_with_nothing_to_predict_are_passed_over(tmp_path: Path) -> None:
    # An empty text is one token, its end, which has none before it.
    empty = b'{"text": ""}\n' * 8
    _, channel = run(tmp_path, records=empty + b'{"text": "abc"}\n', per_device_train_batch_size=1, max_steps=3)
    assert "adapter_model.safetensors" in channel.outputs
    with pytest.raises(UsageError, match="no token of the 8 counts in the loss"):
        run(tmp_path / "none", records=empty, max_steps=1)


def test_more_checkpoints_than_may_come_back_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for params in ({"max_steps": 300, "save_steps": 1}, {"num_train_epochs": 50, "save_steps": 1}):
        with pytest.raises(
            UsageError, match="save_steps = 1: of 300 steps that are more checkpoints, of two files each, than the 256"
        ):
            run(tmp_path, **params)
    with pytest.raises(UsageError, match=r"num_train_epochs = 200.* are more checkpoints"):
        lora.examine(LoraParams.read(TINY | {"num_train_epochs": 200, "save_strategy": "epoch"}), {})


def test_one_process_has_one_gpu_however_many_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainingArguments

    from glasshouse.workloads.lora.lora_trainer import arguments

    task, found, _ = recorded_task("lora", TINY | {"max_steps": 1}, {"train.jsonl": RECORDS}, tmp_path)
    assert isinstance(found, LoraParams)
    setup = TrainingArguments._setup_devices.func  # type: ignore[attr-defined]

    def two(self: Any) -> Any:
        device = setup(self)
        self._n_gpu = 2
        return device

    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(two))
    assert arguments(found, task, torch.device("cpu")).train_batch_size == 4


# going on from an adapter


def adapter_of(channel: Recorder) -> dict[str, bytes]:
    names = ("adapter_config.json", "adapter_model.safetensors")
    return {f"before/{name}": channel.outputs[name] for name in names}


def test_training_goes_on_from_an_adapter(tmp_path: Path) -> None:
    params = {"learning_rate": 0.01, "max_steps": 10}
    first, one = run(tmp_path / "1", r=2, target_modules=["k_proj"], use_rslora=True, **params)
    second, two = run(tmp_path / "2", files=adapter_of(one), adapter="before", **params)
    # The first batch is the same one, and what was learnt from it is there.
    assert float(second.loss_first or 9) < 0.7 * float(first.loss_first or 0)
    config = json.loads(two.outputs["adapter_config.json"])
    assert (config["r"], config["target_modules"], config["use_rslora"]) == (2, ["k_proj"], True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base_model_name_or_path": "org/other"}, "is of the base 'org/other'"),
        ({"peft_type": "LOHA"}, "of a kind that lora does not train"),
        ({"bias": "all"}, "of a kind that lora does not train"),
        ({"modules_to_save": ["lm_head"]}, "does not train: modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "does not train: rank_pattern"),
        ({"r": 0}, "r must be a whole number"),
        ({"init_lora_weights": "pissa"}, "does not train: init_lora_weights"),
        ({"r": 8}, "another base: .* another shape"),
        ({"target_modules": ["q_proj", "k_proj"]}, "another base: .*k_proj.* is not there"),
    ],
)
def test_an_adapter_of_another_base_or_kind_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    _, channel = run(tmp_path / "1", max_steps=1)
    files = adapter_of(channel)
    files["before/adapter_config.json"] = json.dumps(json.loads(files["before/adapter_config.json"]) | changes).encode()
    with pytest.raises(UsageError, match=why) as refused:
        run(tmp_path / "2", files=files, adapter="before", max_steps=1)
    assert refused.value.code is Code.JOB_INVALID


def test_an_adapter_without_weights_is_refused(tmp_path: Path) -> None:
    _, channel = run(tmp_path / "1", max_steps=1)
    files = adapter_of(channel) | {"before/adapter_model.safetensors": save({}, {"format": "pt"})}
    with pytest.raises(UsageError, match=r"another base: .* is not there"):
        run(tmp_path / "2", files=files, adapter="before", max_steps=1)


# fewer bits


@pytest.mark.parametrize("params", [{"load_in_4bit": True}, {"load_in_8bit": True}, {"optim": "adamw_8bit"}])
def test_a_base_in_few_bits_trains_where_bitsandbytes_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(LoraParams, "without_gradients", "")  # without an evaluation, 4 bits train there too
    result, channel = run(tmp_path, dtype="bfloat16", deterministic=False, max_steps=8, learning_rate=0.01, **params)
    assert float(result.loss_final or 9) < 0.7 * float(result.loss_first or 0)
    weights = load(channel.outputs["adapter_model.safetensors"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize("given", [{"load_in_4bit": True}, {"load_in_8bit": True, "use_dora": True}])
def test_what_bitsandbytes_does_not_train_on_a_cpu_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(PlatformError, match=f"trains no job with .*{next(iter(given))} on a CPU") as refused:
        run(tmp_path, **given)
    assert refused.value.code is Code.DEVICE_MISSING
    with pytest.raises(UsageError, match="is a CPU, on which bitsandbytes does not train"):
        lora.examine(LoraParams.read(TINY | given), {})


def test_a_machine_without_bitsandbytes_is_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(lora.requirements(LoraParams.read(TINY | {"load_in_4bit": True}), ["train.jsonl"])) == [
        "bitsandbytes>=0.46"
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RunError, match="lacks the distribution bitsandbytes") as refused:
        run(tmp_path, load_in_8bit=True)
    assert refused.value.code is Code.REQUIREMENT_MISSING
    assert "load_in_4bit" in refused.value.hint
