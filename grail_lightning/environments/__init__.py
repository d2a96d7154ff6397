"""Environments: what a policy can call in the course of a rollout, and what it was told. Nothing here needs torch."""

from grail_lightning.environments.calls import ParsedCall
from grail_lightning.environments.episode import Call, CallStatus, EndReason, Episode, Turn
from grail_lightning.environments.hooks import call_reset, call_reward, call_score, call_state, check_columns
from grail_lightning.environments.side_by_side import Outcome, side_by_side
from grail_lightning.environments.tools import ToolSet, result_text, run_calls

__all__ = [
    "Call",
    "CallStatus",
    "EndReason",
    "Episode",
    "Outcome",
    "ParsedCall",
    "ToolSet",
    "Turn",
    "call_reset",
    "call_reward",
    "call_score",
    "call_state",
    "check_columns",
    "result_text",
    "run_calls",
    "side_by_side",
]
