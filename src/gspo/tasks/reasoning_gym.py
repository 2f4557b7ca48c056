"""Reasoning Gym: questions, and the verifiers that come with them. Nobody else imports `reasoning_gym`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspo.config import ReasoningGymTask
from gspo.errors import BadInputError
from gspo.imports import describe
from gspo.rewards.text import completion_text
from gspo.tasks.sources import Source

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def generate(config: ReasoningGymTask, seed: int) -> Iterator[Source]:
    """`size` rows with columns `prompt`, `question`, `answer`, `metadata`, made from `seed`.

    Raises BadInputError for an unknown dataset or parameters that it refuses.
    """
    if "size" in config.parameters:
        raise BadInputError("task.parameters.size: found beside task.size; set task.size alone")
    dataset = create(config.name, {"seed": seed, **config.parameters, "size": config.size})
    for index in range(config.size):
        where = f"{config.name} question {index}"
        try:
            item = dataset[index]
        except Exception as error:  # noqa: BLE001 (generators raise many kinds of errors on settings that cannot work)
            raise BadInputError(f"{where}: cannot be generated ({describe(error)}); change task.parameters") from None
        columns = {name: item[name] for name in ("question", "answer", "metadata")}
        yield Source(where, {"prompt": item["question"], **columns})


def create(name: str, parameters: Mapping[str, Any]) -> Any:
    """The Reasoning Gym dataset `name`. Raises BadInputError if there is none or it refuses the parameters."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise BadInputError(
            'task.kind = "reasoning_gym" needs the extra `reasoning-gym`: pip install "gspo[reasoning-gym]"'
        ) from None
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {len(DATASETS)}, for instance chain_sum"
        raise BadInputError(f"task.name = {name!r}: Reasoning Gym has no such dataset; {hint}")
    try:
        return create_dataset(name, **parameters)
    except (TypeError, ValueError, AssertionError) as error:
        raise BadInputError(f"task.parameters: refused by Reasoning Gym's {name} ({describe(error)})") from None


def answer_in(text: str) -> str:
    """What a response gives as its answer: the last `<answer>` element if there is one, else the whole text."""
    tagged = _ANSWER.findall(text)
    return (tagged[-1] if tagged else text).strip()


_scorers: dict[tuple[str, str], Any] = {}


def reward(
    completions: Sequence[Any],
    question: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Any],
    *,
    dataset: str,
    dataset_parameters: Mapping[str, Any],
) -> list[float | None]:
    """The dataset's own `score_answer`, 0 to 1, for the answer that each response gives (see `answer_in`)."""
    key = (dataset, repr(dataset_parameters))
    if key not in _scorers:
        _scorers[key] = create(dataset, dataset_parameters)
    return [
        float(_scorers[key].score_answer(answer_in(completion_text(completion)), entry))
        for completion, entry in zip(completions, _entries(question, answer, metadata), strict=True)
    ]


def _entries(question: Sequence[str], answer: Sequence[str], metadata: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for values in zip(question, answer, metadata, strict=True):
        yield dict(zip(("question", "answer", "metadata"), values, strict=True))
