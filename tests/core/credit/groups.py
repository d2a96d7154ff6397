"""Groups of given responses in the packaged policy's tokens."""

import torch

from grail_lightning import build_batch
from tests.batches import rollouts
from tests.runs import TASK

SOUND = "7+5=12\n12-3=9\n9+8=17\n\\boxed{17}"
LATE = "7+5=12\n12-3=9\n9+8=16\n\\boxed{16}"
FLAWED = "7+5=2\n2-3=-1\n-1+8=7\n\\boxed{7}"
GROUP = ("7+5-3+8", [SOUND, FLAWED, LATE, SOUND])
OTHER = ("9+9-4+1", ["9+9=18\n18-4=14\n14+1=15\n\\boxed{15}", "9+9=8", "9+9=18\n\\boxed{18}", "9"])


def groups(policy, *members, rewards=None, correct=None):
    """Groups of responses to a problem each, ``(problem, responses)``, with their end tokens and locations of answers.

    Without rewards, a response that is right earns 1.
    """
    size = len(members[0][1])
    texts = [text for _, responses in members for text in responses]
    ids = [[*policy.tokenizer(text)["input_ids"], policy.end_token_ids[0]] for text in texts]
    prompts = [TASK.prompt({"problem": problem}) for problem, _ in members]
    sampled = build_batch(policy, prompts, size, ids, [True] * len(ids))
    if rewards is None:
        right = [
            TASK.answer(text) == prompt.reference for text, prompt in zip(sampled.texts, sampled.prompts, strict=True)
        ]
        rewards = torch.tensor(right).float()
    correct = None if correct is None else torch.tensor(correct)
    made = torch.as_tensor(rewards, dtype=torch.float32)
    return rollouts(sampled, made, group_size=size, tokenizer=policy.tokenizer, correct=correct)


def tokens_of(batch, row):
    """The response tokens of a row."""
    return batch.response_ids[row][batch.response_mask[row]].tolist()


def sharing(batch, row, length):
    """The rows of the group that begin with the first tokens of a row."""
    start = tokens_of(batch, row)[:length]
    return [
        j for j in range(len(batch)) if batch.group[j] == batch.group[row] and tokens_of(batch, j)[:length] == start
    ]
