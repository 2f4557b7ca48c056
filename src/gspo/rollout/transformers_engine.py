"""The embedded engine: `transformers` in this process, on the policy's own weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gspo.errors import BadInputError
from gspo.policy.batch_invariance import batch_invariant
from gspo.policy.head import logprobs_from_logits
from gspo.rollout.attention import grouped
from gspo.rollout.decoder_choice import MakeDecoder, choose_decoder
from gspo.rollout.decoding import float32_head
from gspo.rollout.output_head import sliced
from gspo.rollout.route_recording import RouteRecorder, recording
from gspo.rollout.row_queue import Queue, Row
from gspo.rollout.sampling import Drawn, draw, fetch, uniforms
from gspo.rollout.support_recording import SupportRecorder
from gspo.rollout.text import Ending
from gspo.types import KeptSupport, Prompt, Request, Rollout, Sampling, VersionSpan


class TransformersEngine:
    """Samples from the policy's own weights object: no copy, and nothing to do when they change.

    Each prompt is computed once for its samples. Rows that finish leave the batch at once and waiting ones take
    their place, up to `max_concurrent`: no padding is generated. Keys and values live as long as a call, so that
    none outlives the weights it came from. `autocast_dtype` runs the forward passes in that type. `record_routes`
    fills `Rollout.routes` with the experts that a Mixture-of-Experts model used; samples of a prompt share its.
    Where the sampling asks for it, `Rollout.support` holds the tokens that top-p, top-k and min-p kept.

    Text leaves out special tokens; stop strings are looked for in the text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent: int,
        autocast_dtype: torch.dtype | None = None,
        record_routes: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_concurrent = max_concurrent
        self.autocast_dtype = autocast_dtype
        self.record_routes = record_routes
        self.batch_invariant = batch_invariant
        self.version = 0
        self._make_decoder: MakeDecoder | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`. Greedy responses carry the model's own log-probs, at temperature 1.

        A response ends where the prompt and it fill the model's context, with finish reason `length`; a prompt
        that leaves no room, or an empty one, comes back as `error`.

        Raises BadInputError for an empty stop string or `max_tokens` below 1.
        """
        _check(sampling)
        jobs, rollouts = [], []
        for request in requests:
            problem = self._problem(request.prompt)
            rows = list(self._rows(request, sampling))
            if problem is None:
                jobs.append(rows)
            for row in rows if problem else ():
                row.finish, row.dropped = "error", problem
                rollouts.append(self._rollout(row, None))
        with (
            _scoring(self.model),
            self._computing(),
            self._autocast(),
            recording(self.model, self.record_routes and any(jobs)) as recorder,
        ):
            # A support may still be on its way from the device when its row finishes, but not when all have.
            finished = list(self._finished(jobs, sampling, recorder))
            rollouts += [self._rollout(row, recorder) for row in finished]
        return sorted(rollouts, key=lambda rollout: (rollout.slot, rollout.sample))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        """The weights are the policy's own and have changed already: only the version is noted."""
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    def _problem(self, prompt: Prompt) -> str | None:
        if not prompt.ids:
            return "empty prompt: there is no token to continue"
        if (context := self._context()) is not None and len(prompt.ids) >= context:
            return f"prompt of {len(prompt.ids)} tokens leaves no room in a context of {context}"
        return None

    def _context(self) -> int | None:
        config = self.model.config.get_text_config(decoder=True)
        context: int | None = getattr(config, "max_position_embeddings", None)
        return context

    def _rows(self, request: Request, sampling: Sampling) -> Iterator[Row]:
        room = (self._context() or math.inf) - len(request.prompt.ids)
        count = max(0, int(min(sampling.max_tokens, room)))
        for sample in range(request.first_sample, request.first_sample + request.samples):
            noise = uniforms(sampling.seed, request.step, request.slot, sample, count, turn=request.turn)
            yield Row(request.prompt, request.slot, sample, noise)

    def _finished(self, jobs: list[list[Row]], sampling: Sampling, recorder: RouteRecorder | None) -> Iterator[Row]:
        """Runs all rows; yields each as it finishes.

        Long prompts go first: neighbours in the queue are then of like length, and later rows fit into the
        columns of earlier ones.
        """
        if self._make_decoder is None:
            self._make_decoder = choose_decoder(self.model)
        places = min(self.max_concurrent, sum(map(len, jobs)))
        queue = Queue(self._make_decoder(places, sampling.max_tokens), jobs, places, recorder)
        ending = Ending(self.tokenizer, sampling)
        supports = SupportRecorder() if sampling.record_support and sampling.truncated else None
        rows: list[Row] = []
        logits: Tensor | None = None
        while rows or queue:
            new, fresh = queue.admit(len(rows))
            rows += new
            logits = _joined(logits, fresh)
            drawn = self._draw(logits, rows, sampling)
            found = fetch(drawn, supports is not None)
            for row, (token, logprob, _) in zip(rows, found, strict=True):
                row.extend(token, logprob, ending)
            if supports is not None and drawn.kept is not None:
                supports.add([row.support for row in rows], drawn.kept, [count for *_, count in found])
            tokens = drawn.tokens
            yield from (row for row in rows if row.finish)
            kept = _compact([row.finish is None for row in rows])
            if kept != list(range(len(rows))):
                queue.decoder.keep(kept)
                tokens = tokens[torch.tensor(kept, dtype=torch.long, device=tokens.device)]
                rows = [rows[i] for i in kept]
            logits = queue.decoder.step(tokens) if rows else None
            if recorder is not None and rows:
                for row, routes in zip(rows, recorder.steps(len(rows)), strict=True):
                    row.routes.append(routes)
        if supports is not None:
            supports.close()

    def _draw(self, logits: Tensor, rows: list[Row], sampling: Sampling) -> Drawn:
        noise = torch.tensor([row.noise[len(row.ids)] for row in rows], dtype=torch.float64)
        drawn = draw(logits, noise.to(logits.device, non_blocking=True), sampling)
        if not self.batch_invariant or sampling.truncated:
            return drawn
        scored, _ = logprobs_from_logits(logits, drawn.tokens, temperature=sampling.temperature or 1.0)
        return drawn._replace(logprobs=scored)

    def _rollout(self, row: Row, recorder: RouteRecorder | None) -> Rollout:
        failed = row.finish == "error"
        ids = () if failed else tuple(row.ids)
        assert row.finish is not None
        return Rollout(
            prompt=row.prompt,
            slot=row.slot,
            sample=row.sample,
            response_ids=ids,
            sampler_logprobs=() if failed else tuple(row.logprobs),
            trainable=(True,) * len(ids),
            finish_reason=row.finish,
            policy_version=(VersionSpan(0, self.version),),
            text=row.text,
            dropped=row.dropped,
            routes=None if failed or recorder is None else recorder.routes(row.routes),
            support=None if failed or not row.support else KeptSupport.of(row.support),
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        if self.batch_invariant:
            with batch_invariant(self.model):
                yield
        else:
            with grouped(self.model), sliced(self.model):
                yield

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """One context for the whole call, so that weights are cast once and not once a step; logits in float32."""
        if self.autocast_dtype is None:
            yield
            return
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, self.autocast_dtype), float32_head(self.model, device):
            yield
        torch.clear_autocast_cache()


def _joined(logits: Tensor | None, fresh: Sequence[Tensor]) -> Tensor:
    """The logits of the rows in flight and of those that enter; a copy only where there are both."""
    parts = [part for part in (logits, *fresh) if part is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _compact(alive: Sequence[bool]) -> list[int]:
    """Which row each place takes so that the living fill the front: the last ones move into the gaps."""
    count = sum(alive)
    movers = iter([i for i in range(len(alive) - 1, count - 1, -1) if alive[i]])
    return [i if alive[i] else next(movers) for i in range(count)]


@contextmanager
def _scoring(model: nn.Module) -> Iterator[None]:
    """Dropout off, no gradients, every module's training flag as found afterwards.

    Not inference mode: what a module caches of its own (a rotary embedding's frequencies) would then be an
    inference tensor, which the next training step could not use.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _check(sampling: Sampling) -> None:
    if "" in sampling.stop:
        raise BadInputError('sampling.stop: found the empty string "", which every text contains; remove it')
    if sampling.max_tokens < 1:
        raise BadInputError(f"sampling.max_tokens: found {sampling.max_tokens}; at least 1 is needed")
