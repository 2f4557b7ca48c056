"""TRL's GRPOTrainer with this project's GSPO loss.

    pip install gspo trl==1.16.0
    python examples/trl_gspo.py Qwen/Qwen3-0.6B

What changes against TRL's own `importance_sampling_level="sequence"`: every response weighs the same whatever
`loss_type` says, saturated ratios keep their gradient, and clipping is counted by sequence and by token.
"""

import argparse

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from gspo.objectives import Totals, gspo_token_loss, kl_k3, sequence_mean


class GSPOTrainer(GRPOTrainer):
    """`epsilon`, `epsilon_high`, `delta` and `beta` of the config are clip_low, clip_high, dual clip and KL weight."""

    def _compute_loss(self, model, inputs):
        prompt_mask, response_mask = inputs["prompt_mask"], inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([prompt_mask, response_mask], dim=1)
        logprobs, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, response_mask.shape[1])
        mask = (response_mask * inputs.get("tool_mask", 1)).bool()
        old = inputs.get("old_per_token_logps", logprobs.detach())
        weights = inputs.get("importance_sampling_ratio", torch.ones_like(logprobs))
        advantages = (inputs["advantages"][:, None] * weights).expand_as(logprobs)
        micro_batches = self.current_gradient_accumulation_steps if model.training else 1
        totals = Totals(sequences=micro_batches * len(mask), tokens=int(mask.sum()))
        output = gspo_token_loss(
            logprobs, old, advantages, mask, clip_low=self.epsilon_low, clip_high=self.epsilon_high,
            dual_clip=self.args.delta, totals=totals,
        )  # fmt: skip
        for name, value in output.stats.as_floats().items():
            self._metrics["train" if model.training else "eval"][f"gspo/{name}"].append(value)
        if self.beta == 0.0:
            return output.loss
        kl = kl_k3(logprobs, inputs["ref_per_token_logps"], mask)
        return output.loss + self.beta * sequence_mean(kl, mask, totals)


def last_number_is_right(completions, answer, **_):
    """1 where the last word of the response is the answer."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text.split()[-1:] == [a]) for text, a in zip(texts, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="runs/trl_gspo")
    arguments = parser.parse_args()
    sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    rows = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a, b in sums]
    config = GRPOConfig(
        output_dir=arguments.output, max_steps=arguments.steps, loss_type="grpo", beta=0.0,
        epsilon=3e-4, epsilon_high=4e-4, per_device_train_batch_size=8, num_generations=8,
        gradient_accumulation_steps=1, steps_per_generation=4, max_completion_length=16, logging_steps=1,
    )  # fmt: skip
    GSPOTrainer(arguments.model, last_number_is_right, args=config, train_dataset=Dataset.from_list(rows)).train()


if __name__ == "__main__":
    main()
