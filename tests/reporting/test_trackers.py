"""Trackers: missing packages are named at once, and values arrive."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gspo.config import TrackingConfig
from gspo.errors import BadInputError
from gspo.reporting.trackers import check_trackers, open_trackers


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadInputError, match=r"tracking\.trackers: wandb is not installed; pip install 'gspo\[wandb\]'"):
        check_trackers(TrackingConfig(trackers=["wandb"]))
    check_trackers(TrackingConfig())


def test_tensorboard_files_hold_the_values_and_resuming_replaces_later_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, values in ((None, {1: 0.25, 2: 0.5}), (1, {2: 0.75})):
        (tracker,) = open_trackers(TrackingConfig(trackers=["tensorboard"]), tmp_path, {}, resume_step=resume_step)
        for step, value in values.items():
            tracker.log(step, {"reward/mean": value})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_under_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finished")

    def init(**settings: Any) -> Run:
        calls.append(settings)
        return Run()

    package = types.ModuleType(name)
    package.init = init  # type: ignore[attr-defined]
    package.__spec__ = importlib.util.spec_from_loader(name, None)
    monkeypatch.setitem(sys.modules, name, package)
    tracking = TrackingConfig(trackers=[name], project="p")  # type: ignore[list-item]
    (tracker,) = open_trackers(tracking, tmp_path, {"a": 1})
    tracker.log(3, {"reward/mean": 0.5})
    tracker.close()
    settings, *rest = calls
    assert settings["project"] == "p"
    assert settings["name"] == tmp_path.name
    assert settings["resume"] == "allow"
    assert settings["config"] == {"a": 1}
    assert rest == [(3, {"reward/mean": 0.5}), "finished"]
