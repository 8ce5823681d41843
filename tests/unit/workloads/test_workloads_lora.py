"""LoRA: the published numbers of parameters, weights from the package, an adapter that peft loads.

The libraries are imported by the tests that use them: at the top, each process of the suite would wait for them.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from glasshouse.errors import Code, GlasshouseError, PlatformError, RunError, UsageError
from glasshouse.workloads.builtin import training
from glasshouse.workloads.lora import lora
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.process import environment
from glasshouse.workloads.process.job_control import JobControl, Result
from glasshouse.workloads.registry import parse
from tools.recorder import Recorder, recorded_task

pytestmark = [
    pytest.mark.usefixtures("framework"),
    # peft still calls what transformers has renamed; it is peft's to change.
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

RECORDS = b"".join(
    json.dumps({"instruction": "Even?", "input": str(n), "output": "no" if n % 2 else "yes"}).encode() + b"\n"
    for n in range(32)
)
TINY = {"model": "config:qwen2-tiny", "dtype": "float32", "max_steps": 3, "device": "cpu"}


def random_model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    from glasshouse.workloads.lora import models

    return models.random_model(name, dtype, device)


def run(tmp_path: Path, files: dict[str, bytes] | None = None, **params: Any) -> tuple[Result, Recorder]:
    task, found, channel = recorded_task("lora", TINY | params, {"train.jsonl": RECORDS} | (files or {}), tmp_path)
    assert isinstance(found, LoraParams)
    result = lora.run(task, found, JobControl(lambda *_: 0))
    task.close()
    return result, channel


@pytest.mark.parametrize(("name", "expected"), [("qwen2.5-0.5b", 270_336), ("qwen2.5-7b", 1_261_568)])
def test_the_default_adapter_has_the_published_number_of_parameters(name: str, expected: int) -> None:
    from glasshouse.workloads.lora import models

    model = random_model(name, torch.bfloat16, torch.device("meta"))
    params = parse("lora", {"model": f"config:{name}"})
    assert isinstance(params, LoraParams)
    assert training.trainable(models.attach(model, params)) == expected


@pytest.mark.parametrize(("name", "expected"), [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512)])
def test_the_architectures_have_the_published_number_of_parameters(name: str, expected: int) -> None:
    model = random_model(name, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_training_lowers_the_loss_and_reports_it(tmp_path: Path) -> None:
    result, channel = run(tmp_path, max_steps=25, learning_rate=0.01)
    assert result.loss_first is not None
    assert result.loss_final is not None
    assert float(result.loss_final) < float(result.loss_first) / 3
    assert (result.unit, result.done, result.stop_reason, result.trainable) == ("step", 25, "steps", 7168)
    progress = [message for message in channel.messages if message["type"] == "progress"]
    assert (progress[0]["done"], progress[-1]["done"], progress[-1]["total"]) == (0, 25, 25)


def test_peft_loads_the_adapter_and_gives_the_same_answers(tmp_path: Path) -> None:
    from peft import PeftModel

    _, channel = run(tmp_path, seed=5)
    assert set(channel.outputs) == {"adapter_model.safetensors", "adapter_config.json"}
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, data in channel.outputs.items():
        (folder / name).write_bytes(data)
    training.seed(5, threads=None, deterministic=False)
    base = random_model("qwen2-tiny", torch.float32, torch.device("cpu"))
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(folder)).eval()(ids).logits
    assert not torch.allclose(plain, adapted)
    # By hand: the first layer's query gets B·A·x times alpha over rank.
    weights = load(channel.outputs["adapter_model.safetensors"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    a, b = weights[name.format("A")], weights[name.format("B")]
    layer = base.model.layers[0].self_attn.q_proj
    x = torch.randn(1, 128)
    expected = layer.base_layer(x) + (x @ a.T @ b.T) * 8 / 4
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_the_adapters_files_are_the_same_for_the_same_job(tmp_path: Path) -> None:
    first, one = run(tmp_path / "1", deterministic=True)
    second, two = run(tmp_path / "2", deterministic=True)
    other, _ = run(tmp_path / "3", deterministic=True, seed=1)
    assert one.outputs == two.outputs
    assert first.digests == second.digests != other.digests


def test_the_adapter_says_what_it_belongs_to(tmp_path: Path) -> None:
    _, channel = run(tmp_path)
    config = json.loads(channel.outputs["adapter_config.json"])
    assert config["base_model_name_or_path"] == "qwen2-tiny"
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "v_proj"])


def test_the_base_is_bfloat16_and_the_adapter_float32(tmp_path: Path) -> None:
    _, channel = run(tmp_path, dtype="bfloat16", max_steps=1)
    weights = load(channel.outputs["adapter_model.safetensors"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert random_model("qwen2-tiny", torch.bfloat16, torch.device("cpu")).dtype is torch.bfloat16


def test_a_time_target_ends_the_run(tmp_path: Path) -> None:
    params: dict[str, Any] = {key: value for key, value in TINY.items() if key != "max_steps"}
    task, found, _ = recorded_task("lora", params | {"seconds": 0.5}, {"train.jsonl": RECORDS}, tmp_path)
    result = lora.run(task, found, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    assert result.stop_reason == "time"
    assert result.done >= 1
    assert result.elapsed_us >= 500_000


def test_the_owner_may_stop_it_and_gets_the_adapter_so_far(tmp_path: Path) -> None:
    task, params, channel = recorded_task("lora", TINY | {"max_steps": 10**6}, {"train.jsonl": RECORDS}, tmp_path)
    progress = task.progress

    def stop_at_the_third(done: int, *rest: Any, **more: Any) -> bool:
        channel.stopping = done >= 3
        return progress(done, *rest, **more)

    task.progress = stop_at_the_third  # type: ignore[method-assign]
    result = lora.run(task, params, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    assert (result.done, result.stop_reason) == (3, "stopped")
    assert "adapter_model.safetensors" in channel.outputs


def test_checkpoints_leave_on_the_way(tmp_path: Path) -> None:
    _, channel = run(tmp_path, max_steps=5, save_steps=2)
    kinds = {m["name"]: m["kind"] for m in channel.messages if m["type"] == "output"}
    assert [name for name, kind in kinds.items() if kind == "checkpoint"] == [
        f"checkpoints/step-{step}/{name}"
        for step in (2, 4, 5)  # Trainer saves at the last step too
        for name in ("adapter_model.safetensors", "adapter_config.json")
    ]
    assert channel.outputs["checkpoints/step-2/adapter_config.json"] == channel.outputs["adapter_config.json"]
    assert load(channel.outputs["checkpoints/step-2/adapter_model.safetensors"]).keys()


def poisoned(monkeypatch: pytest.MonkeyPatch, where: str, step: int) -> None:
    """Have a number be none at one step: the loss, the gradient, or the adapter itself."""
    from accelerate import Accelerator
    from transformers import Trainer

    compute, clip = Trainer.compute_loss, Accelerator.clip_grad_norm_
    seen = 0

    def compute_loss(self: Any, *given: Any, **more: Any) -> Any:
        nonlocal seen
        seen += 1
        loss = compute(self, *given, **more)
        return loss * math.nan if where == "the loss" and seen == step else loss

    def clip_grad_norm(self: Any, parameters: Any, *given: Any, **more: Any) -> Any:
        parameters = list(parameters)
        parameter = next(one for one in parameters if one.requires_grad)
        if where == "the gradient" and seen == step:
            parameter.grad.fill_(math.inf)
        if where == "the adapter" and seen == step:
            parameter.data.fill_(math.nan)
        return clip(self, parameters, *given, **more)

    monkeypatch.setattr(Trainer, "compute_loss", compute_loss)
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", clip_grad_norm)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("where", ["the loss", "the gradient", "the adapter"])
def test_a_number_that_is_none_ends_the_run_and_no_adapter_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    poisoned(monkeypatch, where, step)
    task, params, channel = recorded_task("lora", TINY | {"save_steps": 1}, {"train.jsonl": RECORDS}, tmp_path)
    with pytest.raises(RunError, match=rf"(loss|gradient|adapter) of step {step} ") as failed:
        lora.run(task, params, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    assert failed.value.code is Code.NONFINITE_LOSS
    weights = [name for name in channel.outputs if name.endswith(".safetensors")]
    assert weights == [f"checkpoints/step-{n}/adapter_model.safetensors" for n in range(1, step)]


def test_an_adapter_that_is_no_number_leaves_where_the_job_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, "the loss", 2)
    result, channel = run(tmp_path, fail_on_nonfinite=False)
    assert (result.done, result.loss_final) == (3, None)
    assert "adapter_model.safetensors" in channel.outputs


def test_the_gradient_is_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def norm(_optimizer: Any, *_: Any) -> None:
        grads = [p.grad for group in _optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen.append(float(torch.stack([grad.norm() for grad in grads]).norm()))

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    hook = register_optimizer_step_pre_hook(norm)
    try:
        run(tmp_path, max_grad_norm=0.001)
        clipped, seen[:] = list(seen), []
        run(tmp_path / "off", max_grad_norm=0)
    finally:
        hook.remove()
    assert len(clipped) == len(seen) == 3
    assert max(clipped) <= 0.001 * 1.01 < min(seen)


def examples_of(lines: bytes, **params: Any) -> Any:
    from glasshouse.workloads.lora.data_forms import read_records
    from glasshouse.workloads.lora.encoding import ByteTokenizer, encode_records

    found = read_records(lambda _: io.BytesIO(lines), ["t"], "t")
    return encode_records(found, "t", ByteTokenizer(), LoraParams.read(TINY | params))


def test_only_the_answer_counts_in_the_loss() -> None:
    # The same answers behind different prompts: what is trained on is not the prompt.
    from glasshouse.workloads.lora.batches import Rows, collator
    from glasshouse.workloads.lora.encoding import ByteTokenizer

    rows = Rows(examples_of(RECORDS), [[number] for number in range(4)])
    batch = collator(0, packing=False)([rows[number] for number in range(4)])
    counted = [row[row != -100].tolist() for row in batch["labels"]]
    tokenizer = ByteTokenizer()
    assert {tuple(row) for row in counted} <= {tuple(tokenizer(f"{word}</s>")["input_ids"]) for word in ("yes", "no")}
    assert (batch["attention_mask"].sum(dim=1) == (batch["input_ids"] != 0).sum(dim=1)).all()


def packed_model(folder: Path, *, shards: bool = False) -> dict[str, bytes]:
    """Return a small real model's folder, as a person would pack it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", "<unk>", *"#EvenRsp:yo?0"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    return {f"base/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_from_the_package_has_its_own_weights(tmp_path: Path, shards: bool) -> None:
    from transformers import AutoModelForCausalLM

    from glasshouse.workloads.lora.models import base_model

    files = packed_model(tmp_path / "model", shards=shards)
    assert any("index" in name for name in files) is shards
    task, params, _ = recorded_task(
        "lora", TINY | {"model": "inputs:base", "dtype": "bfloat16"}, files | {"train.jsonl": RECORDS}, tmp_path
    )
    assert isinstance(params, LoraParams)
    model, tokenizer = base_model(task, params, torch.device("cpu"))
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    expected = dict(original.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    # The weights themselves never become a file.
    assert not list(task.workspace.rglob("*.safetensors"))
    base_model(task, params, torch.device("cpu"))  # as another rank does, in the same workspace


def test_a_model_from_the_package_is_trained(tmp_path: Path) -> None:
    files = packed_model(tmp_path / "model")
    result, channel = run(tmp_path, files, model="inputs:base")
    assert result.trainable == 2 * 4 * ((32 + 32) + (32 + 16))
    assert json.loads(channel.outputs["adapter_config.json"])["base_model_name_or_path"] == "base"


def test_an_adapter_finds_its_base_by_name_as_peft_users_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM

    _, channel = run(tmp_path, packed_model(tmp_path / "model"), model="inputs:base")
    for name, data in channel.outputs.items():
        (tmp_path / "adapter" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "adapter" / name).write_bytes(data)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").rename(tmp_path / "elsewhere" / "base")
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    assert model.get_nb_trainable_parameters()[1] > 0


def test_the_name_of_the_base_may_be_said(tmp_path: Path) -> None:
    _, channel = run(tmp_path, base_name="Qwen/Qwen2.5-0.5B", max_steps=1)
    assert json.loads(channel.outputs["adapter_config.json"])["base_model_name_or_path"] == "Qwen/Qwen2.5-0.5B"


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in names}


@pytest.mark.parametrize("lost", ["base/config.json", "base/model.safetensors", "base/tokenizer.json"])
def test_a_folder_that_is_no_whole_model_is_refused(tmp_path: Path, lost: str) -> None:
    files = packed_model(tmp_path / "model")
    assert lost in files
    with pytest.raises(UsageError) as refused:
        run(tmp_path, without(files, lost), model="inputs:base")
    assert refused.value.code in (Code.FILE_MISSING, Code.JOB_INVALID)


def test_weights_as_pickles_are_not_loaded(tmp_path: Path) -> None:
    files = without(packed_model(tmp_path / "model"), "base/model.safetensors")
    with pytest.raises(UsageError, match=r"no weights named"):
        run(tmp_path, files | {"base/pytorch_model.bin": b"\x80\x04."}, model="inputs:base")


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    files = packed_model(tmp_path / "model")
    config = json.loads(files["base/config.json"])
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    files |= {"base/config.json": json.dumps(config).encode(), "base/own.py": b"raise SystemExit('ran')"}
    with pytest.raises(UsageError) as refused:
        run(tmp_path, files, model="inputs:base")
    assert refused.value.code is Code.JOB_INVALID


@pytest.mark.parametrize(("egress", "says"), [(False, "reach no network"), (True, "could not be had")])
def test_a_hub_id_that_cannot_be_had_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, egress: bool, says: str
) -> None:
    monkeypatch.setattr(environment, "egress_open", lambda: egress)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PlatformError, match=says) as refused:
        run(tmp_path, model="nobody-at-all/no-such-model")
    assert refused.value.code is Code.MODEL_NOT_FOUND
    assert "[inputs]" in refused.value.hint


def test_asking_for_a_gpu_where_there_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training.prepare(LoraParams.read(TINY | {"device": "auto"})) == torch.device("cpu")
    with pytest.raises(PlatformError) as refused:
        training.prepare(LoraParams.read(TINY | {"device": "cuda"}))
    assert refused.value.code is Code.DEVICE_MISSING


@pytest.mark.parametrize(
    ("params", "code"),
    [({"data": "other.jsonl"}, Code.FILE_MISSING), ({"target_modules": ["no_such"]}, Code.JOB_INVALID)],
)
def test_a_job_that_cannot_be_done_is_the_users(tmp_path: Path, params: dict[str, Any], code: Code) -> None:
    with pytest.raises(GlasshouseError) as refused:
        run(tmp_path, **params)
    assert refused.value.code is code


def test_gradient_checkpointing_changes_memory_and_nothing_else(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "1", deterministic=True)
    spared, _ = run(tmp_path / "2", deterministic=True, gradient_checkpointing=True)
    assert plain.loss_first == spared.loss_first


def test_saved_tensors_are_plain_safetensors(tmp_path: Path) -> None:
    _, channel = run(tmp_path)
    tensors = load(channel.outputs["adapter_model.safetensors"])
    assert save(tensors, {"format": "pt"}) == channel.outputs["adapter_model.safetensors"]
