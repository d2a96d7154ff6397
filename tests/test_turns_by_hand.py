"""Rollouts of a policy that calls tools, against a loop that shares no code with them."""

import os
import re

import pytest
import torch

from grail_lightning import GrailModule, HFEngine, MathTask, Sampling
from grail_lightning.answers import Marker
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.episodes import play
from grail_lightning.worlds.sums.calculator import Calculator
from tests.draws import without_ties
from tests.processes import on_ranks
from tests.runs import Watch, trainer
from tests.steps import configured
from tests.test_episodes import example, task_of
from tests.tolerance import near, roundings
from tests.tool_calling_policy import END, calling_policy

GROUP, LENGTH, MAX_TURNS, MAX_TOKENS, MAX_FAILURES = 8, 20, 3, 110, 2
SAMPLING = Sampling(max_response_length=LENGTH)
LIMITS = {"max_turns": MAX_TURNS, "max_tokens": MAX_TOKENS, "max_failures": MAX_FAILURES, "tool_seconds": 60.0}
SEEDS = [1900 + row for row in range(3 * GROUP)]


class Brittle:
    """Its tool raises for small numbers, and its score is that of its state."""

    def reset(self, seed: int, problem: str, answer: str) -> None:
        """Begin."""
        self.sum = seed % 10

    def guess(self, number: int) -> str:
        """Add.

        Args:
            number: A number.
        """
        self.sum += number
        if number < 7:
            raise KeyError(f"small {END}")
        return f"</result>{END}{self.sum}"

    def get_reward(self) -> float:
        """Of the whole rollout."""
        return self.sum / 10

    def score_turn(self) -> float:
        """Of a turn."""
        return self.sum / 100

    def state_key(self) -> int:
        """The state."""
        return self.sum


TOOLS = {"Guess": ("guess", "number"), "Calculator": ("calculator", "expression"), "Brittle": ("guess", "number")}
PROBLEM = {"Guess": "Go. ", "Calculator": "How many?", "Brittle": "Go."}


def made(name):
    """An environment."""
    return {"Guess": lambda: example()(20), "Calculator": Calculator, "Brittle": Brittle}[name]()


@pytest.fixture(scope="module")
def policy():
    return calling_policy()


@pytest.fixture(scope="module")
def batch(policy):
    prompts = [
        task_of(lambda name=name: made(name), LIMITS).prompt({"problem": PROBLEM[name], "answer": "7"})
        for name in TOOLS
    ]
    engine = HFEngine()
    engine.update_weights(policy)
    with without_ties():
        return play(engine, policy, prompts, GROUP, SAMPLING, SEEDS)


def called(name, text, environment):
    """What is said to a turn, whether the call failed; None without a call."""
    tool, parameter = TOOLS[name]
    before, closed, _ = text.partition(f"</{tool}>")
    *_, content = parts = before.split(f"<{tool}>")
    if not closed:
        return (f"Error: This call has no </{tool}>.", False) if len(parts) > 1 else None
    if len(parts) == 1:
        return f"Error: This call has no <{tool}> before its </{tool}>.", False
    content = content.strip()
    if parameter == "number" and not re.fullmatch(r"-?(0|[1-9]\d*)", content):
        told = f"Error: `number` must be integer, but got {content!r}. The tool is `guess(number: integer)`."
        return told, False
    try:
        return getattr(environment, tool)(int(content) if parameter == "number" else content), False
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}", True


def broken(text, tool):
    """What is told, with a blank in each tag of ours and in the end token."""
    for word in (END, f"<{tool}>", f"</{tool}>", "<result>", "</result>"):
        text = text.replace(word, f"{word[0]} {word[1:]}")
    return text


@torch.no_grad()
def by_hand(policy, name, seed, first_of_group):
    """A rollout whose tokens are each the outcome of a pass over all that precede it."""
    tokenizer, environment, tool = policy.tokenizer, made(name), TOOLS[name][0]
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    drawn = derive_seed(first_of_group, "environment")
    row = {"problem": PROBLEM[name], "answer": "7"}
    opening = environment.reset(**row) if name == "Calculator" else environment.reset(seed=drawn, **row)
    prompt, ids, mask, turn, turns, end = encode(PROBLEM[name] + (opening or "")), [], [], [], [], None
    state = getattr(environment, "state_key", lambda: None)
    while end is None:
        number, budget = len(turns), LENGTH - sum(mask)
        limit, begun = min(budget, MAX_TOKENS - len(ids)), len(ids)
        noise = torch.rand(
            budget, dtype=torch.float64, generator=torch.Generator().manual_seed(derive_seed(seed, "turn", number))
        )
        finished, now = False, state()
        while len(ids) - begun < limit and not finished:
            probs = policy.model(torch.tensor([prompt + ids])).logits[0, -1].softmax(-1)
            ids.append(int((probs.cumsum(0) <= noise[len(ids) - begun]).sum()))
            mask.append(True)
            turn.append(number)
            text = tokenizer.decode(ids[begun:])
            finished = ids[-1] == tokenizer.eos_token_id or text.endswith(f"</{tool}>")
        own, answer = ids[begun:], None
        if finished and own[-1] != tokenizer.eos_token_id:
            answer = called(name, text, environment)
        turns.append((text.removesuffix(END), now, answer))
        failures = sum(bool(told and told[1]) for _, _, told in turns)
        if not finished:
            end = "tokens" if len(own) == budget else "context"
        elif answer is None:
            end = "answered"
        elif failures == MAX_FAILURES:
            end = "failures"
        elif len(turns) == MAX_TURNS:
            end = "turns"
        elif len(own) == budget:
            end = "tokens"
        else:
            told = encode("\n<result>") + encode(broken(answer[0], tool)) + encode("</result>\n")
            if len(ids) + len(told) >= MAX_TOKENS:
                end = "context"
                continue
            ids += told
            mask += [False] * len(told)
            turn += [number] * len(told)
    reward = environment.get_reward() if hasattr(environment, "get_reward") else None
    return prompt, ids, mask, turn, turns, end, reward


def test_rollouts_are_those_of_a_loop_that_reads_every_token_again(policy, batch):
    ends, calls, redone = [], [], 0
    for row, seed in enumerate(SEEDS):
        group = row // GROUP
        prompt, ids, mask, turn, turns, end, reward = by_hand(policy, list(TOOLS)[group], seed, SEEDS[group * GROUP])
        valid, episode = batch.valid_mask[row], batch.episodes[row]
        assert batch.input_ids[row, : batch.prompt_width][batch.attention_mask[row, : batch.prompt_width]].tolist() == (
            prompt
        )
        assert batch.response_ids[row][valid].tolist() == ids
        assert batch.response_mask[row][valid].tolist() == mask
        assert batch.turn[row][valid].tolist() == turn
        assert bool(batch.finished[row]) == (end not in ("tokens", "context"))
        assert (episode.end, episode.reward) == (end, reward)
        assert batch.texts[row] == turns[-1][0]
        assert [t.text for t in episode.turns] == [text for text, _, _ in turns]
        assert [t.state for t in episode.turns] == [state for _, state, _ in turns]
        assert [[call.result for call in t.calls] for t in episode.turns] == [
            [] if answer is None else [answer[0]] for _, _, answer in turns
        ]
        ends.append(end)
        calls += [call.status for call in episode.calls]
        sampled = batch.response_ids[row][batch.response_mask[row]].tolist()
        redone += policy.tokenizer(policy.tokenizer.decode(sampled))["input_ids"] != sampled
    assert set(ends) == {"answered", "turns", "tokens", "context", "failures"}, "the case must hold every end"
    assert set(calls) == {"done", "invalid", "failed"}
    assert redone, "some tokens must be such as no tokenizer writes"


def _fit(folder, ranks):
    """A step on each of two batches, whose first prompt calls tools up to four times.

    The second prompt is answered in one turn, and has no environment in the second batch.
    """
    many, one = (task_of(lambda: example()(9), {"tool_seconds": 60.0, "max_turns": turns}) for turns in (4, 1))
    row = {"problem": "Go.", "answer": "7"}
    prompts = [many.prompt(row), one.prompt(row), many.prompt(row)]
    prompts.append(MathTask(answer=Marker(), instruction="").prompt(row))
    what, how = configured({"kl_coefficient": 0.05, "token_budget": 300, "mask_truncated": False}, group_size=6)
    ours = GrailModule(
        folder,
        sampling=Sampling(max_response_length=24),
        objective=what,
        execution=how,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02),
    )
    mine = prompts[int(os.environ.get("LOCAL_RANK", "0")) :: ranks]
    loader, watch = torch.utils.data.DataLoader(mine, batch_size=2 // ranks, collate_fn=list), Watch()
    options = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "use_distributed_sampler": False}
    trainer(2, watch, precision="64-true", **options).fit(ours, loader)
    batches = [output.batch for output in watch.outputs]
    return {
        "weights": [p.detach().flatten()[::97].tolist() for p in ours.policy.parameters()],
        "turns": [[len(episode.turns) for episode in batch.episodes or ()] for batch in batches],
        "rows": [{int(b.row[k]): b.response_ids[k][b.valid_mask[k]].tolist() for k in range(len(b))} for b in batches],
        "loss": [output.metrics["loss"] for output in watch.outputs],
    }


@pytest.mark.slow
def test_two_ranks_with_uneven_turns_train_as_one_process(tmp_path):
    """Also where a rank has no prompt with an environment."""
    policy = calling_policy()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    (alone,), both = (on_ranks(_fit, str(tmp_path), ranks, ranks=ranks) for ranks in (1, 2))
    for batch in range(2):
        first, second = (rank["turns"][batch] for rank in both)
        assert max(first) > 2
        assert set(second) == {1}
        assert both[0]["rows"][batch] | both[1]["rows"][batch] == alone["rows"][batch]
    assert both[0]["weights"] == both[1]["weights"]
    begun = [p.flatten()[::97].tolist() for p in policy.parameters()]
    assert alone["weights"] != begun
    for found, expected, start in zip(both[0]["weights"], alone["weights"], begun, strict=True):
        moved = max(abs(a - b) for a, b in zip(expected, start, strict=True))
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= moved * roundings(100, torch.float32)
    assert both[0]["loss"] == near(alone["loss"], 1000, torch.float32, scale=0.01)
