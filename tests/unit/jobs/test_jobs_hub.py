"""A model of the hub is packed on the owner's side; what cannot be had is a clear error."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define import seal_job as content_module
from glasshouse.jobs.define.jobfile import Job, parse
from glasshouse.jobs.define.seal_job import content_of


def job(folder: Path) -> Job:
    (folder / "train.jsonl").write_text("{}")
    text = """
    workload = "lora"
    [inputs]
    "train.jsonl" = "train.jsonl"
    [params]
    model = "someone/small-model"
    revision = "abc123"
    learning_rate = 1e-4
    [policy]
    assurance = "software"
    profile = "standard"
    """
    return parse(text.encode(), folder=folder, default_name="job")


class Hub(types.ModuleType):
    """A hub's client whose cache consists of links, as the real one's does."""

    def __init__(self, cache: Path, *, names: tuple[str, ...] = (), error: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.cache, self.names, self.error = cache, names, error
        self.asked: dict[str, object] = {}

    def snapshot_download(self, name: str, **options: object) -> str:
        self.asked = {"name": name, **options}
        if self.error is not None:
            raise self.error
        (self.cache / "blobs").mkdir(parents=True)
        (self.cache / "snapshot").mkdir()
        for number, file in enumerate(self.names):
            (self.cache / "blobs" / str(number)).write_text(f"content of {file}")
            (self.cache / "snapshot" / file).symlink_to(self.cache / "blobs" / str(number))
        return str(self.cache / "snapshot")


def test_a_hub_model_becomes_inputs_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "cache", names=("config.json", "model.safetensors"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    examined: list[str] = []
    monkeypatch.setattr(content_module, "examine", lambda _workload, _params, files: examined.extend(files) or [])
    content = content_of(job(tmp_path))
    assert examined == [source.path for source in content.sources]  # as any other packed model
    assert [source.path for source in content.sources] == [
        "models/small-model/config.json",
        "models/small-model/model.safetensors",
        "train.jsonl",
    ]
    with content.sources[1].open() as stream:
        assert stream.read() == b"content of model.safetensors"
    assert content.params == {
        "base_name": "someone/small-model",
        "model": "inputs:models/small-model",
        "learning_rate": "0.0001",
    }
    assert hub.asked["revision"] == "abc123"
    patterns = hub.asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not {"*", "*.py", "*.bin", "*.pt"} & set(patterns), "no code and no pickle is taken from the hub"


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("404"), RuntimeError("some HTTP library's")])
def test_a_hub_that_does_not_give_it_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(tmp_path / "cache", error=error))
    with pytest.raises(UsageError) as refused:
        content_of(job(tmp_path))
    assert refused.value.code is Code.MODEL_NOT_FOUND
    assert "someone/small-model at abc123" in refused.value.message
    assert "inputs:FOLDER" in refused.value.hint


def test_a_model_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(tmp_path / "cache", names=("config.json",)))
    with pytest.raises(UsageError, match="safetensors"):
        content_of(job(tmp_path))


def test_without_the_hubs_client_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError) as refused:
        content_of(job(tmp_path))
    assert refused.value.code is Code.REQUIREMENT_MISSING
