"""Stored rollouts of a world as batches of training, and the services that credit methods use there.

Nothing is sampled, no answer is compared and no program runs when a world is opened: rewards and verdicts are stored.
Labels are read elsewhere (`labels`), and no object here has them.

Shapes: ``B`` rows, ``T`` tokens after the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grail_lightning.answers.records import Verdict
from grail_lightning.app.benchmark.programs import StoredCode
from grail_lightning.app.benchmark.reads import unrecorded, watched_prompt, watched_verdict
from grail_lightning.app.benchmark.replay import replay
from grail_lightning.app.benchmark.stored import read_arrays
from grail_lightning.app.benchmark.worlds import World, world_of
from grail_lightning.core.credit.base import CreditContext
from grail_lightning.core.credit.service import Opened, Owner, RunParts, Services
from grail_lightning.core.engines.base import build_batch
from grail_lightning.core.engines.hf.engine import HFEngine
from grail_lightning.core.objective import DrGRPO
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import GradedBatch, SampledBatch
from grail_lightning.core.rollout.grading import TaskVerifiers, align_rows, answer_masks
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.sampler import Sampler
from grail_lightning.worlds.code.task import ProgramVerdict
from grail_lightning.worlds.programs.outcome import ProgramOutcome

GROUP_SIZE = 8
PROMPTS = 16  # Of a batch, as in the quickstart.
TOKEN_BUDGET = 4096  # Padded tokens of a forward pass.
OBJECTIVE = DrGRPO(mask_truncated=True)
"""The objective under which advantages are computed."""
_MAX_GRAD_NORM = 1.0  # `execution.max_grad_norm` of the quickstart, for models that a method trains.
_READ = ("ids", "turn", "end", "rewards", "verdict", "verdicts")


class _UnrecordedSampler(Sampler):
    """A sampler whose grading is none of the method's reading."""

    def grade(self, sampled: SampledBatch) -> GradedBatch:
        """See `Sampler`."""
        with unrecorded():
            return super().grade(sampled)


@dataclass(kw_only=True)
class OpenWorld:
    """A world with its policy and its stored rollouts.

    Attributes:
        world: The world.
        policy: Its policy in evaluation mode.
        batches: The rollouts, a `GradedBatch` of 16 problems with 8 rollouts each.
    """

    world: World
    policy: Policy
    batches: list[GradedBatch]
    number: int = 0  # Of the batch that a method is called with; a key of the draws of continuations.
    _engine: HFEngine | None = None
    _verifiers: TaskVerifiers = field(default_factory=TaskVerifiers)

    def sampler(self) -> Sampler:
        """The sampler of training, with the weights of the policy, for continuations."""
        if self._engine is None:
            self._engine = HFEngine(cache_tokens=50_000)
        return _UnrecordedSampler(
            group_size=GROUP_SIZE,
            sampling=self.world.sampling,
            policy=self.policy,
            engine=self._engine,
            verifier=self._verifiers,
            clock=PhaseClock(self.policy.device),
            rank=0,
        )

    def services(self, owners: Sequence[Owner]) -> Opened:
        """The services that parts list, opened as a run opens them: the reference is the packaged policy itself."""
        services = Services()
        services.open("fit", owners, self._parts())
        return services.opened("fit")

    def _parts(self) -> RunParts:
        def load(source: Any, *, trainable: bool) -> Policy:
            policy = load_policy(source, self.policy.loading)
            return policy.requires_grad_(trainable).train(trainable)

        return RunParts(
            policy=self.policy,
            source=self.world.policy,
            loading=self.policy.loading,
            load_model=load,
            sampler=self.sampler,
            step=lambda: self.number,
            strategy=SingleDeviceStrategy("cpu"),
            max_grad_norm=_MAX_GRAD_NORM,
        )

    def context(self, number: int, seed: int, services: Opened | None = None) -> CreditContext:
        """The context of a method on the batch with a number."""
        self.number = derive_seed(seed, number) if seed else number
        generator = torch.Generator().manual_seed(derive_seed(seed, "credit", number))
        return CreditContext(step=0, generator=generator, token_budget=TOKEN_BUDGET, services=services or {})

    def further(self, number: int) -> list[GradedBatch]:
        """At most `number` stored batches behind those that are open, for methods that train a model before."""
        return read_batches(self.world, self.policy, len(self.batches), len(self.batches) + number)

    def close(self) -> None:
        """End the processes that compare answers and run programs."""
        self._verifiers.close()
        for task in {id(batch.prompts[0].task): batch.prompts[0].task for batch in self.batches}.values():
            if isinstance(task, StoredCode):
                task.close()


@contextmanager
def open_world(name: str, number: int | None = None) -> Iterator[OpenWorld]:
    """A world with its first `number` batches of stored rollouts; all without a number.

    Raises:
        ValueError: If there is no such world, or if it has fewer batches.
    """
    world = world_of(name)
    if number is not None and number < 1:
        raise ValueError(f"`batches` must be at least 1, but got {number}.")
    policy = load_policy(world.policy).eval().requires_grad_(True)
    batches = read_batches(world, policy, 0, number)
    if number is not None and len(batches) < number:
        raise ValueError(
            f"`batches` must be at most {len(batches)}, as many as are stored of {name}, but got {number}."
        )
    with closing(OpenWorld(world=world, policy=policy, batches=batches)) as opened:
        yield opened


def read_batches(world: World, policy: Policy, start: int, stop: int | None) -> list[GradedBatch]:
    """The stored batches from `start` to `stop` of a world, with their rewards and verdicts."""
    arrays = read_arrays(world.file, _READ, stop)
    (problems,) = world.data(len(arrays["ids"]) * PROMPTS).load("train")
    texts = [json.loads(text) for text in arrays.pop("verdicts").tolist()]
    batches = []
    for k in range(start, len(arrays["ids"])):
        prompts = [*map(watched_prompt, problems.prompts[k * PROMPTS : (k + 1) * PROMPTS])]
        part = {name: array[k] for name, array in arrays.items()}
        sampled = replay(policy, prompts, part) if world.turns else _of_one_turn(policy, prompts, part)
        rows = zip(part["verdict"].tolist(), sampled.prompts, sampled.texts, strict=True)
        verdicts = [watched_verdict(_verdict(texts[index], prompt, text)) for index, prompt, text in rows]
        batches.append(_graded(policy, sampled, torch.from_numpy(part["rewards"]).double(), verdicts))
    return batches


def _of_one_turn(policy: Policy, prompts: Sequence[Prompt], part: dict[str, Any]) -> SampledBatch:
    padding, end = policy.tokenizer.pad_token_id, policy.tokenizer.eos_token_id
    responses = [[token for token in row if token != padding] for row in part["ids"].tolist()]
    finished = [row[-1] == end for row in responses]
    return build_batch(policy, prompts, GROUP_SIZE, responses, finished)


def _graded(policy: Policy, sampled: SampledBatch, rewards: torch.Tensor, verdicts: list[Verdict]) -> GradedBatch:
    return GradedBatch(
        **sampled.fields(),
        answer=answer_masks(sampled, align_rows(sampled, policy.tokenizer)),
        rewards=rewards,
        correct=torch.tensor([verdict.correct for verdict in verdicts]),
        verdicts=verdicts,
        reward_values={"correctness": rewards},
        reward_weights={"correctness": torch.ones_like(rewards)},
    )


def _verdict(told: dict[str, Any], prompt: Prompt, text: str) -> Verdict:
    """The verdict of a stored record, with the rollout's own answer."""
    status, missing = told["status"], told["status"] == "missing"
    prediction = "" if missing else cast(str, prompt.task.answer(text))
    parts = {"correct": status == "right", "status": status, "layer": told["layer"], "gold": prompt.reference}
    if "outcome" not in told:
        return Verdict(**parts, prediction=prediction)
    outcome = ProgramOutcome(**told["outcome"] | {"passed": tuple(told["outcome"]["passed"]), "trace": None})
    return ProgramVerdict(**parts, prediction=prediction, outcome=outcome)


def told_verdict(verdict: Verdict) -> str:
    """What is stored of a verdict, as JSON: not the answers, which prompt and response have."""
    told: dict[str, Any] = {"status": verdict.status, "layer": verdict.layer}
    if isinstance(verdict, ProgramVerdict):
        its = verdict.outcome
        kept = ("status", "passed", "failing", "line", "message", "cut", "certain")
        told["outcome"] = {name: getattr(its, name) for name in kept}
    return json.dumps(told)
