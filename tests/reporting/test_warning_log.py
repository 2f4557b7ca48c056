"""Each kind of warning once: on the screen for a process, in the folder for a run."""

import logging
from pathlib import Path

from gspo.reporting.files import read_lines
from gspo.reporting.warning_log import LibraryLog, WarningLog


def test_a_kind_is_kept_once_whatever_its_figures(tmp_path: Path) -> None:
    log = WarningLog(tmp_path / "warnings.jsonl")
    assert log.add(1, "clip range", "92 % lie outside", once=True)
    assert not log.add(2, "clip range", "93 % lie outside", once=True)
    assert log.add(0, "settings", "a has no effect", once=False)
    assert log.add(0, "settings", "b has no effect", once=False)
    assert not log.add(3, "settings", "a has no effect", once=False)
    assert read_lines(tmp_path / "warnings.jsonl") == [
        {"step": 1, "what": "clip range", "text": "92 % lie outside"},
        {"step": 0, "what": "settings", "text": "a has no effect"},
        {"step": 0, "what": "settings", "text": "b has no effect"},
    ]


def test_a_resumed_run_says_again_and_writes_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "warnings.jsonl"
    first = WarningLog(path)
    for step, what in ((0, "settings"), (2, "no signal"), (5, "clip range")):
        first.add(step, what, f"{what} of step {step}", once=what != "settings")
    resumed = WarningLog(path, resume_step=4)
    assert [record["step"] for record in read_lines(path)] == [0, 2]  # step 5 is done again
    assert resumed.add(4, "settings", "settings of step 0", once=False)
    assert resumed.add(5, "no signal", "no signal of step 5", once=True)
    assert [record["step"] for record in read_lines(path)] == [0, 2]
    assert resumed.add(5, "clip range", "clip range of step 5", once=True)
    assert [record["step"] for record in read_lines(path)] == [0, 2, 5]
    WarningLog(path, resume_step=-1)  # a run without a checkpoint begins again
    assert path.read_bytes() == b""


def test_what_the_library_logs_is_heard_early_and_late_until_it_is_closed() -> None:
    log, told = LibraryLog(), []
    logging.getLogger("gspo.policy.probe").warning("using %s", "padded")
    logging.getLogger("gspo.policy.probe").info("nothing to worry about")
    log.tell(lambda *heard: told.append(heard))
    logging.getLogger("gspo.rollout.decoder_choice").warning("no cache")
    assert told == [("policy", "using padded"), ("rollout", "no cache")]
    log.close()
    logging.getLogger("gspo.policy").warning("too late")
    assert len(told) == 2
