"""The proof, at the start of a run, that the embedded engine and the training engine agree to the last bit."""

from __future__ import annotations

import torch

from gspo.errors import BadInputError
from gspo.policy.model import Policy
from gspo.rollout.engine import Engine
from gspo.types import Prompt, Request, Sampling

_PROMPTS = (1, 3, 17, 70)
_SAMPLING = Sampling(max_tokens=16, temperature=0.9)


def check_bitwise(engine: Engine, policy: Policy) -> None:
    """Draws a few responses of made-up prompts, of unlike lengths, and scores them together and alone.

    Raises BadInputError where one log-prob differs.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    room = (policy.context_length or max(_PROMPTS) + 2) - 1
    requests = []
    for slot, length in enumerate(_PROMPTS):
        ids = torch.randint(0, vocabulary, (min(length, room),), generator=generator)
        requests.append(Request(Prompt(str(slot), "", tuple(ids.tolist())), samples=2, step=0, slot=slot))
    rollouts = engine.generate(requests, _SAMPLING)
    worst = 0.0
    for part in (rollouts, rollouts[-1:]):
        layout = policy.layout(part)
        scores = policy.score(layout, temperature=_SAMPLING.temperature, entropy=False)
        for row, rollout in enumerate(part):
            sampled = torch.tensor(rollout.sampler_logprobs, device=scores.logprobs.device)
            difference = (scores.logprobs[row, : len(sampled)] - sampled).abs()
            worst = max(worst, float(difference.nan_to_num(torch.inf).max()))
    if worst > 0:
        raise BadInputError(
            f"likelihoods.batch_invariant = true: the engine's log-probs and those of training differ by up to "
            f"{worst:.1g} with {type(policy.model).__name__} on {policy.device}; set it to false"
        )
