"""A rollout engine that samples token by token without a cache: slow, and short enough to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grail_lightning import Policy, Prompt, RolloutEngine, SampledBatch, Sampling, build_batch


class PlainEngine(RolloutEngine):
    """Samples from the policy that is being trained, one group at a time.

    Args:
        longest: Most tokens of a response, if that is less than `sampling.max_response_length`.
    """

    reports_logprobs = True  # The default: `generate` returns the log-probability of each sampled token.

    def __init__(self, longest: int | None = None) -> None:
        self.longest = longest
        self._policy: Policy | None = None

    def update_weights(self, policy: Policy) -> None:
        """Keep the policy. An engine with weights of its own would copy them here."""
        self._policy = policy

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        """`group_size` responses to each prompt; a function of the weights and the arguments.

        Raises:
            ValueError: For top-p, top-k and stop strings, which this engine does not know.
        """
        if sampling.top_p < 1 or sampling.top_k or sampling.stop:
            raise ValueError("`PlainEngine` knows no `top_p`, `top_k` and `stop`. Leave them out, or use HFEngine.")
        assert self._policy is not None, "the module calls `update_weights` first"
        policy = self._policy
        generator = torch.Generator(policy.device).manual_seed(seed)  # The global random state stays as it is.
        responses: list[list[int]] = []
        logprobs: list[list[float]] = []
        finished: list[bool] = []
        with policy.evaluating(), torch.no_grad():
            for prompt in prompts:
                ids, found = self._group(policy, policy.encode(prompt.messages), group_size, sampling, generator)
                for row, numbers in zip(ids.tolist(), found.tolist(), strict=True):
                    ends = [place for place, token in enumerate(row) if token in policy.end_token_ids]
                    length = ends[0] + 1 if ends else len(row)
                    responses.append(row[:length])  # The end token is a part of the response.
                    logprobs.append(numbers[:length])
                    finished.append(bool(ends))
        return build_batch(policy, prompts, group_size, responses, finished, logprobs)

    def _group(
        self, policy: Policy, prompt: list[int], group_size: int, sampling: Sampling, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probabilities ``[group_size, T]`` of one group, whose rows may go on behind their end."""
        rows = torch.tensor([prompt] * group_size, device=policy.device)
        ends = torch.tensor(sorted(policy.end_token_ids), device=policy.device)
        done = torch.zeros(group_size, dtype=torch.bool, device=policy.device)
        numbers = []
        for _ in range(min(sampling.max_response_length, self.longest or sampling.max_response_length)):
            logits = policy.model(input_ids=rows).logits[:, -1].float()
            chances = (logits / sampling.logprob_temperature).log_softmax(-1)
            drawn = torch.multinomial(chances.exp(), 1, generator=generator)
            token = drawn if sampling.temperature > 0 else logits.argmax(-1, keepdim=True)
            rows = torch.cat([rows, token], 1)
            numbers.append(chances.gather(1, token))
            done |= torch.isin(token.squeeze(1), ends)
            if done.all():
                break
        return rows[:, len(prompt) :], torch.cat(numbers, 1)
