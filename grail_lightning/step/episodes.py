"""Rollouts of several turns: the policy samples a turn, its calls are run, their results are appended, and it goes on.

A rollout is ``prompt · a_1 · o_1 · a_2 · o_2 · … · a_K``. Ids are only ever appended: what was sampled is never decoded
and encoded again. All rollouts of a batch take a turn together, and their tools run side by side, so that nothing
depends on the order in which tools answer.

Shapes: ``B`` rows, ``T`` tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.batch import SampledBatch, Sampling
from grail_lightning.engines.base import RolloutEngine, build_batch, decode
from grail_lightning.engines.turns import SampledTurn, TurnRequest
from grail_lightning.environments.calls import ParsedCall
from grail_lightning.environments.dialogue import Dialect, Encode, find_dialect
from grail_lightning.environments.episode import Call, EndReason, Episode, Turn
from grail_lightning.environments.hooks import call_reset, call_reward, call_score, call_state
from grail_lightning.environments.side_by_side import side_by_side
from grail_lightning.environments.tools import run_calls
from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import all_reduce
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.tasks.environment import REWARD, EnvironmentTask
from grail_lightning.tasks.picture import add_text
from grail_lightning.tasks.problem import Prompt, TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATED: tuple[EndReason, ...] = ("tokens", "context")
_WARN_SHARE = 0.1
_THREADS = 32  # Environments at a time.


def has_environments(prompts: Sequence[Prompt], engine: RolloutEngine, device: torch.device) -> bool:
    """Whether a prompt of any rank has an environment: ranks that sample together then play their turns together."""
    own = any(isinstance(prompt.task, EnvironmentTask) for prompt in prompts)
    if engine.samples_elsewhere:  # It is perhaps called in a thread, where no collective may be.
        return own
    return bool(all_reduce(torch.tensor(int(own), device=device), "max"))


class _Rollout:
    """One rollout while it is played."""

    def __init__(self, prompt: Prompt, dialect: Dialect | None, environment: Any, prompt_ids: list[int]) -> None:
        self.prompt, self.dialect, self.environment, self.prompt_ids = prompt, dialect, environment, prompt_ids
        self.ids: list[int] = []  # After the prompt.
        self.sampled: list[bool] = []  # Of each of these, whether the policy sampled it.
        self.turn_of: list[int] = []
        self.logprobs: list[float] | None = []
        self.turns: list[Turn] = []
        self.state: Any = None  # The key of the state in which the next turn begins.
        self.last: list[int] = []  # The ids of the newest turn.
        self.calls: list[ParsedCall] = []  # Of the newest turn, to be run.
        self.end: EndReason | None = None
        self.budget = self.room = 0

    def limit(self, sampling: Sampling, positions: int | None) -> int:
        """Most tokens of the next turn, at least 1 in the first one."""
        task = self.prompt.task
        most = task.limits.max_tokens if isinstance(task, EnvironmentTask) else None
        rooms = [most, None if positions is None else positions - len(self.prompt_ids)]
        self.budget = sampling.max_response_length - sum(self.sampled)
        self.room = min((room - len(self.ids) for room in rooms if room is not None), default=self.budget)
        return max(1, min(self.budget, self.room))

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None, *, sampled: bool) -> None:
        """Append tokens: those of a turn, or what the environment answered to it."""
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.turn_of += [len(self.turns) - (not sampled)] * len(ids)
        self.logprobs = None if logprobs is None or self.logprobs is None else [*self.logprobs, *logprobs]

    def take(self, turn: SampledTurn, end_tokens: Sequence[int]) -> None:
        """Append a sampled turn, and read its calls; without one the rollout ends."""
        self.append(turn.ids, turn.logprobs, sampled=True)
        self.last, self.calls = turn.ids, []
        # Calls in plain tags end with their closing tag: an end token in their place ends the message, and the rollout.
        if turn.finished and self.dialect and (self.dialect.end_token_id or turn.ids[-1] not in end_tokens):
            self.calls = self.dialect.calls(turn.ids)
        if not turn.finished:
            self.end = "tokens" if len(turn.ids) >= self.budget else "context"
        elif not self.calls:
            self.end = "answered"

    def close_turn(self, text: str, calls: Sequence[Call], score: float | None, state: Any) -> None:
        """Record the turn, whose calls were run, and append what the environment answered if the rollout goes on."""
        self.turns.append(Turn(text=text, calls=tuple(calls), state=self.state, score=score))
        self.state = state
        if self.end is not None:
            return
        task = self.prompt.task
        assert isinstance(task, EnvironmentTask)
        assert self.dialect is not None
        between, end = self.dialect.between([call.result for call in calls]), self.dialect.end_token_id
        if end is not None and self.last[-1] != end:  # Another of the model's end tokens.
            between = [end, *between]
        failures = sum(call.status in ("failed", "timeout") for turn in self.turns for call in turn.calls)
        if self.lost or failures >= task.limits.max_failures:
            self.end = "failures"
        elif len(self.turns) >= task.limits.max_turns:
            self.end = "turns"
        elif self.budget <= len(self.last):
            self.end = "tokens"
        elif self.room <= len(self.last) + len(between):
            self.end = "context"
        else:
            self.append(between, [0.0] * len(between), sampled=False)

    @property
    def lost(self) -> bool:
        """Whether a tool hangs, so that the environment must not be used again."""
        return any(call.status == "timeout" for turn in self.turns for call in turn.calls)


def play(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> SampledBatch:
    """Rollouts in which the tasks' environments answer after each turn; a task without one has rollouts of one turn.

    Args:
        engine: The engine, which has the present weights.
        policy: The policy that encodes and decodes.
        prompts: This rank's prompts.
        group_size: Rollouts of each prompt; they are neighbours.
        sampling: `max_response_length` limits the sampled tokens of all turns together.
        seeds: A seed of 63 bits for each row: of its turns, and of its environment's random numbers.
    """
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    dialects = _dialects(policy, rows)
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    stops = [stop for dialect in dialects.values() for stop in dialect.stop]
    sampling = replace(sampling, stop=tuple(dict.fromkeys([*sampling.stop, *stops])))
    rollouts = _begin(policy, rows, dialects, seeds)
    number = 0
    with engine.turns(sampling) as sampler:
        while _any_going(rollouts, engine, policy.device):
            going = [k for k, rollout in enumerate(rollouts) if rollout.end is None]
            requests = [
                TurnRequest(
                    row=k,
                    prompt=rollouts[k].prompt,
                    ids=[*rollouts[k].prompt_ids, *rollouts[k].ids],
                    limit=rollouts[k].limit(sampling, positions),
                    seed=derive_seed(seeds[k], "turn", number),
                )
                for k in going
            ]
            for k, turn in zip(going, sampler.sample(requests), strict=True):
                rollouts[k].take(turn, policy.end_token_ids)
            _answer(policy, [rollouts[k] for k in going])
            number += 1
    return _batch(policy, rollouts, group_size)


def check_task(task: object, tokenizer: PreTrainedTokenizerBase, encode: Encode, kwargs: dict[str, Any]) -> None:
    """Check, before the weights are loaded, that calls of an environment's tools can be written with a tokenizer.

    Raises:
        ValueError: If its chat template rewrites earlier turns, or cannot show calls and results.
    """
    if isinstance(task, EnvironmentTask):
        find_dialect(tokenizer, task.tools.schemas, task.calls, encode, kwargs)


def _dialects(policy: Policy, rows: Sequence[Prompt]) -> dict[int, Dialect]:
    """How the calls of each task are written, by the identity of the task."""
    kwargs, made = policy.loading.chat_template_kwargs, {}
    for task in {id(row.task): row.task for row in rows if isinstance(row.task, EnvironmentTask)}.values():
        dialect = find_dialect(policy.tokenizer, task.tools.schemas, task.calls, policy.encode, kwargs)
        end = dialect.end_token_id
        if end is not None and end not in policy.end_token_ids:
            raise ValueError(
                f"The chat template ends a turn with {policy.tokenizer.convert_ids_to_tokens(end)!r}, which is no end "
                "token of the policy, so that turns would never end. Set `eos_token` of its tokenizer to it, or choose "
                "`task.calls: tags`."
            )
        made[id(task)] = dialect
    return made


def _any_going(rollouts: Sequence[_Rollout], engine: RolloutEngine, device: torch.device) -> bool:
    """Whether a rollout of any rank has not ended: ranks that sample together take equally many turns."""
    going = any(rollout.end is None for rollout in rollouts)
    if engine.samples_elsewhere:
        return going
    return bool(all_reduce(torch.tensor(int(going), device=device), "max"))


def _begin(
    policy: Policy, rows: Sequence[Prompt], dialects: dict[int, Dialect], seeds: Sequence[int]
) -> list[_Rollout]:
    """The rollouts before their first turn: environments are made and reset side by side, and prompts are encoded."""

    def begin(prompt: Prompt, seed: int) -> tuple[Any, str | None, Any]:
        task = prompt.task
        if not isinstance(task, EnvironmentTask):
            return None, None, None
        environment = task.environment()
        opening = call_reset(environment, prompt.columns, derive_seed(seed, "environment"))
        return environment, opening, call_state(environment)

    begun = _each([partial(begin, *pair) for pair in zip(rows, seeds, strict=True)], rows)
    rollouts = []
    for prompt, (environment, opening, state) in zip(rows, begun, strict=True):
        dialect = dialects.get(id(prompt.task))
        encode = policy.encode if dialect is None else dialect.prompt_ids
        rollouts.append(_Rollout(prompt, dialect, environment, encode(_with(prompt.messages, opening))))
        rollouts[-1].state = state
    return rollouts


def _answer(policy: Policy, rollouts: Sequence[_Rollout]) -> None:
    """Run the calls of the newest turns, and append their results where rollouts go on."""
    calls: list[tuple[Call, ...]] = [()] * len(rollouts)
    tasks = {id(rollout.prompt.task): rollout.prompt.task for rollout in rollouts}
    for task in tasks.values():
        if isinstance(task, EnvironmentTask):
            own = [k for k, rollout in enumerate(rollouts) if rollout.prompt.task is task and rollout.calls]
            limits = task.limits
            asked = [(rollouts[k].environment, rollouts[k].calls) for k in own]
            run = run_calls(task.tools, asked, seconds=limits.tool_seconds, max_characters=limits.result_characters)
            for k, done in zip(own, run, strict=True):
                calls[k] = done

    def judge(environment: Any, done: Sequence[Call]) -> tuple[float | None, Any]:
        if not done or any(call.status == "timeout" for call in done):
            return None, None
        return call_score(environment), call_state(environment)

    judged = _each(
        [partial(judge, r.environment, done) for r, done in zip(rollouts, calls, strict=True)],
        [r.prompt for r in rollouts],
    )
    for rollout, done, (score, state) in zip(rollouts, calls, judged, strict=True):
        rollout.close_turn(decode(policy, rollout.last), done, score, state)


def _each(functions: Sequence[Callable[[], Any]], prompts: Sequence[Prompt]) -> list[Any]:
    """What methods of environments that are not tools return, called side by side; an error of one ends the run."""
    seconds = [p.task.limits.tool_seconds for p in prompts if isinstance(p.task, EnvironmentTask)]
    made = []
    for (outcome,) in side_by_side([[f] for f in functions], seconds=max(seconds, default=1.0), threads=_THREADS):
        if outcome.status == "failed":
            raise outcome.value
        if outcome.status == "timeout":
            raise ValueError(
                f"`reset`, `get_reward`, `score_turn` and `state_key` of an environment must return within "
                f"`limits.tool_seconds`, but one did not in {outcome.seconds:g} seconds. Raise it, or make it faster."
            )
        made.append(outcome.value)
    return made


def _with(messages: Any, opening: str | None) -> Any:
    """The messages of a prompt, with what `reset` returned at the end of the last one."""
    if not opening:
        return messages
    *before, last = messages
    return [*before, {**last, "content": add_text(last["content"], opening)}]


def _reward(rollout: _Rollout) -> float | None:
    return None if rollout.environment is None or rollout.lost else call_reward(rollout.environment)


def _batch(policy: Policy, rollouts: Sequence[_Rollout], group_size: int) -> SampledBatch:
    """The rollouts as a batch, with the rewards of their environments."""
    rewards: list[float | None] = _each([partial(_reward, r) for r in rollouts], [r.prompt for r in rollouts])
    asked = [replace(r.prompt, messages=TokenText("", r.prompt_ids)) for r in rollouts]
    finished = [r.end not in TRUNCATED for r in rollouts]
    logprobs = [r.logprobs for r in rollouts if r.logprobs is not None]
    known = logprobs if len(logprobs) == len(rollouts) else None
    batch = build_batch(policy, asked, 1, [r.ids for r in rollouts], finished, known)
    device, width = batch.input_ids.device, batch.response_ids.shape[1]

    def table(values: Sequence[Sequence[int]]) -> Tensor:
        rows = [[*row, *[0] * (width - len(row))] for row in values]
        return torch.tensor(rows, dtype=torch.long, device=device).reshape(len(rows), width)

    prompts = [
        r.prompt if reward is None else replace(r.prompt, columns={**r.prompt.columns, REWARD: reward})
        for r, reward in zip(rollouts, rewards, strict=True)
    ]
    episodes = [
        Episode(turns=tuple(r.turns), end=r.end or "answered", reward=reward)
        for r, reward in zip(rollouts, rewards, strict=True)
    ]
    return batch.replace(
        response_mask=table([[int(s) for s in r.sampled] for r in rollouts]).bool(),
        turn=table([r.turn_of for r in rollouts]),
        group=torch.arange(len(rollouts), device=device) // group_size,
        prompts=prompts,
        texts=[decode(policy, r.last) for r in rollouts],
        episodes=episodes,
    )


def warn_of_limits(figures: dict[str, float], warned: set[str]) -> None:
    """Warn once of each limit that ends more than a tenth of the rollouts; `warned` are the ones that were named."""
    remedies = {
        "turns": "Raise `task.limits.max_turns`",
        "tokens": "Raise `sampling.max_response_length`",
        "context": "Raise `task.limits.max_tokens`, or lower `result_characters`",
        "failures": "Look at the calls' results in the samples",
    }
    for end, remedy in remedies.items():
        share = figures.get(f"episodes/end_{end}", 0.0)
        if share > _WARN_SHARE and end not in warned:
            warned.add(end)
            rank_zero_warn(f"{share:.0%} of the rollouts ended by the limit `{end}`. {remedy} (`episodes/end_{end}`).")
    if figures.get("episodes/no_call", 0.0) > 1 - _WARN_SHARE and "no_call" not in warned:
        warned.add("no_call")
        rank_zero_warn(
            f"{figures['episodes/no_call']:.0%} of the rollouts call no tool, so that little can be learned about "
            "calls. Show the policy how calls are written (worked examples, `task.tool_instruction`), or warm it up."
        )
