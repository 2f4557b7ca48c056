"""The `gspo` command. torch and transformers are imported once the arguments and the config are known to be right."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from gspo import __version__
from gspo.config import load_config
from gspo.config.flags import split_overrides, why_unknown
from gspo.distributed.launch import is_one_of_many, run_among_others, status_of
from gspo.errors import BadInputError
from gspo.reporting.run_folder import ROLLOUTS_SHOWN, RunFolder
from gspo.training.command import run_train

_OVERRIDES = """
Any setting of docs/settings.md can be given as a flag and wins over the file:
  --training.steps 50 --rollout.stop '["\\n"]' --task.parameters.max_terms 4
"""
_BASE = """
Where the model lies that an adapter belongs to, if it was moved: --model.path FOLDER
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, 1 (the run cannot go on), 2 (bad input), 130 (Ctrl-C) or 143 (SIGTERM).

    Of the processes that a launcher started, the first one that fails says why, and the others end without a word.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    return run_among_others(lambda: _main(given)) if is_one_of_many() else _main(given)


def _main(argv: list[str]) -> int:
    return status_of(lambda: _dispatch(argv))


class Parser(argparse.ArgumentParser):
    """Its errors are those of bad input: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message}; see {self.prog} --help")


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """A command's arguments, and the settings given as flags. Raises BadInputError for unknown ones."""
    words, overrides = split_overrides(argv)
    arguments, unknown = _parser().parse_known_args(words)
    if unknown:
        raise BadInputError(why_unknown(unknown[0]))
    return arguments, overrides


def _dispatch(argv: list[str]) -> int:
    arguments, overrides = read_arguments(argv)
    if is_one_of_many() and arguments.command != "train":
        raise BadInputError(
            f"gspo {arguments.command} runs in one process; start it without torchrun (WORLD_SIZE is set)"
        )
    if arguments.command == "train":
        return run_train(arguments.config, overrides, resume=arguments.resume, dry_run=arguments.dry_run)
    if arguments.command == "export":
        return _export(arguments.model, arguments.folder, overrides)
    if arguments.command == "serve-command":
        return _serve_command(arguments.config, overrides)
    if arguments.command == "audit":
        return _audit(arguments, overrides)
    if arguments.command == "report":
        return _report(arguments, overrides)
    return _evaluate(arguments, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gspo",
        description="Sequence-level reinforcement learning of language models (GSPO, arXiv 2507.18071).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gspo {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="train|eval|report|audit|export|serve-command"
    )
    shape = argparse.RawDescriptionHelpFormatter
    train = commands.add_parser(
        "train", help="train a policy", epilog=_OVERRIDES, formatter_class=shape, allow_abbrev=False
    )
    train.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="settings of the run")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="show the resolved config and what is wrong with it, load task and rewards, and stop before the weights",
    )
    train.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with a run from its last checkpoint, under its own config"
    )
    evaluate = commands.add_parser(
        "eval", help="measure a model or a run", epilog=_OVERRIDES + _BASE, formatter_class=shape, allow_abbrev=False
    )
    evaluate.add_argument("model", metavar="MODEL_OR_RUN", help="hub id, model folder or run folder")
    evaluate.add_argument(
        "--task",
        type=Path,
        metavar="CONFIG.toml",
        help="config whose task, rewards and response length are used; default: the run's. A task can also be given in "
        "flags: --task.kind jsonl --task.path rows.jsonl",
    )
    evaluate.add_argument("--samples", type=int, default=8, metavar="K", help="responses per prompt (default 8)")
    evaluate.add_argument(
        "--temperature", type=float, metavar="T", help="of the samples; default: that of training (rollout.temperature)"
    )
    evaluate.add_argument("--json", action="store_true", help="print the figures as JSON, per prompt too")
    _add_report(commands)
    _add_audit(commands)
    export = commands.add_parser(
        "export",
        help="write a run's policy as one whole model, adapters merged in",
        epilog=_BASE,
        formatter_class=shape,
        allow_abbrev=False,
    )
    export.add_argument("model", metavar="MODEL_OR_RUN", help="run folder, checkpoint, model folder or hub id")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="where to; it must not exist yet")
    serve = commands.add_parser(
        "serve-command",
        help="print the commands that start the vLLM servers of a config",
        epilog=_OVERRIDES,
        formatter_class=shape,
        allow_abbrev=False,
    )
    serve.add_argument("config", type=Path, metavar="CONFIG.toml", help="settings of the run that is to use them")
    return parser


def _add_report(commands: argparse._SubParsersAction[Parser]) -> None:
    report = commands.add_parser(
        "report", help="show what happened in a run: a table, and a page with curves and rollouts", allow_abbrev=False
    )
    report.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder; several are compared, seeds of one config joined"
    )
    report.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="where to write the page; default: report.html in RUN (of several: comparison.html in the first)",
    )
    report.add_argument(
        "--rollouts",
        type=int,
        default=ROLLOUTS_SHOWN,
        metavar="N",
        help=f"rollouts to show of a step, at most (default {ROLLOUTS_SHOWN})",
    )
    step = "show the rollouts of this step (can be repeated); default: the first, the last and some between"
    report.add_argument("--step", type=int, action="append", default=[], metavar="S", help=step)
    report.add_argument(
        "--evaluation",
        type=int,
        action="append",
        default=[],
        metavar="S",
        help="show the held-out responses after this step, 0: before the first (can be repeated); default: the first "
        "and the last evaluation",
    )


def _add_audit(commands: argparse._SubParsersAction[Parser]) -> None:
    audit = commands.add_parser(
        "audit",
        help="compare the inference engine's log-probs with the training engine's",
        epilog=_OVERRIDES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    audit.add_argument(
        "subject",
        type=Path,
        metavar="RUN_OR_CONFIG",
        help="run folder (its recorded rollouts are audited), or config (a rollout batch is drawn)",
    )
    audit.add_argument(
        "--engine-weights",
        choices=("float32", "bfloat16", "int8"),
        help="draw fresh rollouts from an engine whose weights are rounded to this (float32: not at all)",
    )
    audit.add_argument("--json", type=Path, metavar="FILE", help="write every figure as JSON")
    audit.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def _serve_command(path: Path, overrides: Mapping[str, str]) -> int:
    config = load_config(path, overrides)
    from gspo.rollout.serve_command import commands_of

    print("\n".join(commands_of(config)))
    return 0


def _evaluate(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    from gspo.training.evaluation_config import evaluation_config

    if arguments.samples < 1:
        raise BadInputError(f"--samples: found {arguments.samples}, should be 1 or more")
    if arguments.temperature is not None and not 0 <= arguments.temperature < math.inf:
        raise BadInputError(f"--temperature: found {arguments.temperature}, should be 0 (greedy) or more")
    others = dict(overrides)
    base = others.pop("model.path", None)
    config = evaluation_config(
        arguments.model,
        arguments.task,
        overrides=others,
        samples=arguments.samples,
        temperature=arguments.temperature,
    )
    from rich.console import Console

    from gspo.reporting.console import print_estimates
    from gspo.training.evaluate_model import evaluate_config

    report = evaluate_config(config, base=base)
    if arguments.json:
        import json

        print(json.dumps(report.as_record(), indent=2))
    else:
        rows = [(name, asdict(estimate)) for name, estimate in report.estimates().items()]
        drawn = f"{config.evaluation.samples} at temperature {config.evaluation.temperature:g}"
        lost = report.greedy.dropped + report.sampled.dropped
        note = f"; {lost} responses could not be scored" if lost else ""
        print_estimates(Console(), f"held-out accuracy of {arguments.model} (samples: {drawn}{note})", rows)
    return 0


def _audit(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    run = arguments.subject if arguments.subject.is_dir() else None
    config = load_config(arguments.subject, overrides) if run is None else RunFolder.open(run).read_config(overrides)
    from gspo.audit.command import run_audit

    run_audit(config, run=run, engine_weights=arguments.engine_weights, json_file=arguments.json, html=arguments.html)
    return 0


def _report(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    if overrides:
        raise BadInputError(f"--{next(iter(overrides))}: gspo report takes no settings; see gspo report --help")
    if arguments.rollouts < 1:
        raise BadInputError(f"--rollouts: found {arguments.rollouts}, should be 1 or more")
    from gspo.reporting.run_records import read_runs

    runs = read_runs(arguments.runs)
    from gspo.reporting.run_report import write_report

    write_report(
        runs,
        html=arguments.html,
        rollouts=arguments.rollouts,
        steps=arguments.step,
        evaluations=arguments.evaluation,
    )
    return 0


def _export(model: str, folder: Path, overrides: Mapping[str, str]) -> int:
    others = [name for name in overrides if name != "model.path"]
    if others:
        raise BadInputError(f"--{others[0]}: gspo export takes no settings but model.path; see gspo export --help")
    if folder.exists():
        raise BadInputError(f"{folder}: exists already; give a folder that does not")
    from gspo.policy.export import save_merged
    from gspo.policy.load import load_policy

    policy = load_policy(model, base=overrides.get("model.path"), train=False)
    partial = folder.with_name(f".partial-{folder.name}")
    save_merged(policy, partial)
    partial.replace(folder)
    print(f"model: {folder}")
    return 0
