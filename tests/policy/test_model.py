import pytest
import torch
from tiny import FAMILIES, gradients, plain_scores, random_rollouts, tiny_model, worst

from gspo.policy.model import Policy, ScoringModel
from gspo.policy.probe import probe

TEMPERATURE = 0.7


def policy_of(model, kind, *, exact_head=True) -> Policy:
    return Policy(ScoringModel(model, exact_head), None, (1,), 0, 128, kind)


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(2, *logprobs.shape, generator=generator)
    return (logprobs * first + entropy * second).sum()


def compare_with_plain(model, kind, *, exact_head=True) -> None:
    """Log-probs, entropies and every gradient against one forward per rollout."""
    rollouts = random_rollouts()
    expected = plain_scores(model, rollouts, TEMPERATURE)
    loss_of(*expected).backward()
    reference = gradients(model)
    policy = policy_of(model, kind, exact_head=exact_head)
    with policy.forward(policy.layout(rollouts), temperature=TEMPERATURE) as scores:
        loss_of(scores.logprobs, scores.entropy).backward()
    torch.testing.assert_close(scores.logprobs, expected[0], rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(scores.entropy, expected[1], rtol=1e-5, atol=5e-6)
    assert worst(gradients(model), reference) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_every_family_is_understood(family):
    assert probe(tiny_model(family), "padded").exact_head


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "granite"])
def test_scores_and_gradients_are_those_of_one_rollout_at_a_time(family, kind):
    compare_with_plain(tiny_model(family), kind)


def test_a_head_that_is_not_understood_gives_the_same_through_logits():
    compare_with_plain(tiny_model("gemma2"), "padded", exact_head=False)


def test_score_holds_no_graph_and_equals_forward():
    policy = policy_of(tiny_model("llama"), "packed")
    layout = policy.layout(random_rollouts())
    scores = policy.score(layout, temperature=TEMPERATURE)
    with policy.forward(layout, temperature=TEMPERATURE) as grown:
        assert torch.equal(scores.logprobs, grown.logprobs)
    assert not scores.logprobs.requires_grad
    assert scores.logprobs.dtype == torch.float32


def test_columns_widen_the_result():
    policy = policy_of(tiny_model("llama"), "packed")
    rollouts = random_rollouts()
    wide = policy.score(policy.layout(rollouts, columns=20), temperature=TEMPERATURE)
    narrow = policy.score(policy.layout(rollouts), temperature=TEMPERATURE)
    assert wide.logprobs.shape == (len(rollouts), 20)
    assert torch.equal(wide.logprobs[:, :12], narrow.logprobs)


def test_rollouts_without_a_scored_token_score_zero():
    policy = policy_of(tiny_model("llama"), "packed")
    scores = policy.score(policy.layout(random_rollouts([(3, (0, 0))]), columns=2), temperature=1.0)
    assert not scores.logprobs.any()
    assert not scores.mask.any()
