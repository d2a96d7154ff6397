"""Credit assignment: methods that turn a rollout's advantage into token weights, and control experiments."""

from grail_lightning.credit.base import CreditContext, CreditControl, Mean, Needs, TokenCredit, TokenWeights, Uniform
from grail_lightning.credit.controls import (
    AnswerOnly,
    Balanced,
    PermutedRewards,
    Random,
    RandomSubset,
    SameMagnitude,
    Shuffled,
)
from grail_lightning.credit.critic import CriticSearch, Judge
from grail_lightning.credit.distillation import RLSD
from grail_lightning.credit.entropy import DGPO, LESS, UCAS, AdvantageReweighting, HighEntropy
from grail_lightning.credit.flaws import EGCA, ExecutedMask, Oracle
from grail_lightning.credit.grail import GRAIL, SaliencyOptions
from grail_lightning.credit.oar import BilevelOptions, OARGradient, OARPerturbation
from grail_lightning.credit.prime import PRIME
from grail_lightning.credit.resampled import Resampled
from grail_lightning.credit.rhythm import AttentionOptions, AttentionRhythm
from grail_lightning.credit.saliency import input_saliency
from grail_lightning.credit.spans import ScoredSpan, SpanScores
from grail_lightning.credit.tree import OptimalBaseline, PrefixWeights, TreeAdvantage
from grail_lightning.credit.turns import IGPO, GiGPO, TurnRewards

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
    "GiGPO",
    "HighEntropy",
    "Judge",
    "Mean",
    "Needs",
    "OARGradient",
    "OARPerturbation",
    "OptimalBaseline",
    "Oracle",
    "PermutedRewards",
    "PrefixWeights",
    "Random",
    "RandomSubset",
    "Resampled",
    "SaliencyOptions",
    "SameMagnitude",
    "ScoredSpan",
    "Shuffled",
    "SpanScores",
    "TokenCredit",
    "TokenWeights",
    "TreeAdvantage",
    "TurnRewards",
    "Uniform",
    "input_saliency",
]
