"""Given rollouts of several turns in the packaged policy's tokens: what the policy sampled, and what it was told."""

import torch

from grail_lightning.engines import build_batch
from grail_lightning.environments.episode import Call, Episode, Turn
from tests.batches import rollouts
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


def parts(policy, texts, ended):
    """A row's ids, whether each is sampled, and its turn."""
    ids, sampled, turn = [], [], []
    for number, text in enumerate(texts):
        own = [*policy.tokenizer(text)["input_ids"]]
        own += [policy.end_token_ids[0]] if ended and number == len(texts) - 1 else []
        ids += own
        sampled += [number % 2 == 0] * len(own)
        turn += [number // 2] * len(own)
    return ids, sampled, turn


def played(policy, groups=PROBLEMS, logprobs=None):
    """The rollouts as an engine and its environments give them."""
    prompts = [TASK.prompt({"problem": problem}) for problem in groups]
    rows = [texts for of_group in groups.values() for texts in of_group]
    finished = [k != CUT for k in range(len(rows))]
    made = [parts(policy, texts, ended) for texts, ended in zip(rows, finished, strict=True)]
    ids, sampled, turn = map(list, zip(*made, strict=True))
    known = None if logprobs is None else [[logprobs] * len(row) for row in ids]
    size = len(rows) // len(prompts)
    batch = build_batch(policy, prompts, size, ids, finished, known, sampled=sampled, turn=turn)
    return batch.replace(episodes=[episode(texts, k) for k, texts in enumerate(rows)])


def episode(texts, row):
    """What was played."""
    calls = [(Call(name="next", arguments={"place": 2}, result=told),) for told in texts[1::2]] + [()]
    turns = zip(texts[::2], calls, strict=True)
    end = "tokens" if row == CUT else "answered"
    return Episode(turns=tuple(Turn(text=t, calls=c, state=(row % 2, len(t))) for t, c in turns), end=end, reward=0.5)


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
