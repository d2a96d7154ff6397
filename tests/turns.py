"""Given rollouts of several turns in the packaged policy's tokens: what the policy sampled, and what it was told."""

from dataclasses import replace

import torch

from tests.batches import in_turns, rollouts
from tests.runs import TASK

# Texts in turn of the policy and of the environment. The third row samples what the first one was told; some rows are
# told an answer, which is not theirs; and one is cut off.
FIRST = [
    ["7+5=12\n", "12-3=9\n\\boxed{17}\n", "9+8=17\n\\boxed{17}"],
    ["7+5=12\n", "12-3=9\n\\boxed{17}\n", "9+8=16\n\\boxed{16}"],
    ["7+5=12\n12-3=9\n\\boxed{17}\n9+8=16\n\\boxed{16}"],
    ["7+5=2\n", "2-3=-1\n", "\\boxed{7}"],
]
SECOND = [
    ["9+9=18\n", "18-4=14\n", "14+1=15\n", "1+1=2\n", "\\boxed{15}"],
    ["9+9=18\n", "18-4=14\n", "14+1=1"],
    ["9+9=8\n", "8-4=4\n\\boxed{15}\n", "4+1=5\n\\boxed{5}"],
    ["9"],
]
PROBLEMS = {"7+5-3+8": FIRST, "9+9-4+1": SECOND}
CUT = 5


def played(policy, groups=PROBLEMS, logprobs=None):
    """The rollouts as an engine and its environments give them."""
    prompts = [TASK.prompt({"problem": problem}) for problem in groups]
    rows = [texts for of_group in groups.values() for texts in of_group]
    finished = [k != CUT for k in range(len(rows))]
    batch = in_turns(policy, prompts, rows, finished, group_size=len(rows) // len(prompts), logprobs=logprobs)
    for row, episode in enumerate(batch.episodes):
        turns = tuple(replace(turn, state=(row % 2, len(turn.text))) for turn in episode.turns)
        batch.episodes[row] = replace(episode, turns=turns)
    return batch


def trained(policy, **changes):
    """The rollouts, graded."""
    made = played(policy)
    right = [TASK.answer(text) == prompt.reference for text, prompt in zip(made.texts, made.prompts, strict=True)]
    return rollouts(made, torch.tensor(right).to(policy.model.dtype), tokenizer=policy.tokenizer, **changes)


def told_otherwise(batch):
    """The rollouts with other tokens where an environment answered."""
    told = batch.valid_mask & ~batch.response_mask
    response = torch.where(told, batch.response_ids % 7 + 20, batch.response_ids)
    return batch.replace(
        response_ids=response, input_ids=torch.cat([batch.input_ids[:, : batch.prompt_width], response], 1)
    )


def alone(policy, batch, row):
    """A row without padding, ``[1, n]``, and the places of its sampled tokens in it."""
    mask = batch.attention_mask[row]
    begun = int(batch.prompt_lengths[row])
    return batch.input_ids[row][mask][None].long(), (batch.response_mask[row].nonzero().flatten() + begun).tolist()
