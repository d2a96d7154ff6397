"""Reinforcement learning with verifiable rewards on PyTorch Lightning, with credit for each token.

What users name, subclass and call is imported from here, credit methods from `grail_lightning.credit`, pure functions
from `grail_lightning.functional`, forms of answers from `grail_lightning.answers`. The package has five wings, each
built on those before it: `answers` (answers and their comparison), `core` (the training step and what it stands
on), `worlds` (generated problems with tools, labels and packaged policies), `gallery` (credit methods and estimators
that the step does not know by name), and `app` (command line, callbacks, views, reports).
"""

import warnings
from typing import TYPE_CHECKING

from grail_lightning._lazy import lazy
from grail_lightning._version import __version__

if TYPE_CHECKING:
    from grail_lightning.app.callbacks import default_callbacks
    from grail_lightning.app.callbacks.checkpoints import LastCheckpoint
    from grail_lightning.app.callbacks.credit_plots import CreditPictures
    from grail_lightning.app.callbacks.evaluation import Evaluation
    from grail_lightning.app.callbacks.export import ExportPolicy
    from grail_lightning.app.callbacks.predictions import PredictionWriter
    from grail_lightning.app.callbacks.preflight import Preflight
    from grail_lightning.app.callbacks.responses import ShowResponses
    from grail_lightning.app.callbacks.rollouts import KeepRollouts
    from grail_lightning.app.callbacks.throughput import Throughput
    from grail_lightning.app.results.records import read_evaluation, read_samples
    from grail_lightning.app.views.page import show_credit, write_page
    from grail_lightning.core.advantages import (
        BNPO,
        GDPO,
        AdvantageContext,
        AdvantageEstimator,
        BatchNormalised,
        GroupMean,
        LeaveOneOut,
    )
    from grail_lightning.core.data.loaders import Curriculum
    from grail_lightning.core.data.modules import PromptData, Split
    from grail_lightning.core.data.rows import FewShot
    from grail_lightning.core.data.sources import DatasetSpec, Table
    from grail_lightning.core.data.tables import Kept, MathData, TableData
    from grail_lightning.core.engines.base import RolloutEngine, build_batch
    from grail_lightning.core.engines.hf.engine import HFEngine
    from grail_lightning.core.engines.vllm.colocated import VLLMEngine
    from grail_lightning.core.engines.vllm.server import VLLMServer
    from grail_lightning.core.module import GrailModule
    from grail_lightning.core.objective import CISPO, DAPO, GRPO, Companion, DrGRPO, GSPOToken, Objective
    from grail_lightning.core.policy.model import Policy
    from grail_lightning.core.policy.source import Loading, LoRA, resolve_policy
    from grail_lightning.core.records.episode import EpisodeLimits
    from grail_lightning.core.records.task import GradedAnswer, Prompt, Step, Task
    from grail_lightning.core.rollout.batch import GradedBatch, RolloutBatch, SampledBatch, Sampling
    from grail_lightning.core.rollout.grading import grade_answers
    from grail_lightning.core.runtime.collectives import all_gather_objects, all_gather_rows
    from grail_lightning.core.step.execution import Execution
    from grail_lightning.core.step.figures import StepOutput
    from grail_lightning.core.tasks.answered import AnswerTask, MathTask
    from grail_lightning.core.tasks.environment import Environment, EnvironmentTask
    from grail_lightning.core.tasks.rewards import RewardSpec, correctness
    from grail_lightning.gallery.energy import EnergyBaseline
    from grail_lightning.gallery.sdpg import SDPG
    from grail_lightning.worlds.charts.data import ChartsData
    from grail_lightning.worlds.code.data import CodeData
    from grail_lightning.worlds.code.task import CodeTask
    from grail_lightning.worlds.programs.isolation import Bubblewrap, Isolation
    from grail_lightning.worlds.programs.outcome import ProgramLimits
    from grail_lightning.worlds.programs.process import ProcessSandbox
    from grail_lightning.worlds.programs.sandbox import Sandbox
    from grail_lightning.worlds.search.data import SearchData
    from grail_lightning.worlds.sums.data import ArithmeticData
    from grail_lightning.worlds.sums.task import ArithmeticTask
    from grail_lightning.worlds.words.data import WordProblemData
    from grail_lightning.worlds.words.task import WordProblemTask

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "GDPO",
    "GRPO",
    "SDPG",
    "AdvantageContext",
    "AdvantageEstimator",
    "AnswerTask",
    "ArithmeticData",
    "ArithmeticTask",
    "BatchNormalised",
    "Bubblewrap",
    "ChartsData",
    "CodeData",
    "CodeTask",
    "Companion",
    "CreditPictures",
    "Curriculum",
    "DatasetSpec",
    "DrGRPO",
    "EnergyBaseline",
    "Environment",
    "EnvironmentTask",
    "EpisodeLimits",
    "Evaluation",
    "Execution",
    "ExportPolicy",
    "FewShot",
    "GSPOToken",
    "GradedAnswer",
    "GradedBatch",
    "GrailModule",
    "GroupMean",
    "HFEngine",
    "Isolation",
    "KeepRollouts",
    "Kept",
    "LastCheckpoint",
    "LeaveOneOut",
    "LoRA",
    "Loading",
    "MathData",
    "MathTask",
    "Objective",
    "Policy",
    "PredictionWriter",
    "Preflight",
    "ProcessSandbox",
    "ProgramLimits",
    "Prompt",
    "PromptData",
    "RewardSpec",
    "RolloutBatch",
    "RolloutEngine",
    "SampledBatch",
    "Sampling",
    "Sandbox",
    "SearchData",
    "ShowResponses",
    "Split",
    "Step",
    "StepOutput",
    "Table",
    "TableData",
    "Task",
    "Throughput",
    "VLLMEngine",
    "VLLMServer",
    "WordProblemData",
    "WordProblemTask",
    "__version__",
    "all_gather_objects",
    "all_gather_rows",
    "build_batch",
    "correctness",
    "default_callbacks",
    "grade_answers",
    "read_evaluation",
    "read_samples",
    "resolve_policy",
    "show_credit",
    "write_page",
]

# Importing the package imports no torch: the verifier's workers, `--version` and shells stay quick (PEP 562). A name
# that is asked for imports its own module alone.
_EXPORTS = {
    "AdvantageContext": "grail_lightning.core.advantages",
    "AdvantageEstimator": "grail_lightning.core.advantages",
    "AnswerTask": "grail_lightning.core.tasks.answered",
    "ArithmeticData": "grail_lightning.worlds.sums.data",
    "ArithmeticTask": "grail_lightning.worlds.sums.task",
    "BNPO": "grail_lightning.core.advantages",
    "BatchNormalised": "grail_lightning.core.advantages",
    "Bubblewrap": "grail_lightning.worlds.programs.isolation",
    "CISPO": "grail_lightning.core.objective",
    "ChartsData": "grail_lightning.worlds.charts.data",
    "CodeData": "grail_lightning.worlds.code.data",
    "CodeTask": "grail_lightning.worlds.code.task",
    "Companion": "grail_lightning.core.objective",
    "CreditPictures": "grail_lightning.app.callbacks.credit_plots",
    "Curriculum": "grail_lightning.core.data.loaders",
    "DAPO": "grail_lightning.core.objective",
    "DatasetSpec": "grail_lightning.core.data.sources",
    "DrGRPO": "grail_lightning.core.objective",
    "EnergyBaseline": "grail_lightning.gallery.energy",
    "Environment": "grail_lightning.core.tasks.environment",
    "EnvironmentTask": "grail_lightning.core.tasks.environment",
    "EpisodeLimits": "grail_lightning.core.records.episode",
    "Evaluation": "grail_lightning.app.callbacks.evaluation",
    "Execution": "grail_lightning.core.step.execution",
    "ExportPolicy": "grail_lightning.app.callbacks.export",
    "FewShot": "grail_lightning.core.data.rows",
    "GDPO": "grail_lightning.core.advantages",
    "GRPO": "grail_lightning.core.objective",
    "GSPOToken": "grail_lightning.core.objective",
    "GradedAnswer": "grail_lightning.core.records.task",
    "GradedBatch": "grail_lightning.core.rollout.batch",
    "GrailModule": "grail_lightning.core.module",
    "GroupMean": "grail_lightning.core.advantages",
    "HFEngine": "grail_lightning.core.engines.hf.engine",
    "Isolation": "grail_lightning.worlds.programs.isolation",
    "KeepRollouts": "grail_lightning.app.callbacks.rollouts",
    "Kept": "grail_lightning.core.data.tables",
    "LastCheckpoint": "grail_lightning.app.callbacks.checkpoints",
    "LeaveOneOut": "grail_lightning.core.advantages",
    "LoRA": "grail_lightning.core.policy.source",
    "Loading": "grail_lightning.core.policy.source",
    "MathData": "grail_lightning.core.data.tables",
    "MathTask": "grail_lightning.core.tasks.answered",
    "Objective": "grail_lightning.core.objective",
    "Policy": "grail_lightning.core.policy.model",
    "PredictionWriter": "grail_lightning.app.callbacks.predictions",
    "Preflight": "grail_lightning.app.callbacks.preflight",
    "ProcessSandbox": "grail_lightning.worlds.programs.process",
    "ProgramLimits": "grail_lightning.worlds.programs.outcome",
    "Prompt": "grail_lightning.core.records.task",
    "PromptData": "grail_lightning.core.data.modules",
    "RewardSpec": "grail_lightning.core.tasks.rewards",
    "RolloutBatch": "grail_lightning.core.rollout.batch",
    "RolloutEngine": "grail_lightning.core.engines.base",
    "SDPG": "grail_lightning.gallery.sdpg",
    "SampledBatch": "grail_lightning.core.rollout.batch",
    "Sampling": "grail_lightning.core.rollout.batch",
    "Sandbox": "grail_lightning.worlds.programs.sandbox",
    "SearchData": "grail_lightning.worlds.search.data",
    "ShowResponses": "grail_lightning.app.callbacks.responses",
    "Split": "grail_lightning.core.data.modules",
    "Step": "grail_lightning.core.records.task",
    "StepOutput": "grail_lightning.core.step.figures",
    "Table": "grail_lightning.core.data.sources",
    "TableData": "grail_lightning.core.data.tables",
    "Task": "grail_lightning.core.records.task",
    "Throughput": "grail_lightning.app.callbacks.throughput",
    "VLLMEngine": "grail_lightning.core.engines.vllm.colocated",
    "VLLMServer": "grail_lightning.core.engines.vllm.server",
    "WordProblemData": "grail_lightning.worlds.words.data",
    "WordProblemTask": "grail_lightning.worlds.words.task",
    "all_gather_objects": "grail_lightning.core.runtime.collectives",
    "all_gather_rows": "grail_lightning.core.runtime.collectives",
    "build_batch": "grail_lightning.core.engines.base",
    "correctness": "grail_lightning.core.tasks.rewards",
    "default_callbacks": "grail_lightning.app.callbacks",
    "grade_answers": "grail_lightning.core.rollout.grading",
    "read_evaluation": "grail_lightning.app.results.records",
    "read_samples": "grail_lightning.app.results.records",
    "resolve_policy": "grail_lightning.core.policy.source",
    "show_credit": "grail_lightning.app.views.page",
    "write_page": "grail_lightning.app.views.page",
}

# torch 2.13 deprecates `LeafSpec`, which Lightning 2.6 creates for every batch.
warnings.filterwarnings(
    "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"lightning\.pytorch\."
)

__getattr__ = lazy(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
