"""Credit assignment: methods that turn a rollout's advantage into token weights, and control experiments.

A class is imported when it is asked for, so that a run loads the one method that it names (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

from grail_lightning.credit.base import CreditContext, CreditControl, Mean, TokenCredit, TokenWeights, Uniform
from grail_lightning.credit.service import FrozenReference, RunParts, Service

if TYPE_CHECKING:
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
    from grail_lightning.credit.grail import GRAIL, SaliencyOptions
    from grail_lightning.credit.oar import BilevelOptions, OARGradient, OARPerturbation
    from grail_lightning.credit.oracle import Oracle
    from grail_lightning.credit.rhythm import AttentionOptions, AttentionRhythm
    from grail_lightning.credit.saliency import input_saliency
    from grail_lightning.credit.spans import ScoredSpan, SpanScores
    from grail_lightning.credit.tree import OptimalBaseline, PrefixWeights, TreeAdvantage
    from grail_lightning.credit.turns import GiGPO, TurnRewards
    from grail_lightning.gallery.code_credit import EGCA, ExecutedMask
    from grail_lightning.gallery.continuations import SampledContinuations
    from grail_lightning.gallery.igpo import IGPO
    from grail_lightning.gallery.prime import PRIME
    from grail_lightning.gallery.resampled import Resampled
    from grail_lightning.gallery.second_model import ModelTraining, TrainedModel

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
    "RunParts",
    "SaliencyOptions",
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
    "input_saliency",
]

_EXPORTS = {
    name: f"grail_lightning.{module}"
    for module, names in {
        "credit.controls": "AnswerOnly Balanced PermutedRewards Random RandomSubset SameMagnitude Shuffled",
        "credit.critic": "CriticSearch Judge",
        "credit.distillation": "RLSD",
        "credit.entropy": "AdvantageReweighting DGPO HighEntropy LESS UCAS",
        "credit.oracle": "Oracle",
        "credit.grail": "GRAIL SaliencyOptions",
        "credit.oar": "BilevelOptions OARGradient OARPerturbation",
        "credit.rhythm": "AttentionOptions AttentionRhythm",
        "credit.saliency": "input_saliency",
        "credit.spans": "ScoredSpan SpanScores",
        "credit.tree": "OptimalBaseline PrefixWeights TreeAdvantage",
        "credit.turns": "GiGPO TurnRewards",
        "gallery.code_credit": "EGCA ExecutedMask",
        "gallery.continuations": "SampledContinuations",
        "gallery.igpo": "IGPO",
        "gallery.prime": "PRIME",
        "gallery.resampled": "Resampled",
        "gallery.second_model": "ModelTraining TrainedModel",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
