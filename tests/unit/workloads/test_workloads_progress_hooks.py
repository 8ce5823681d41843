"""Live progress of scripts that do not report: what counts as a step, who reports, and what no hook may do."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from glasshouse.task.channel import EventLines
from glasshouse.task.handle import Task
from glasshouse.task.inputs import FolderInputs
from glasshouse.workloads.process import progress_hooks
from glasshouse.workloads.process.import_hooks import ImportHooks
from glasshouse.workloads.process.progress_hooks import ProgressHooks

torch = pytest.importorskip("torch")


class Watched:
    """A task in this process, and what was reported of it: each count with its total."""

    def __init__(self, folder: Path, source: str = "") -> None:
        (folder / "inputs").mkdir()
        (folder / "inputs" / "train.py").write_text(source)
        self._events = BytesIO()
        channel = EventLines(self._events, folder / "outputs")
        self.task = Task(params={}, inputs=FolderInputs(folder / "inputs"), channel=channel, workspace=folder)
        self.task.input_dir  # noqa: B018 - laid out, as before a script runs
        self.counts: list[tuple[int, int | None]] = []
        self.task.measure_by(lambda done, _loss: self.counts.append((done, (self.task._last or (0, None))[1])), bytes)

    @contextmanager
    def running(self) -> Iterator[ProgressHooks]:
        hooks = ProgressHooks(self.task, "train.py")
        with hooks:
            yield hooks

    @property
    def done(self) -> list[int]:
        return [done for done, _ in self.counts]

    @property
    def sent(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._events.getvalue().splitlines()]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def sgd() -> Any:
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], 0.1)


def test_each_step_of_an_optimizer_is_one(watched: Watched) -> None:
    one = sgd()
    with watched.running():
        for _ in range(3):
            one.step()
    one.step()  # the script is over
    assert watched.counts == [(1, None), (2, None), (3, None)]
    assert watched.task.last_report[:2] == (3, "step")


def test_optimizers_that_take_turns_make_one_step(watched: Watched) -> None:
    """A GAN's two, also where the critic trains more often; a third that joins late doubles nothing."""
    critic, generator, late = sgd(), sgd(), sgd()
    with watched.running():
        for _ in range(3):
            critic.step()
            generator.step()
        for _ in range(2):
            for _ in range(2):
                critic.step()
            generator.step()
            late.step()
    assert watched.done == list(range(1, 8))


def test_the_folds_of_a_cross_validation_add_up(watched: Watched) -> None:
    with watched.running():
        for _ in range(3):
            one = sgd()
            for _ in range(4):
                one.step()
            del one
    assert watched.done == list(range(1, 13))


def test_a_step_that_a_scaler_skips_is_none(watched: Watched) -> None:
    one, scaler = sgd(), torch.amp.GradScaler("cpu")
    with watched.running():
        for value in (1.0, float("inf"), 1.0):
            weight = one.param_groups[0]["params"][0]
            weight.grad = None
            scaler.scale((weight * value).sum()).backward()
            scaler.step(one)
            scaler.update()
    assert watched.done == [1, 2]


@pytest.mark.filterwarnings("ignore")  # dynamo looks at the gradient of a tensor that is no leaf
def test_a_step_that_is_compiled_is_compiled_as_without_the_hook_and_not_counted(watched: Watched) -> None:
    def breaks() -> dict[str, int]:
        one = sgd()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(one.step, backend="eager")()
        assert one.param_groups[0]["params"][0].tolist() == pytest.approx([-0.1, -0.1])
        return dict(torch._dynamo.utils.counters["graph_break"])

    before = breaks()
    with watched.running():
        assert breaks() == before
        sgd().step()
    assert watched.done == [1]
    torch._dynamo.reset()


def test_what_a_script_reports_itself_is_all_from_then_on(watched: Watched) -> None:
    one = sgd()
    with watched.running():
        one.step()
        getattr(watched.task, "progress")(10, 20)  # noqa: B009 - in a way that is not to be seen in the source
        one.step()
    assert watched.done == [1, 10]


@pytest.mark.parametrize(
    ("source", "counted"),
    [
        ("import glasshouse.task\nglasshouse.task.current().progress(1, 3, unit='epoch')", False),
        ("import glasshouse.task as g\nreport = g.current().progress\n", False),
        ("import glasshouse.task as g\nfrom rich.progress import track\ng.current().save_bytes('a', b'')", True),
        ("bar.progress(1)", True),
    ],
)
def test_a_script_whose_source_reports_is_left_to_it_from_the_start(tmp_path: Path, source: str, counted: bool) -> None:
    """Its first report may come after an epoch, in epochs: a log has one unit, and would pass it over."""
    watched = Watched(tmp_path, source)
    with watched.running():
        sgd().step()
    assert watched.done == ([1] if counted else [])


def test_a_process_that_the_script_forks_reports_nothing(watched: Watched) -> None:
    one = sgd()
    with watched.running():
        child = os.fork()
        if not child:
            one.step()
            os._exit(len(watched.counts))
        assert os.waitpid(child, 0)[1] == 0


def test_a_hook_that_fails_is_said_once_and_the_script_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    one = sgd()
    monkeypatch.setattr(watched.task, "observe", fail)
    with watched.running():
        one.step()
        one.step()
    assert capsys.readouterr().err == "glasshouse: no live progress from here on: ValueError: no\n"


def test_an_interrupt_at_a_boundary_reaches_the_script(watched: Watched) -> None:
    """A measured job ends there, and an owner's stop may arrive there."""

    def end(_done: int, _loss: object) -> None:
        raise KeyboardInterrupt

    watched.task.measure_by(end, bytes)
    with watched.running(), pytest.raises(KeyboardInterrupt):
        sgd().step()


def test_the_loop_of_a_framework_counts_and_not_its_optimizers(watched: Watched) -> None:
    one = sgd()
    with watched.running() as hooks:
        hooks.began(0, 2)
        for step in (1, 2):
            one.step()
            hooks.stepped(step, 0.5)
        hooks.ended()
        one.step()  # a loop of the script's own behind it
        hooks.began(0, 2)  # the second of a search: a log takes no other total
        one.step()
        hooks.stepped(1, None)
        hooks.ended()
    assert watched.done == [0, 1, 2, 3, 3, 4]
    assert [total for _, total in watched.counts] == [2, 2, 2, None, None, None]


def test_a_loop_that_resumes_counts_from_there(watched: Watched) -> None:
    with watched.running() as hooks:
        hooks.began(500, 1000)
        hooks.stepped(501, None)
        hooks.ended()
        hooks.began(501, 1000)  # and resumes from there in the same script
        hooks.stepped(502, None)
    assert watched.counts == [(500, 1000), (501, 1000), (501, 1000), (502, 1000)]


def test_the_hooks_are_those_that_the_frameworks_offer() -> None:
    """Public names and their form, which an upgrade may change."""
    transformers = pytest.importorskip("transformers.trainer")
    assert all(issubclass(one, transformers.TrainerCallback) for one in transformers.DEFAULT_CALLBACKS)
    for package, factory in (
        ("lightning.pytorch", progress_hooks.lightning_callbacks),
        ("pytorch_lightning", progress_hooks.pytorch_lightning_callbacks),
    ):
        points = importlib.metadata.entry_points(group=f"{package}.callbacks_factory")
        assert [one.load() for one in points if one.name == "glasshouse_progress"] == [factory]
        assert factory() == []  # outside of a script that is watched


def test_nothing_stays_behind(watched: Watched) -> None:
    transformers = pytest.importorskip("transformers.trainer")
    before = list(transformers.DEFAULT_CALLBACKS), list(sys.meta_path)
    with watched.running():
        added = transformers.DEFAULT_CALLBACKS[-1]
        assert added not in before[0]
        copied, arguments = added().__reduce__()
        assert (copied, arguments) == (transformers.TrainerCallback, ())  # pickled for another process, it is inert
    assert (transformers.DEFAULT_CALLBACKS, sys.meta_path) == before
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "watched_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "watched_module"
    sys.modules.pop("watched_module", None)


def test_a_module_calls_back_when_it_is_imported_and_again_when_it_is_reloaded(module: str) -> None:
    seen: list[ModuleType] = []
    with ImportHooks({module: lambda found: seen.append(found.value)}):
        assert seen == []
        found = importlib.import_module(module)
        assert (seen, vars(found.__spec__.loader).keys()) == ([1], {"name", "path"})  # as without us
        importlib.import_module(module)
        importlib.reload(found)
        assert seen == [1, 1]
        importlib.util.find_spec("json.tool")
    importlib.reload(found)
    assert seen == [1, 1]


def test_a_module_that_is_imported_already_calls_back_at_once(module: str) -> None:
    found, seen = importlib.import_module(module), list[ModuleType]()
    with ImportHooks({module: seen.append}):
        assert seen == [found]


def test_a_finder_that_asks_the_others_too_ends(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hooks of debuggers and of other wrappers of imports do."""

    class Delegating:
        within = False

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if self.within or name != module:
                return None
            self.within = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.within = False

    seen: list[ModuleType] = []
    monkeypatch.setattr(sys, "meta_path", [Delegating(), *sys.meta_path])
    with ImportHooks({module: seen.append}):
        assert importlib.import_module(module) is seen[0]
