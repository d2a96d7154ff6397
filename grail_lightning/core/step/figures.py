"""Figures of one training step, over all ranks, under the names that are usual for GRPO; and what callbacks receive.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.answers.records import STATUSES
from grail_lightning.core.credit.base import Mean, TokenWeights, token_advantages
from grail_lightning.core.functional.advantages import EQUAL_REWARDS
from grail_lightning.core.functional.credit_measures import ess_ratio, fork_wins, forks, top_mass
from grail_lightning.core.policy.layout import group_nodes
from grail_lightning.core.records.episode import EndReason
from grail_lightning.core.records.task import Prompt, StepKind, problem_id
from grail_lightning.core.rollout.batch import GradedBatch, RolloutBatch, Sampling
from grail_lightning.core.rollout.grading import step_masks
from grail_lightning.core.runtime.collectives import all_gather_objects, sum_by_name
from grail_lightning.core.runtime.seeds import sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_Kind = Literal["mean", "std", "min", "max"]


class _Part(NamedTuple):
    kind: _Kind
    size: float
    total: float
    squares: float = 0.0  # The sum of squared deviations from this rank's mean.
    extreme: float = 0.0


class Tally:
    """Statistics over the values of all ranks, in one collective.

    Ranks may differ in their number of values and in their names. NaN does not count as a value. A figure without
    values is left out, since NaN would break plots.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def add(self, name: str, values: Tensor, kind: _Kind = "mean") -> None:
        """Add this rank's values, of any shape; NaN is left out."""
        flat = values.detach().double().flatten()
        flat = flat[~flat.isnan()]
        if len(flat):
            extreme = flat.min() if kind == "min" else flat.max()
            parts = torch.stack([flat.sum(), (flat - flat.mean()).square().sum(), extreme])  # One transfer.
            self._parts[name] = _Part(kind, float(len(flat)), *parts.tolist())

    def add_mean(self, name: str, mean: Mean) -> None:
        """Add a mean, given as sum and count."""
        if mean.size:
            self._parts[name] = _Part("mean", mean.size, mean.total)

    def compute(self) -> dict[str, float]:
        """The figures by name, the same on all ranks. A collective."""
        of_ranks: dict[str, list[_Part]] = {}
        for rank in all_gather_objects(self._parts):
            for name, part in rank.items():
                of_ranks.setdefault(name, []).append(part)
        figures = {name: _combine(parts) for name, parts in of_ranks.items()}
        return {name: value for name, value in figures.items() if not math.isnan(value)}


def _combine(parts: list[_Part]) -> float:
    kind, size = parts[0].kind, sum(p.size for p in parts)
    mean = sum(p.total for p in parts) / size
    if kind == "mean":
        return mean
    if kind == "std":
        squares = sum(p.squares + p.size * (p.total / p.size - mean) ** 2 for p in parts)
        return math.sqrt(squares / (size - 1)) if size > 1 else math.nan
    return (min if kind == "min" else max)(p.extreme for p in parts)


class LossSums(NamedTuple):
    """What the micro-batches of an optimiser step have summed on this rank."""

    sums: Mapping[str, Tensor]  # Scalars by name, the number of tokens (``loss_tokens``) and the ``loss`` among them.
    tokens_run: int  # The tokens that the forward passes have run.
    tokens_without_sharing: int  # Those that they would have run without shared beginnings.

    def figures(self) -> dict[str, float]:
        """Means over the tokens of live rows, on all ranks; the ``loss`` is summed. The host waits for the device.

        Rows that are not run, such as those whose advantage is 0, have no part in them.
        """
        values = torch.stack([v.double() for v in self.sums.values()]).tolist() if self.sums else []
        local = dict(zip(self.sums, values, strict=True))
        total = sum_by_name(local | {"run": float(self.tokens_run), "all": float(self.tokens_without_sharing)})
        tokens, loss = max(total.pop("loss_tokens", 0.0), 1.0), total.pop("loss", 0.0)
        run, without_sharing = total.pop("run"), total.pop("all")
        if not without_sharing:
            return {"loss": 0.0}
        means = {name: value / tokens for name, value in total.items()}
        return {"loss": loss, "shared_tokens": 1 - run / without_sharing} | means


def batch_figures(
    whole: RolloutBatch, batch: RolloutBatch, weights: TokenWeights, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """The figures of a batch: of its rollouts and, under ``credit/``, of their token weights. A collective.

    `batch` has the rows of the whole batch that have a reward, whose token weights are given. Everything is computed on
    the CPU: on CUDA each of the many small figures would cost several kernels and two waits.
    """
    everyone, weights = whole.to("cpu"), weights.to("cpu")
    batch = everyone if batch is whole else batch.to("cpu")
    tally = Tally()
    add_rollouts(tally, everyone)
    if batch.scored.all():  # Else this rank has none.
        add_credit(tally, batch, weights)
        if weights.scores is not None and (masks := step_masks(batch, tokenizer, batch.wrong)) is not None:
            _add_credit_at_steps(tally, batch, weights, masks)
    return tally.compute()


def add_rollouts(tally: Tally, batch: GradedBatch) -> None:
    """Add rewards, verdicts, lengths, and dead groups by total reward and by correctness alone.

    Means of rewards are those of the rollouts that have one, and accuracy is of those that are right or wrong.
    `entropy_sampled` is −mean log π of the sampled tokens of *all* rollouts.
    """
    lengths = batch.response_lengths
    tally.add("reward", batch.rewards)
    tally.add("reward_std", batch.rewards, "std")
    tally.add("rewards/unscored", ~batch.scored)
    tally.add("accuracy", batch.correct[batch.judged])
    tally.add("frac_reward_zero_std", _in_dead_group(batch, batch.rewards, batch.scored))
    tally.add("frac_correct_zero_std", _in_dead_group(batch, batch.correct.float(), batch.scored & batch.judged))
    for kind in ("mean", "min", "max"):
        tally.add(f"completions/{kind}_length", lengths, kind)
    tally.add("completions/clipped_ratio", ~batch.finished)
    tally.add("completions/mean_terminated_length", lengths[batch.finished])
    if batch.sampling_logprobs is not None:
        reported = batch.sampling_logprobs[batch.response_mask]
        tally.add("entropy_sampled", -reported)
        tally.add("sampling/missing_logprobs", reported.isnan())
    add_episodes(tally, batch)
    for name, part in batch.reward_values.items():
        tally.add(f"rewards/{name}/mean", part)
    for name, part in batch.reward_shares.items():
        tally.add(f"rewards/{name}", part)
    statuses = Counter(verdict.status for verdict in batch.verdicts)
    # Every rank adds every status, so that rows without that status count as 0, and a curve does not end when a status
    # does not occur.
    for status in STATUSES:
        tally.add_mean(f"verdict/{status}", Mean(float(statuses[status]), len(batch)))


def add_episodes(tally: Tally, batch: GradedBatch) -> None:
    """Add turns and calls a rollout, their scores, the shares of wrong calls and of the ends, and collapse figures.

    They are of rollouts in an environment: others of the same batch, which can call no tool, are not counted. Plain
    GRPO is known to collapse where it learns to search: calls vanish, and the log-probability of right rollouts falls.
    ``episodes/no_call`` and ``episodes/logprob_right`` show it.
    """
    if batch.episodes is None:
        return
    played = torch.tensor(batch.in_environment, dtype=torch.bool, device=batch.response_mask.device)
    episodes = [episode for episode, is_played in zip(batch.episodes, played.tolist(), strict=True) if is_played]
    calls = [episode.calls for episode in episodes]
    statuses = Counter(call.status for episode_calls in calls for call in episode_calls)
    number = len(episodes)
    scores = [turn.score for episode in episodes for turn in episode.turns if turn.score is not None]
    tally.add("episodes/turn_score", torch.tensor(scores, dtype=torch.float64))
    tally.add("episodes/turns", torch.tensor([len(episode.turns) for episode in episodes]))
    tally.add("episodes/calls", torch.tensor([len(episode_calls) for episode_calls in calls]))
    tasks = [prompt.task for prompt, is_played in zip(batch.prompts, played.tolist(), strict=True) if is_played]
    of_tools = [episode_calls for episode_calls, task in zip(calls, tasks, strict=True) if task.has_tools]
    tally.add_mean("episodes/no_call", Mean(float(sum(not episode_calls for episode_calls in of_tools)), len(of_tools)))
    for status in ("invalid", "failed", "timeout"):
        tally.add_mean(f"episodes/{status}_calls", Mean(float(statuses[status]), sum(statuses.values())))
    ends = Counter(episode.end for episode in episodes)
    for end in get_args(EndReason):
        tally.add_mean(f"episodes/end_{end}", Mean(float(ends[end]), number))
    tally.add("episodes/result_tokens", (batch.valid_lengths - batch.response_lengths)[played])
    if batch.sampling_logprobs is not None:
        right = batch.response_mask & (batch.correct & played)[:, None]
        tally.add("episodes/logprob_right", batch.sampling_logprobs[right])


def add_credit(tally: Tally, batch: RolloutBatch, weights: TokenWeights) -> None:
    """Add the distribution of the weights and the concentration of the credit, of uniform credit, too."""
    mask = batch.response_mask
    credit = token_advantages(batch.advantages, weights)
    tally.add("credit/weight_mean", weights.values[mask])
    tally.add("credit/weight_std", weights.values[mask], "std")
    tally.add("credit/span_missing", weights.fallback)
    tally.add("credit/ess_ratio", ess_ratio(credit, mask))
    tally.add("credit/top10_mass", top_mass(credit, mask))
    for name, value in weights.metrics.items():
        tally.add_mean(f"credit/{name}", _as_mean(value, len(batch)))


def _add_credit_at_steps(
    tally: Tally, batch: RolloutBatch, weights: TokenWeights, masks: dict[StepKind, Tensor]
) -> None:
    """Add how often the flawed one of two tokens gets more credit, where two wrong rollouts of a group part at them.

    Position and context of both tokens are the same, unlike those of two tokens of one rollout, whose first error
    always follows the sound steps. A token's credit is its advantage over that of its rollout, additive stage included.

    `masks` are those of the tokens of each kind of step (`grail_lightning.core.rollout.grading.step_masks`).
    """
    # A method that needs an advantage has weighed none of the wrong rows if they have none.
    assert weights.scores is not None, "a method without scores ranks no tokens"
    rows = batch.wrong & ((weights.scores != 0).any(1) | (batch.advantages != 0))
    wrong, nodes, effective = rows.cpu()[:, None], group_nodes(batch), effective_weights(batch, weights).cpu()
    for kind in ("slip", "misconception"):
        pairs = forks(nodes, batch.group.cpu(), wrong & masks[kind].cpu(), wrong & masks["sound"].cpu())
        tally.add(f"credit/fork_auroc_{kind}", fork_wins(effective, *pairs))


def effective_weights(batch: RolloutBatch, weights: TokenWeights) -> Tensor:
    """``A_it / A_i``, ``[B, T]``: the weight that an additive stage amounts to; ``w_it`` where ``A_i`` is 0.

    In a wrong rollout whose group is trained on, an ``A_i`` of 0 (`advantage.share: 0`) counts as −1.
    """
    if weights.additive is None:
        return weights.values
    advantages = batch.advantages.masked_fill(batch.wrong & (batch.advantages == 0), -1)
    shares = token_advantages(advantages, weights) / advantages[:, None]
    return torch.where(advantages[:, None] == 0, weights.values, shares)


def _as_mean(value: float | Mean, rows: int) -> Mean:
    """A plain number as a mean over this rank's rows; NaN as a mean over none."""
    if isinstance(value, Mean):
        return value
    return Mean(0.0, 0) if math.isnan(value) else Mean(value * rows, rows)


def _in_dead_group(batch: GradedBatch, values: Tensor, counted: Tensor) -> Tensor:
    """``[B]`` bool: rows in whose group all rows that are ``counted [B]`` have the same entry of ``values [B]``."""
    _, place = torch.unique(batch.group, return_inverse=True)
    low, high = (
        values.scatter_reduce(0, place, values.masked_fill(~counted, none), how, include_self=False)
        for how, none in (("amin", torch.inf), ("amax", -torch.inf))
    )
    return (high - low <= EQUAL_REWARDS)[place]  # There are at most as many groups as rows.


_REMEDIES = {
    "end_turns": "ended by the limit `turns`. Raise `task.limits.max_turns`",
    "end_tokens": "ended by the limit `tokens`. Raise `sampling.max_response_length`",
    "end_context": "ended by the limit `context`. Raise `task.limits.max_tokens`, or lower `result_characters`",
    "end_failures": "ended by the limit `failures`. Look at the calls' results in the samples",
    "no_call": "call no tool, so that little can be learned about calls. Show the policy how calls are written (worked "
    "examples, `task.tool_instruction`), or warm it up",
}


def warn_of_limits(figures: dict[str, float], warned: set[str]) -> None:
    """Warn once of each limit that ends more than a tenth of the rollouts; `warned` are the ones that were named."""
    for name, text in _REMEDIES.items():
        share = figures.get(f"episodes/{name}", 0.0)
        if share > (0.9 if name == "no_call" else 0.1) and name not in warned:
            warned.add(name)
            rank_zero_warn(f"{share:.0%} of the rollouts {text} (`episodes/{name}`).")


# --- what callbacks and loggers receive -------------------------------------------------------------------------------

# TensorBoard shows a group for whatever stands before the first slash of a tag: ``train`` (rollouts and their rewards),
# ``policy`` (the optimiser steps), ``credit`` (token weights), ``speed`` (seconds, tokens, memory), and ``val`` and
# ``test`` (held-out problems).
GROUPS = ("train", "policy", "credit", "speed", "val", "test")
# The group of a figure, by what stands before the first slash of its name, as users of TRL know it.
GROUP_OF = {
    name: group
    for group, names in {
        "train": "reward reward_std rewards accuracy verdict completions episodes refill frac_reward_zero_std "
        "frac_correct_zero_std",
        "policy": "loss grad_norm learning_rate kl distillation_kl clip_ratio sampling entropy entropy_sampled",
        "speed": "time step_time tokens_per_second num_tokens shared_tokens peak_memory_gb",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The options with which validation and test sample; the `Evaluation` callback sets them.

    Attributes:
        num_samples: The number of responses to each problem.
        sampling: Their sampling options.
        done: The batches whose samples an interrupted evaluation has kept, by the numbers of loader and batch. They are
            not sampled again: their step returns None.
    """

    num_samples: int
    sampling: Sampling
    done: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)

    def seeds(self, prompts: Sequence[Prompt]) -> list[int]:
        """The seed of each response of a test, which depends on the problem and on the number of the sample alone."""
        return [sample_seed(problem_id(prompt), number) for prompt in prompts for number in range(self.num_samples)]


class StepOutput:
    """What a training or evaluation step returns to callbacks: graded rollouts, their token weights, and figures.

    This is no dataclass, because Lightning traverses dataclasses and refuses the frozen ones inside.
    """

    def __init__(
        self, batch: GradedBatch, weights: TokenWeights | None = None, metrics: dict[str, float] | None = None
    ) -> None:
        self.batch, self.weights, self.metrics = batch, weights, metrics or {}

    @property
    def advantages(self) -> Tensor | None:
        """``[B]``; None for a batch that is only evaluated."""
        return self.batch.advantages if isinstance(self.batch, RolloutBatch) else None


def tag(figure: str) -> str:
    """The tag of a figure: its group and its name; a name that begins with a group is a tag already.

    A figure without a group, of a user's own module, belongs to ``train``.

    >>> tag("reward"), tag("clip_ratio/low_mean"), tag("credit/top10_mass")
    ('train/reward', 'policy/clip_ratio/low_mean', 'credit/top10_mass')
    """
    first, slash, _ = figure.partition("/")
    if slash and first in GROUPS:
        return figure
    return f"{GROUP_OF.get(first, 'train')}/{figure}"
