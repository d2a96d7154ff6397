"""Rollouts of several turns: the policy samples a turn, its calls are run, their results are appended, and it goes on.

A rollout is ``prompt · a_1 · o_1 · a_2 · o_2 · … · a_K``. Ids are only ever appended: what was sampled is never decoded
and encoded again. All rollouts of a batch take a turn together, and their tools run side by side, so that nothing
depends on the order in which tools answer.

Shapes: ``B`` rows, ``T`` tokens after the prompt.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grail_lightning.core.engines.base import (
    RolloutEngine,
    SampledTurn,
    TurnRequest,
    build_batch,
    decode,
    longest_row,
    on_any_rank,
)
from grail_lightning.core.engines.checks import check_takes_pictures
from grail_lightning.core.environments.calls import ParsedCall
from grail_lightning.core.environments.dialogue import Dialect
from grail_lightning.core.environments.side_by_side import side_by_side
from grail_lightning.core.environments.tools import (
    call_close,
    call_number,
    call_reset,
    call_state,
    new_environment,
    run_calls,
)
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.episode import EndReason, Episode, ToolCall, Turn
from grail_lightning.core.records.picture import add_text, pictures_in
from grail_lightning.core.records.task import FUNCTION_REWARDS, REWARD, Prompt, TokenText
from grail_lightning.core.rollout.batch import SampledBatch, Sampling
from grail_lightning.core.runtime.collectives import world_size
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.tasks.environment import EnvironmentTask
from grail_lightning.core.tasks.rewards import TRLRollouts


@dataclass(eq=False)
class _Rollout:
    """One rollout while it is played; without a task it has no environment, and one turn."""

    policy: Policy
    prompt: Prompt
    dialect: Dialect | None
    sampling: Sampling
    most: float  # The tokens of all that policy and engine have room for.
    seed: int
    environment_seed: int

    environment: Any = None
    opening: str | None = None  # What `reset` returned.
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # After the prompt.
    sampled: list[bool] = field(default_factory=list)  # Of each of these, whether the policy sampled it.
    turn_of: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    outside: dict[str, Any] = field(default_factory=dict)  # The columns of functions that read the environment.
    end: EndReason | None = None

    # Of the newest turn: its ids, its calls before and after they were run, and where it began and ended.
    last: list[int] = field(default_factory=list)
    asked: list[ParsedCall] = field(default_factory=list)
    calls: tuple[ToolCall, ...] = ()
    score: float | None = None
    state: Any = None
    next_state: Any = None

    @property
    def task(self) -> EnvironmentTask | None:
        return self.prompt.task if isinstance(self.prompt.task, EnvironmentTask) else None

    def left(self) -> tuple[float, float]:
        """How many tokens may still be sampled, and for how many there is room."""
        most = (self.task.limits.max_tokens if self.task else None) or math.inf
        room = min(most, self.most - len(self.prompt_ids)) - len(self.ids)
        return self.sampling.max_response_length - sum(self.sampled), room

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None, *, sampled: bool) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.turn_of += [len(self.turns) - (not sampled)] * len(ids)
        self.logprobs = None if logprobs is None or self.logprobs is None else [*self.logprobs, *logprobs]

    def take(self, turn: SampledTurn) -> None:
        """Append a sampled turn, and read its calls; without one the rollout ends."""
        self.append(turn.ids, turn.logprobs, sampled=True)
        self.last, self.asked, self.calls, self.score = turn.ids, [], (), None
        # Calls in plain tags end with their closing tag: an end token or a stop string in its place ends the rollout.
        if (
            turn.finished
            and self.dialect
            and (self.dialect.end_token_id is not None or not self._stopped(self.dialect))
        ):
            self.asked = self.dialect.calls(turn.ids)
        if not turn.finished:
            self.end = "tokens" if self.left()[0] <= 0 else "context"
        elif not self.asked:
            self.end = "answered"

    def _stopped(self, dialect: Dialect) -> bool:
        """Whether an end token or a stop string of the run, rather than a closing tag, ended the newest turn."""
        stops = set(self.sampling.stop) - set(dialect.stop)
        text = decode(self.policy, self.last) if stops else ""
        return not {*self.last[-1:]}.isdisjoint(self.policy.end_token_ids) or any(stop in text for stop in stops)

    def close_turn(self) -> None:
        """Record the turn, whose calls were run, and append what the environment answered if the rollout goes on."""
        text = decode(self.policy, self.last)
        self.turns.append(Turn(text=text, calls=self.calls, state=self.state, score=self.score))
        self.state = self.next_state
        if self.end is not None:
            return
        assert self.task is not None
        assert self.dialect is not None
        between, end = self.dialect.between([call.parts for call in self.calls]), self.dialect.end_token_id
        if end is not None and self.last[-1:] != [end]:  # Another of the model's end tokens.
            between = [end, *between]
        failures = sum(call.status in ("failed", "timeout") for turn in self.turns for call in turn.calls)
        budget, room = self.left()
        if self.lost or failures >= self.task.limits.max_failures:
            self.end = "failures"
        elif len(self.turns) >= self.task.limits.max_turns:
            self.end = "turns"
        elif budget <= 0:
            self.end = "tokens"
        elif room <= len(between):
            self.end = "context"
        else:
            self.append(between, [0.0] * len(between), sampled=False)

    def messages(self) -> list[dict[str, Any]]:
        """What followed the prompt as messages in TRL's form. A turn's content is all that the policy wrote in it."""
        told: list[dict[str, Any]] = []
        for turn in self.turns:
            functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls]
            calls = {"tool_calls": [{"type": "function", "function": function} for function in functions]}
            told.append({"role": "assistant", "content": turn.text} | (calls if functions else {}))
            told += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
        return told

    @property
    def lost(self) -> bool:
        """Whether a tool hangs, so that the environment must not be used again."""
        return any(call.status == "timeout" for call in self.calls)

    # What environments are asked, each in a thread of its own.
    def begin(self) -> None:
        assert self.task is not None
        self.environment = new_environment(self.task.environment)
        pictures = pictures_in(self.prompt.messages)
        self.opening = call_reset(self.environment, self.prompt.columns, self.environment_seed, pictures)
        self.state = call_state(self.environment)

    def judge_turn(self) -> None:
        self.score = call_number(self.environment, "score_turn")
        self.next_state = call_state(self.environment)

    def judge(self) -> None:
        self.reward = call_number(self.environment, "get_reward")

    def close(self) -> None:
        call_close(self.environment)


def play(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> SampledBatch:
    """Rollouts in which the tasks' environments answer after each turn; a task without one has rollouts of one turn.

    `sampling.max_response_length` limits the sampled tokens of all turns together. The `seeds` of the rows, 63 bits
    each, are those of their turns. The environments of a group have one seed, that of its first row: advantages and
    states are compared between rollouts of the same problem.
    """
    dialects, most, rollouts = _dialects(policy, prompts), longest_row(engine, policy), []
    for row, seed in enumerate(seeds):
        prompt = prompts[row // group_size]
        of_group = derive_seed(seeds[row - row % group_size], "environment")
        rollouts.append(_Rollout(policy, prompt, dialects.get(id(prompt.task)), sampling, most, seed, of_group))
    try:
        _each(rollouts, "begin")
        _take_turns(engine, policy, rollouts, sampling, most)
        _each([rollout for rollout in rollouts if not rollout.lost], "judge")
        _reward_outside(rollouts)
    finally:
        _close(rollouts)
    return _batch(policy, rollouts, group_size)


def _take_turns(
    engine: RolloutEngine, policy: Policy, rollouts: Sequence[_Rollout], sampling: Sampling, most: float
) -> None:
    """Sample turns and run their calls until all rollouts have ended."""
    for rollout in rollouts:
        encode = rollout.dialect.prompt_ids if rollout.dialect else policy.encode
        rollout.prompt_ids = encode(_messages(rollout))
        if rollout.task and len(rollout.prompt_ids) >= most:
            raise ValueError(
                f"A prompt has {len(rollout.prompt_ids)} tokens with what `reset` of its environment returned, but "
                f"must have fewer than {most}. Shorten what `reset` returns, or leave such rows out of the data."
            )
    number = 0
    with engine.turns(sampling) as sample:
        while on_any_rank(any(rollout.end is None for rollout in rollouts), engine, policy.device):
            going = [(row, rollout) for row, rollout in enumerate(rollouts) if rollout.end is None]
            requests = [
                TurnRequest(
                    row=row,
                    prompt=rollout.prompt,
                    ids=[*rollout.prompt_ids, *rollout.ids],
                    limit=max(1, int(min(rollout.left()))),
                    seed=derive_seed(rollout.seed, "turn", number),
                    stop=sampling.stop + (rollout.dialect.stop if rollout.dialect else ()),
                )
                for row, rollout in going
            ]
            for (_, rollout), turn in zip(going, sample(requests), strict=True):
                rollout.take(turn)
            _answer([rollout for _, rollout in going], engine)
            number += 1


def _dialects(policy: Policy, prompts: Sequence[Prompt]) -> dict[int, Dialect]:
    kwargs, dialects = policy.loading.chat_template_kwargs, {}
    pictures = None if policy.vision is None else policy.vision.pictures
    for task in {id(p.task): p.task for p in prompts if isinstance(p.task, EnvironmentTask)}.values():
        dialect = task.dialect(policy.tokenizer, policy.encode, kwargs, pictures)
        end = dialect.end_token_id
        if end is not None and end not in policy.end_token_ids:
            raise ValueError(
                f"The chat template ends a turn with {policy.tokenizer.convert_ids_to_tokens(end)!r}, which is no end "
                "token of the policy, so that turns would never end. Set `eos_token` of its tokenizer to it, or choose "
                "`task.calls: tags`."
            )
        dialects[id(task)] = dialect
    return dialects


def _each(rollouts: Sequence[_Rollout], method: Literal["begin", "judge_turn", "judge"]) -> None:
    """Call a method of each rollout that has an environment, side by side; an error of one ends the run."""
    calls = [(getattr(rollout, method), rollout.task.limits.method_seconds) for rollout in rollouts if rollout.task]
    for outcome in side_by_side([function for function, _ in calls], [seconds for _, seconds in calls]):
        if outcome.status == "failed":
            raise outcome.value
        if outcome.status == "timeout":
            raise ValueError(
                "The constructor and `reset`, `get_reward`, `score_turn` and `state_key` of an environment must return "
                f"within `limits.method_seconds`, but one did not in {outcome.seconds:g} seconds. Raise it, or make it "
                "faster."
            )


# The methods `close` of whose failure a warning has told: the rollouts are whole, so that it ends no run.
_CLOSES_TOLD: set[str] = set()


def _close(rollouts: Sequence[_Rollout]) -> None:
    """Close the environments that were made, each once, whatever ended the rollouts; a failure is a warning, once."""
    jobs = [(r, r.task.limits.method_seconds) for r in rollouts if r.task and hasattr(r.environment, "close")]
    outcomes = side_by_side([rollout.close for rollout, _ in jobs], [seconds for _, seconds in jobs])
    for (rollout, seconds), outcome in zip(jobs, outcomes, strict=True):
        name = f"`{type(rollout.environment).__name__}.close`"
        late = f"{name} did not return within `limits.method_seconds`, {seconds:g} seconds"
        failure = {"failed": str(outcome.value).rstrip("."), "timeout": late}.get(outcome.status)
        if failure and name not in _CLOSES_TOLD:
            _CLOSES_TOLD.add(name)
            warnings.warn(f"{failure}. The run goes on, and further failures of it are not told.", stacklevel=2)


def _reward_outside(rollouts: Sequence[_Rollout]) -> None:
    """Ask the reward functions that read the environments of their task's rollouts, before these are closed."""
    for task in {id(rollout.task): rollout.task for rollout in rollouts if rollout.task}.values():
        members = [rollout for rollout in rollouts if rollout.task is task and not rollout.lost]
        if not members or not task.has_trl_rewards:
            continue
        columns = [{**r.prompt.columns, **({REWARD: r.reward} if task.gives_reward else {})} for r in members]
        names = dict.fromkeys(name for row in columns for name in row)
        told = TRLRollouts(
            prompts=[_messages(rollout) for rollout in members],
            completions=[rollout.messages() for rollout in members],
            ids=[list(rollout.ids) for rollout in members],
            columns={name: [row.get(name) for row in columns] for name in names},
            environments=[rollout.environment for rollout in members],
        )
        for rollout, earned in zip(members, task.rewards_outside(told), strict=True):
            rollout.outside = earned


def _answer(rollouts: Sequence[_Rollout], engine: RolloutEngine) -> None:
    """Run the calls of the newest turns, and append their results where rollouts go on."""
    asking = [(rollout, rollout.task) for rollout in rollouts if rollout.asked and rollout.task]
    requests = [(task.tools, rollout.environment, rollout.asked) for rollout, task in asking]
    for (rollout, _), calls in zip(asking, run_calls(requests, [task.limits for _, task in asking]), strict=True):
        rollout.calls = tuple(_shown(call, rollout.policy, engine) for call in calls)
    _each([rollout for rollout, _ in asking if not rollout.lost], "judge_turn")
    for rollout in rollouts:
        rollout.close_turn()


def _shown(call: ToolCall, policy: Policy, engine: RolloutEngine) -> ToolCall:
    """The call; with an error as its result if the policy's processor does not take a picture of it."""
    if not call.pictures:
        return call
    if policy.vision is None:
        raise ValueError(
            f"The tool `{call.name}` returned a picture, but the policy takes text alone. Set another `model.policy`."
        )
    check_takes_pictures(engine, policy.loading, world_size())
    try:
        for picture in call.pictures:
            policy.vision.pictures.hold(picture)
    except ValueError as error:
        return replace(call, status="failed", result=f"Error: {error}", pictures=())
    return call


def _messages(rollout: _Rollout) -> Any:
    """The prompt's messages, with what `reset` returned at the end."""
    messages: Any = rollout.prompt.messages
    if not rollout.dialect or not rollout.opening or isinstance(messages, TokenText):
        return messages
    opening = rollout.dialect.escaped(rollout.opening)
    if isinstance(messages, str):
        return messages + opening
    *before, last = messages
    return [*before, {**last, "content": add_text(last["content"], opening)}]


def _batch(policy: Policy, rollouts: Sequence[_Rollout], group_size: int) -> SampledBatch:
    logprobs = [r.logprobs for r in rollouts if r.logprobs is not None]
    batch = build_batch(
        policy,
        [replace(r.prompt, messages=TokenText("", r.prompt_ids)) for r in rollouts],
        1,
        [r.ids for r in rollouts],
        [r.end not in ("tokens", "context") for r in rollouts],
        logprobs if len(logprobs) == len(rollouts) else None,
        sampled=[r.sampled for r in rollouts],
        turn=[r.turn_of for r in rollouts],
    )
    return batch.replace(
        group=batch.group // group_size,
        prompts=[replace(r.prompt, columns={**r.prompt.columns, **_earned(r)}) for r in rollouts],
        episodes=[
            Episode(turns=tuple(r.turns), end=r.end or "answered", reward=r.reward, opening=r.opening) for r in rollouts
        ],
    )


def _earned(rollout: _Rollout) -> dict[str, Any]:
    """The columns of a rollout in an environment; None where a tool hangs."""
    task = rollout.task
    rewards: dict[str, Any] = {REWARD: rollout.reward} if task and task.gives_reward else {}
    return rewards | ({FUNCTION_REWARDS: None} | rollout.outside if task and task.has_trl_rewards else {})
