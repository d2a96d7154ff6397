r"""Objectives: which algorithm is run (`model.objective`). Each class is one, with its published values as defaults.

All of them compute one loss, of which they are parameters; no step asks which class an objective is. The loss of token
``t`` of rollout ``i``, with the advantage ``A_{it}`` (token credit included), is the clipped surrogate

.. math:: \ell_{it} = -\min(\rho_{it} A_{it},\ \mathrm{clip}(\rho_{it}, 1-\epsilon_{low}, 1+\epsilon_{high}) A_{it})

and an algorithm says how ``A_i`` is estimated, what ``ρ`` is, where it is clipped, and how the ``ℓ_{it}`` are summed:

===========  ======================  ====================================  ============  =========  ===================
class        advantage               aggregation                           clip          truncated  further
===========  ======================  ====================================  ============  =========  ===================
`GRPO`       mean, over group's std  grpo (own length, then rollouts)      0.2, 0.2      kept
`DrGRPO`     mean                    dr_grpo (rollouts × length limit)     0.2, 0.2      kept
`DAPO`       mean, over group's std  dapo (tokens of the optimiser step)   0.2, 0.28     left out
`CISPO`      mean, over group's std  dapo                                  off, 4.0      kept       surrogate cispo
`GSPOToken`  mean, over group's std  grpo                                  3e-4, 4e-4    kept       level sequence
===========  ======================  ====================================  ============  =========  ===================

Shapes: ``B`` rows (rollouts), ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens, ``M`` predictions
of a layout, ``D`` width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from grail_lightning.core.advantages import AdvantageEstimator, GroupMean
from grail_lightning.core.credit.base import CreditContext
from grail_lightning.core.credit.service import FrozenReference, Service
from grail_lightning.core.functional.policy_gradient import (
    Aggregation,
    KLEstimator,
    Level,
    Surrogate,
    check_clip,
    clipped_surrogate,
)
from grail_lightning.core.policy.layout import TokenLayout
from grail_lightning.core.policy.micro_batch import MicroBatch
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.checks import check_options


class Companion(ABC):
    """Another distribution over the next token, to which an objective keeps the policy close.

    Attributes:
        figure: The name under which the mean divergence of the tokens in the loss is logged, such as `policy/my_kl`.
    """

    figure: str

    @abstractmethod
    def states(self, micro: MicroBatch, layout: TokenLayout) -> Tensor:
        """``[M, D]``: what the head turns into the distribution at each prediction of the policy's layout.

        It is called before each pass with gradient, on every rank equally often.
        """

    @abstractmethod
    def losses(self, divergence: Tensor, advantages: Tensor) -> Tensor:
        """``[b, t]``: what is added to the token losses.

        Args:
            divergence: ``[b, t]``, the KL of the policy's distribution to the other one, with gradient, in nats.
            advantages: ``[b]``, of the rows.
        """


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """The base class of objectives; a class of your own is named by its import path.

    Attributes:
        clip_low: Lower clip range of the ratio; 1 is off.
        clip_high: Upper clip range of the ratio; .inf is off.
        ratio_cap: Upper bound on the unclipped ratio (two-sided or dual clip); null is off.
        level: Whether the ratio is that of each token, or of the sequence (GSPO-token).
        surrogate: clip removes clipped tokens from the gradient; cispo keeps them, with the clipped ratio as a weight.
        aggregation: Aggregation of token losses: grpo, dr_grpo or dapo.
        mask_truncated: Whether rollouts that hit the length limit are left out of the loss.
        entropy_coefficient: Coefficient of an entropy bonus in nats a token. Every row is then run.
        kl_coefficient: Coefficient of the KL to the frozen reference; 0 loads no reference.
        kl_estimator: Estimator of the KL: k1, k2 or k3.
        kl_corrected: Whether the estimate is multiplied by the importance ratio, which makes its gradient correct; k1
            alone has no gradient in expectation.

    Raises:
        ValueError: If a number is out of its range, or a choice is none of those above.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = None
    level: Level = "token"
    surrogate: Surrogate = "clip"
    aggregation: Aggregation = "dr_grpo"
    mask_truncated: bool = False
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_corrected: bool = True

    def __post_init__(self) -> None:
        check_options(self, "objective", kl_coefficient="[0, inf)", entropy_coefficient="[0, inf)")
        check_options(self, "objective", aggregation=Aggregation, kl_estimator=KLEstimator)
        check_options(self, "objective", level=Level, surrogate=Surrogate)
        check_clip(self.clip_low, self.clip_high, self.ratio_cap, self.surrogate)

    @abstractmethod
    def advantage(self) -> AdvantageEstimator:
        """The algorithm's own estimator of the advantage, which `model.advantage` replaces."""

    def companion(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Companion | None:
        """Another distribution to stay close to, for the rows of a batch; None without one.

        It is called once a batch, on every rank. `context.service` returns the services that the objective lists.
        """
        return None

    @property
    def services(self) -> tuple[type[Service], ...]:
        """The classes of the services that the loss uses: the reference of the KL term.

        A class of your own, whose companion uses further ones, adds them to ``super().services``.
        """
        return (FrozenReference,) if self.kl_coefficient else ()

    @property
    def trains_all_rows(self) -> bool:
        """Whether rows whose advantage is 0 have a gradient, too."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0

    def row_scale(self, mask: Tensor) -> Tensor:
        """``[B]`` float64: the factor that the aggregation gives to a row for its length, 1/|o_i| with grpo, else 1.

        ``mask [B, T]`` are the tokens in the loss.
        """
        lengths = mask.sum(1).clamp(min=1).double()
        return 1 / lengths if self.aggregation == "grpo" else torch.ones_like(lengths)

    def token_losses(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """`clipped_surrogate` with these options, ``[B, T]``."""
        return clipped_surrogate(
            logprobs,
            old_logprobs,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            ratio_cap=self.ratio_cap,
            mask=mask,
            level=self.level,
            surrogate=self.surrogate,
        )


@dataclass(frozen=True, kw_only=True)
class GRPO(Objective):
    r"""Group-relative policy optimisation, as published for language models.

    .. math:: A_i = \frac{r_i - \bar r}{s + 10^{-4}}, \qquad
              L = \frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t \ell_{it}

    ``\bar r`` and ``s`` are the mean and the unbiased standard deviation of the group's rewards, ``|o_i|`` the length
    of rollout ``i``, ``N`` the number of rollouts of an optimiser step (`core.step.loss.count_denominators`). Clips 0.2
    and 0.2, truncated rollouts kept.

    The paper adds a KL to the reference with coefficient 0.04 (k3, without the importance ratio). Later practice, TRL
    and verl among it, uses 0, as here; ``kl_coefficient: 0.04, kl_corrected: false`` is the paper's.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
    """

    aggregation: Aggregation = "grpo"

    def advantage(self) -> AdvantageEstimator:
        """See `Objective`."""
        return GroupMean(scale="group")


@dataclass(frozen=True, kw_only=True)
class DrGRPO(Objective):
    r"""GRPO without its two biases: no division by the group's deviation, and none by a rollout's own length.

    .. math:: A_i = r_i - \bar r, \qquad L = \frac{1}{N\,L_{max}} \sum_i \sum_t \ell_{it}

    ``L_{max}`` is the limit of response tokens. Clips 0.2 and 0.2, truncated rollouts kept, no KL.

    The published runs of GRAIL (arXiv 2606.04889) are this with two changes, which our configs make, too:
    ``clip_high: 0.28`` and ``mask_truncated: true``.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.
    """

    def advantage(self) -> AdvantageEstimator:
        """See `Objective`."""
        return GroupMean()


@dataclass(frozen=True, kw_only=True)
class DAPO(Objective):
    r"""GRPO with a higher upper clip, and one mean over all tokens.

    .. math:: A_i = \frac{r_i - \bar r}{s + 10^{-4}}, \qquad
              L = \frac{1}{\sum_i |o_i|} \sum_i \sum_t \ell_{it}

    Clips 0.2 and 0.28 ("clip-higher"), truncated rollouts left out ("overlong filtering"), no KL. The sums run over the
    rollouts in the loss of the whole optimiser step.

    Two further parts of the paper are options elsewhere. Dynamic sampling is `execution.refill_rounds`. The soft
    penalty of long responses is a reward (`overlong`), which cannot act on rollouts that are left out: set
    ``mask_truncated: false`` beside it.

    Source: DAPO, arXiv 2503.14476.
    """

    aggregation: Aggregation = "dapo"
    clip_high: float = 0.28
    mask_truncated: bool = True

    def advantage(self) -> AdvantageEstimator:
        """See `Objective`."""
        return GroupMean(scale="group")


@dataclass(frozen=True, kw_only=True)
class CISPO(Objective):
    r"""Clipped importance weights: a token beyond the bound keeps its gradient, with the bound as its weight.

    .. math:: A_i = \frac{r_i - \bar r}{s + 10^{-4}}, \qquad
              L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \mathrm{sg}(\min(\rho_{it}, 1+\epsilon_{high}))\,
              A_{it} \log \pi_{it}

    ``sg`` is a stopped gradient. There is no lower bound (``clip_low: 1``), truncated rollouts are kept, no KL. The
    paper prints no number for the upper bound; ``ε_high`` is 4, so the bound is the 5 of ScaleRL (arXiv 2510.13786).
    TRL's `epsilon_high` is the bound itself, ``1 + clip_high`` here.

    Source: MiniMax-M1, arXiv 2506.13585, equation 4.
    """

    aggregation: Aggregation = "dapo"
    surrogate: Surrogate = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0

    def advantage(self) -> AdvantageEstimator:
        """See `Objective`."""
        return GroupMean(scale="group")


@dataclass(frozen=True, kw_only=True)
class GSPOToken(Objective):
    r"""Group sequence policy optimisation with an advantage for each token: one ratio for a whole rollout.

    .. math:: \rho_{it} = \mathrm{sg}(s_i) \frac{\pi_{it}}{\mathrm{sg}(\pi_{it})}, \qquad
              s_i = \exp\Big(\frac{1}{|o_i|} \sum_t \log \frac{\pi_{it}}{\pi^{old}_{it}}\Big), \qquad
              L = \frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t \ell_{it}

    ``A_i`` is GRPO's, ``sg`` a stopped gradient. Clips 3e-4 and 4e-4, since the mean of a rollout's log-ratios is
    small; truncated rollouts kept, no KL. With equal weights in a rollout its gradient is that of GSPO.

    Source: GSPO, arXiv 2507.18071, equations 13 to 16, and section 5.1 for the clips.
    """

    aggregation: Aggregation = "grpo"
    level: Level = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def advantage(self) -> AdvantageEstimator:
        """See `Objective`."""
        return GroupMean(scale="group")


def checked(objective: object) -> Objective:
    """The objective that a program has given; a ValueError if it is no object of such a class."""
    if not isinstance(objective, Objective):
        raise ValueError(
            f"`objective` must be an object, an instance of `Objective`, but got {objective!r:.80}. Call the class, "
            "such as `objective=GRPO()`."
        )
    return objective


def described(objective: Objective, advantage: AdvantageEstimator) -> str:
    """A sentence about the algorithm of a run, and one about the estimator if it is not the algorithm's own."""
    name, changes = type(objective).__name__, _changes(objective)
    sentence = f"Objective: {name}, with {changes} in place of its defaults." if changes else f"Objective: {name}."
    default, used = (f"{type(part).__name__}({_changes(part)})" for part in (objective.advantage(), advantage))
    return sentence if default == used else f"{sentence} Advantage: {used}, in place of {default}."


def _changes(part: object) -> str:
    """The fields of a dataclass whose values differ from their defaults, as `clip_high=0.3`."""
    if not is_dataclass(part):
        return ""
    values = ((field, getattr(part, field.name)) for field in fields(part))
    return ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
