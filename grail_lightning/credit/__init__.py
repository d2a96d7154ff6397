"""Who gets the credit: methods that turn a rollout's advantage into token weights, and their controls."""

from grail_lightning.credit.base import CreditContext, CreditControl, TokenCredit, Uniform
from grail_lightning.credit.controls import AnswerOnly, Random, Shuffled
from grail_lightning.credit.grail import GRAIL, SaliencyOptions
from grail_lightning.credit.oar import BilevelOptions, OARGradient
from grail_lightning.credit.saliency import input_saliency
from grail_lightning.rollout import TokenWeights

__all__ = [
    "GRAIL",
    "AnswerOnly",
    "BilevelOptions",
    "CreditContext",
    "CreditControl",
    "OARGradient",
    "Random",
    "SaliencyOptions",
    "Shuffled",
    "TokenCredit",
    "TokenWeights",
    "Uniform",
    "input_saliency",
]
