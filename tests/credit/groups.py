"""Groups of given responses in the packaged policy's tokens."""

import torch

from grail_lightning.engines import build_batch
from tests.batches import rollouts
from tests.runs import TASK


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
