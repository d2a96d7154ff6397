"""Credit assignment: methods that turn a rollout's advantage into token weights, and control experiments.

`run_credit` computes the advantages of tokens for any other trainer.

Here are names alone: the classes are in `core.credit` (begin with `core/credit/grail.py`) and in `gallery`. A name that
is asked for imports its own module alone.
"""

from typing import TYPE_CHECKING

from grail_lightning._lazy import lazy

if TYPE_CHECKING:
    from grail_lightning.core.credit.base import CreditContext, CreditControl, Mean, TokenCredit, TokenWeights, Uniform
    from grail_lightning.core.credit.controls import (
        AnswerOnly,
        Balanced,
        PermutedRewards,
        Random,
        RandomSubset,
        SameMagnitude,
        Shuffled,
    )
    from grail_lightning.core.credit.grail import GRAIL, SaliencyOptions
    from grail_lightning.core.credit.measure import entropies, logprobs
    from grail_lightning.core.credit.oar import BilevelOptions, OARGradient, OARPerturbation
    from grail_lightning.core.credit.oracle import Oracle
    from grail_lightning.core.credit.saliency import SaliencyCredit, SaliencyTarget, input_saliency
    from grail_lightning.core.credit.service import FrozenReference, RolloutSampler, RunParts, Service
    from grail_lightning.core.credit.tree import OptimalBaseline, PrefixWeights, TreeAdvantage
    from grail_lightning.core.credit.turns import GiGPO, TurnRewards
    from grail_lightning.core.other_trainers.credit import run_credit
    from grail_lightning.core.other_trainers.model import as_policy
    from grail_lightning.core.other_trainers.rollouts import GivenRollouts
    from grail_lightning.gallery.code_credit import EGCA, ExecutedMask
    from grail_lightning.gallery.continuations import SampledContinuations
    from grail_lightning.gallery.critic import CriticSearch, Judge
    from grail_lightning.gallery.distillation import RLSD
    from grail_lightning.gallery.entropy import DGPO, LESS, UCAS, AdvantageReweighting, HighEntropy
    from grail_lightning.gallery.igpo import IGPO
    from grail_lightning.gallery.prime import PRIME
    from grail_lightning.gallery.resampled import Resampled
    from grail_lightning.gallery.rhythm import AttentionOptions, AttentionRhythm
    from grail_lightning.gallery.second_model import ModelTraining, TrainedModel
    from grail_lightning.gallery.spans import ScoredSpan, SpanScores

__all__ = [
    "DGPO",
    "EGCA",
    "GRAIL",
    "IGPO",
    "LESS",
    "PRIME",
    "RLSD",
    "UCAS",
    "AdvantageReweighting",
    "AnswerOnly",
    "AttentionOptions",
    "AttentionRhythm",
    "Balanced",
    "BilevelOptions",
    "CreditContext",
    "CreditControl",
    "CriticSearch",
    "ExecutedMask",
    "FrozenReference",
    "GiGPO",
    "GivenRollouts",
    "HighEntropy",
    "Judge",
    "Mean",
    "ModelTraining",
    "OARGradient",
    "OARPerturbation",
    "OptimalBaseline",
    "Oracle",
    "PermutedRewards",
    "PrefixWeights",
    "Random",
    "RandomSubset",
    "Resampled",
    "RolloutSampler",
    "RunParts",
    "SaliencyCredit",
    "SaliencyOptions",
    "SaliencyTarget",
    "SameMagnitude",
    "SampledContinuations",
    "ScoredSpan",
    "Service",
    "Shuffled",
    "SpanScores",
    "TokenCredit",
    "TokenWeights",
    "TrainedModel",
    "TreeAdvantage",
    "TurnRewards",
    "Uniform",
    "as_policy",
    "entropies",
    "input_saliency",
    "logprobs",
    "run_credit",
]

_EXPORTS = {
    "AdvantageReweighting": "grail_lightning.gallery.entropy",
    "AnswerOnly": "grail_lightning.core.credit.controls",
    "AttentionOptions": "grail_lightning.gallery.rhythm",
    "AttentionRhythm": "grail_lightning.gallery.rhythm",
    "Balanced": "grail_lightning.core.credit.controls",
    "BilevelOptions": "grail_lightning.core.credit.oar",
    "CreditContext": "grail_lightning.core.credit.base",
    "CreditControl": "grail_lightning.core.credit.base",
    "CriticSearch": "grail_lightning.gallery.critic",
    "DGPO": "grail_lightning.gallery.entropy",
    "EGCA": "grail_lightning.gallery.code_credit",
    "ExecutedMask": "grail_lightning.gallery.code_credit",
    "FrozenReference": "grail_lightning.core.credit.service",
    "GRAIL": "grail_lightning.core.credit.grail",
    "GiGPO": "grail_lightning.core.credit.turns",
    "GivenRollouts": "grail_lightning.core.other_trainers.rollouts",
    "HighEntropy": "grail_lightning.gallery.entropy",
    "IGPO": "grail_lightning.gallery.igpo",
    "Judge": "grail_lightning.gallery.critic",
    "LESS": "grail_lightning.gallery.entropy",
    "Mean": "grail_lightning.core.credit.base",
    "ModelTraining": "grail_lightning.gallery.second_model",
    "OARGradient": "grail_lightning.core.credit.oar",
    "OARPerturbation": "grail_lightning.core.credit.oar",
    "OptimalBaseline": "grail_lightning.core.credit.tree",
    "Oracle": "grail_lightning.core.credit.oracle",
    "PRIME": "grail_lightning.gallery.prime",
    "PermutedRewards": "grail_lightning.core.credit.controls",
    "PrefixWeights": "grail_lightning.core.credit.tree",
    "RLSD": "grail_lightning.gallery.distillation",
    "Random": "grail_lightning.core.credit.controls",
    "RandomSubset": "grail_lightning.core.credit.controls",
    "Resampled": "grail_lightning.gallery.resampled",
    "RolloutSampler": "grail_lightning.core.credit.service",
    "RunParts": "grail_lightning.core.credit.service",
    "SaliencyCredit": "grail_lightning.core.credit.saliency",
    "SaliencyOptions": "grail_lightning.core.credit.grail",
    "SaliencyTarget": "grail_lightning.core.credit.saliency",
    "SameMagnitude": "grail_lightning.core.credit.controls",
    "SampledContinuations": "grail_lightning.gallery.continuations",
    "ScoredSpan": "grail_lightning.gallery.spans",
    "Service": "grail_lightning.core.credit.service",
    "Shuffled": "grail_lightning.core.credit.controls",
    "SpanScores": "grail_lightning.gallery.spans",
    "TokenCredit": "grail_lightning.core.credit.base",
    "TokenWeights": "grail_lightning.core.credit.base",
    "TrainedModel": "grail_lightning.gallery.second_model",
    "TreeAdvantage": "grail_lightning.core.credit.tree",
    "TurnRewards": "grail_lightning.core.credit.turns",
    "UCAS": "grail_lightning.gallery.entropy",
    "Uniform": "grail_lightning.core.credit.base",
    "as_policy": "grail_lightning.core.other_trainers.model",
    "entropies": "grail_lightning.core.credit.measure",
    "input_saliency": "grail_lightning.core.credit.saliency",
    "logprobs": "grail_lightning.core.credit.measure",
    "run_credit": "grail_lightning.core.other_trainers.credit",
}

__getattr__ = lazy(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
