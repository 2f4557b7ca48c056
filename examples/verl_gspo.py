"""This project's GSPO as a policy loss of verl.

Import this module in verl's workers (`actor_rollout_ref.model.external_lib=examples.verl_gspo`, or any import
before the actor is built) and select it with `actor_rollout_ref.actor.policy_loss.loss_mode=gspo_exact`.

What changes against verl's own `gspo`: a dual clip (`clip_ratio_c`) is honoured, saturated ratios keep their
gradient, and clipping is counted by sequence as well as by token. Written for verl's policy losses that return
(loss, metrics) and find the size of the mini-batch in `config.global_batch_info`.
"""

import torch

from gspo.objectives import Totals, gspo_token_loss

try:
    from verl.trainer.ppo.core_algos import register_policy_loss
except ImportError:
    register_policy_loss = None


def gspo_policy_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="seq-mean-token-mean", config=None,
    rollout_is_weights=None,
):  # fmt: skip
    """(loss, metrics), as verl's policy losses return; all tensors are [B, T]."""
    if loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(f'loss_agg_mode = "{loss_agg_mode}": GSPO averages by response; use "seq-mean-token-mean"')
    weights = torch.ones_like(advantages) if rollout_is_weights is None else rollout_is_weights
    info = config.global_batch_info  # over all micro-batches and ranks; gradients are averaged over `dp_size` ranks
    size = info.get("global_batch_size")
    output = gspo_token_loss(
        log_prob, old_log_prob, advantages * weights, response_mask.bool(),
        clip_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        dual_clip=config.clip_ratio_c,
        totals=None if size is None else Totals(sequences=size, tokens=int(response_mask.sum())),
    )  # fmt: skip
    figures = output.stats.as_floats()
    return output.loss * info.get("dp_size", 1), {
        "actor/pg_clipfrac": figures["token_removed"],
        "actor/pg_clipfrac_lower": figures["token_removed_high_negative"],
        "actor/ppo_kl": -figures["log_ratio_mean"],
        "actor/sequence_clipfrac": figures["sequence_removed"],
        "actor/sequence_outside": figures["sequence_outside"],
    }


if register_policy_loss is not None:
    register_policy_loss("gspo_exact")(gspo_policy_loss)
