"""What a careful reader of a run would look at: a short list, each with its figure and what to do.

Trends are judged over the last `WINDOW` steps and only in runs of at least as many; facts (an update that was not
made, a response that was lost) wherever they occur. docs/reports.md states every threshold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gspo.reporting.report_plots import clip_bounds
from gspo.reporting.run_records import RunRecords, joined, total

WINDOW = 10
"""Steps over which trends are judged."""

NO_SIGNAL = 0.75
DROPPED = 0.01
TRUNCATED = 0.5
CLIPPED = 0.5
MISMATCH = 0.1
NOISE_OF_RANGE = 0.5
ENTROPY_LEFT = 0.05


def findings(run: RunRecords, reasons: Counter[str]) -> list[str]:
    """One line each; none where nothing stands out. `reasons` are why rollouts were dropped, and how many."""
    if not run.metrics:
        return []
    found = [*_facts(run, reasons), *_accuracy(run)]
    if len(run.metrics) >= WINDOW:
        found += [*_signal(run), *_clip(run), *_entropy(run)]
    return found


def _facts(run: RunRecords, reasons: Counter[str]) -> Iterator[str]:
    metrics = run.metrics
    lost, _ = total(metrics, "optimizer/non_finite")
    if lost:
        yield (
            f"{lost:.0f} updates were not made because their gradient was not finite: look at the ratios of those "
            "steps; a lower optimizer.learning_rate helps if they follow large gradient norms"
        )
    saturated, units = total(metrics, "ratio/saturated")
    if saturated:
        yield (
            f"{saturated:.0f} of {units:.0f} ratios reached the clamp of 20 nats: the policy has nothing in common "
            "any more with the one that sampled; lower optimizer.learning_rate"
        )
    dropped, sampled = total(metrics, "reward/dropped")
    if sampled and dropped > DROPPED * sampled:
        why = f"; most often: {short_reason(reasons.most_common(1)[0][0])}" if reasons else ""
        figure = f"{dropped:.0f} of {sampled:.0f} rollouts ({dropped / sampled:.1%})"
        yield f"{figure} were dropped{why}: mend the cause, the rest of a group carries on without them"
    for name in _functions(run):
        _, count = total(metrics, name)
        values = {record.get(name) for record in metrics} - {None}
        if len(metrics) >= WINDOW and values == {0.0}:
            yield (
                f"reward function {name.removeprefix('reward/function/')} gave 0 on average in each step, over "
                f"{count:.0f} rollouts: it teaches nothing; try it on some responses by hand"
            )
    yield from _engines(run)


def _engines(run: RunRecords) -> Iterator[str]:
    differ = joined(run.metrics, "mismatch/token")
    if differ is not None and differ > MISMATCH:
        yield (
            f"the engine's log-probs differ from the training engine's by {differ:.2g} nats a token on average (two "
            f"engines in bfloat16: about 0.04): gspo audit {run.folder.path} says what that changes"
        )
    if run.config is None or run.config.likelihoods.old != "sampler":
        return
    bounds = clip_bounds(run.config.objective)
    noise = joined(run.metrics, "mismatch/sequence")
    if bounds is not None and run.config.objective.name in ("gspo", "gspo_token") and noise is not None:
        narrow = min(bounds)
        if noise > NOISE_OF_RANGE * narrow:
            yield (
                f"before any update log s is {noise:.1e} on average, and the clip range begins at {narrow:.1e}: noise "
                f"decides part of what is clipped; gspo audit {run.folder.path} suggests a range, or recompute old "
                "log-probs"
            )


def _accuracy(run: RunRecords) -> Iterator[str]:
    estimates = [(r["step"], r["accuracy"]) for r in run.evaluations if r["accuracy"]["value"] is not None]
    if len(estimates) < 2:
        return
    (first, before), (last, after) = estimates[0], estimates[-1]
    best_step, best = max(estimates, key=lambda pair: pair[1]["value"])
    if after["high"] < before["low"]:
        yield (
            f"held-out accuracy fell from {before['value']:.3f} after step {first} to {after['value']:.3f} after step "
            f"{last}, and the intervals do not overlap: read what the policy writes now, below"
        )
    elif after["high"] < best["low"]:
        yield (
            f"held-out accuracy was {best['value']:.3f} after step {best_step} and is {after['value']:.3f} after step "
            f"{last}, and the intervals do not overlap: checkpoints/best is the better model"
        )


def _signal(run: RunRecords) -> Iterator[str]:
    recent = run.metrics[-WINDOW:]
    dull, reward = joined(recent, "group/without_signal"), joined(recent, "reward/accuracy")
    if dull is not None and dull > NO_SIGNAL:
        hard = reward is not None and reward < 0.5
        what = (
            "most prompts are too hard: mix easier ones in, sample more responses a prompt, or give partial rewards"
            if hard
            else "most prompts are solved: give harder ones, or stop"
        )
        yield f"{dull:.0%} of the groups of the last {WINDOW} steps had no signal (all rewards equal); {what}"
    cut = joined(recent, "response/truncated")
    if cut is not None and cut > TRUNCATED:
        yield (
            f"{cut:.0%} of the responses of the last {WINDOW} steps were cut at rollout.max_tokens: raise it, or say "
            "by reward.truncated what they are worth"
        )


def _clip(run: RunRecords) -> Iterator[str]:
    removed = joined(run.metrics[-WINDOW:], "clip/sequence_removed")
    if removed is not None and removed > CLIPPED:
        yield (
            f"the clip removed the gradient of {removed:.0%} of the sequences of the last {WINDOW} steps: a lower "
            "optimizer.learning_rate, fewer mini-batches or a wider range; docs/clip_range.md says which range fits"
        )


def _entropy(run: RunRecords) -> Iterator[str]:
    """Entropy falls wherever a policy learns a task; it is flagged where the reward does not say that it did."""
    first, last = (joined(part, "policy/entropy") for part in (run.metrics[:1], run.metrics[-WINDOW:]))
    reward = joined(run.metrics[-WINDOW:], "reward/accuracy")
    if first is None or last is None or reward is None or first <= 0:
        return
    if last < ENTROPY_LEFT * first and reward < 0.5:
        yield (
            f"entropy fell from {first:.2g} to {last:.2g} nats a token while only {reward:.0%} of the responses reach "
            "reward.correct_at: the policy no longer tries other answers; start again with a lower learning rate"
        )


def _functions(run: RunRecords) -> list[str]:
    return sorted({name for record in run.metrics for name in record if name.startswith("reward/function/")})


def short_reason(reason: str) -> str:
    """Why a rollout was dropped, in a line of bounded length."""
    line = " ".join(reason.split())
    return line if len(line) <= 160 else line[:157] + "..."
