"""PRIME: a process reward model that is trained online on the outcomes of the rollouts alone (arXiv 2502.01456).

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from grail_lightning.core.credit.base import CreditContext, Mean, TokenCredit, TokenWeights, toward_outcome
from grail_lightning.core.credit.measure import logprobs
from grail_lightning.core.credit.service import FrozenReference
from grail_lightning.core.functional.advantages import discounted_returns, group_sums, process_advantages, ranked_pairs
from grail_lightning.core.policy.micro_batch import MicroBatch, cut_rows, dummy_micro_batch, scatter
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.collectives import all_reduce, pad_to_longest_rank
from grail_lightning.gallery.second_model import ModelTraining, TrainedModel


class PRIME(TokenCredit):
    r"""Advantages from implicit process rewards: log-ratios of a second model, which learns which rollouts are right.

    .. math:: r_{it} = \beta \log \frac{\pi_\phi(y_t)}{\pi_{ref}(y_t)}, \qquad
              L(\phi) = \mathrm{BCE}\Bigl(\sigma\bigl(\textstyle\sum_t r_{it}\bigr),\ o_i\Bigr)

    .. math:: A_{it} = \mathrm{whiten}\Bigl(o_i - \frac{1}{n-1} \sum_{j \ne i} o_j + c \sum_{s \ge t} \gamma^{s-t}
              \Bigl(\hat r_{is} - \frac{1}{n-1} \sum_{j \ne i} \bar r_j\Bigr)\Bigr)

    ``o`` is 1 for a right response and 0 for a wrong one, ``\bar r_j`` the mean of a row's token rewards, and ``φ``
    begins as the reference, the policy before training. Each batch is one optimiser step of ``φ``, on the mean of ``L``
    over the rows of all ranks. Whitening takes mean and variance over these groups' tokens on all ranks. The result is
    the whole advantage of a token, so rewards other than correctness do not act, and `model.advantage` is refused.
    Groups whose accuracy is outside of `accuracy` neither train ``φ`` nor have a gradient.

    Args:
        beta: β.
        weight: c, the factor of the process returns.
        discount: γ of the process returns.
        double_forward: Whether the rewards are those of ``φ`` after its step on the batch, which takes one more forward
            pass, rather than before.
        normalise: Whether ``\hat r`` is ``r`` divided by the largest absolute return of the batch + 1e-6.
        accuracy: The lowest and the highest accuracy of a group that is used.
        model: The model that ``φ`` begins as, with the tokenizer of the policy; null is the policy before training.
        optimizer: The optimiser of ``φ``. Its gradient is clipped to `execution.max_grad_norm`, too.
        scheduler: The learning-rate schedule of ``φ``, which counts its steps.

    Source: arXiv 2502.01456, and its published code, which leaves out the last token's reward, takes the largest return
    of each rank, and scales deviations within a row by n / (n − 1).
    """

    services = (FrozenReference, TrainedModel)
    replaces_advantage = True
    reads_correct = True

    def __init__(
        self,
        beta: float = 0.05,
        weight: float = 5.0,
        discount: float = 1.0,
        double_forward: bool = False,
        normalise: bool = True,
        accuracy: tuple[float, float] = (0.2, 0.8),
        model: str | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-6, weight_decay=0.0),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        if not 0 <= accuracy[0] <= accuracy[1] <= 1:
            raise ValueError(f"`accuracy` must be two rising numbers in [0, 1], but got {list(accuracy)}.")
        self.beta, self.weight, self.discount = beta, weight, discount
        self.double_forward, self.normalise, self.accuracy = double_forward, normalise, tuple(accuracy)
        check_options(self, beta="(0, inf)", weight="[0, inf)", discount="[0, 1]")
        self.training = ModelTraining(model=model, optimizer=optimizer, scheduler=scheduler)

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Train the reward model. Weights of 0, and the advantage as an additive stage."""
        right, size = group_sums(batch.correct.double(), batch.group)
        # A row that is alone in its group, since no other one has a reward, is compared with none.
        within = (right / size >= self.accuracy[0]) & (right / size <= self.accuracy[1]) & (size > 1)
        mask, used = batch.response_mask, within & batch.response_mask.any(1)
        rewards, metrics = self._rewards(policy, batch, replace(context, temperature=1.0), used)
        scaled = rewards
        if self.normalise:
            largest = all_reduce(discounted_returns(rewards).abs().amax().reshape(1), "max")
            scaled = rewards / (largest + 1e-6)
        advantages = process_advantages(
            scaled, batch.correct, mask, batch.group, weight=self.weight, discount=self.discount
        )
        dtype = torch.promote_types(batch.advantages.dtype, torch.float32)
        whitened = _whiten(advantages, mask & used[:, None]).to(dtype)
        scores = toward_outcome(rewards, batch).to(dtype)
        return TokenWeights.whole(whitened, mask, scores=scores, metrics=metrics)

    def _rewards(
        self, policy: Policy, batch: RolloutBatch, context: CreditContext, used: Tensor
    ) -> tuple[Tensor, dict[str, float | Mean]]:
        """``[B, T]`` float64, the rewards ``r``, zero on other rows; and figures to log. Takes a step of ``φ``."""
        second, reference = context.service(TrainedModel), context.service(FrozenReference)
        rows, model = used.nonzero().flatten(), second.beside(policy)
        with reference.running(policy) as frozen:
            base = logprobs(frozen, batch, context, rows).double()
        number = float(all_reduce(torch.tensor(len(rows), device=base.device), "sum"))
        if not number:
            return torch.zeros_like(base), {"filtered": Mean.share(~used)}
        log_ratios, losses = torch.zeros_like(base), torch.zeros(len(batch), dtype=torch.float64, device=base.device)

        def loss(micro: MicroBatch) -> Tensor:
            piece = batch.select(micro.rows)
            present: Tensor = model(model.layout(piece, micro.starts), temperature=1.0)
            if micro.is_dummy:
                return present.sum() * 0
            places, width = micro.rows.to(base.device), piece.response_mask.shape[1]
            gaps = present - base[places, :width].to(present.dtype)
            scatter(log_ratios, micro.rows, gaps)
            logits = self.beta * gaps.sum(1)
            each = binary_cross_entropy_with_logits(logits, batch.correct[places].to(logits), reduction="none")
            losses[places] = each.detach().double()
            return each.sum() / number

        parts = cut_rows(model, batch, rows, context.token_budget)
        step_figures = second.step(pad_to_longest_rank(parts, dummy_micro_batch(batch), base.device), loss)
        # Before the step: the model has not seen these rollouts.
        right, pairs = ranked_pairs(log_ratios[rows].sum(1), batch.correct[rows], batch.group[rows])
        metrics: dict[str, float | Mean] = {
            "reward_model_loss": Mean(float(losses.sum()), len(rows)),
            "reward_model_accuracy": Mean(right, pairs),
            "filtered": Mean.share(~used),
        }
        metrics |= {f"reward_model_{name}": value for name, value in step_figures.items()}
        if self.double_forward:
            log_ratios = logprobs(model, batch, context, rows).double() - base
        return self.beta * log_ratios, metrics


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]``: values less their mean, over their unbiased std; both are of the masked tokens of all ranks."""
    inside = values.masked_fill(~mask, 0)
    total, number = all_reduce(torch.stack([inside.sum(), mask.sum().double()]), "sum")
    centred = (inside - total / number.clamp(min=1)).masked_fill(~mask, 0)
    variance = all_reduce(centred.square().sum().reshape(1), "sum") / (number - 1).clamp(min=1)
    whitened: Tensor = centred * (variance + 1e-8).rsqrt()
    return whitened
