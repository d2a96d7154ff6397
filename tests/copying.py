"""An engine that answers with the question instead of its value."""

from grail_lightning import RolloutEngine, build_batch


class Copying(RolloutEngine):
    r"""The first response of each group is right, the others have the problem's expression in the box."""

    def __init__(self):
        self.policy = None

    def update_weights(self, policy):
        """See `RolloutEngine`."""
        self.policy = policy

    def generate(self, prompts, group_size, sampling, seed):
        """See `RolloutEngine`."""
        answers = [
            prompt.columns["problem"] if place else prompt.reference
            for prompt in prompts
            for place in range(group_size)
        ]
        texts = [f"\\boxed{{{answer}}}" for answer in answers]
        tokenizer = self.policy.tokenizer
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        return build_batch(self.policy, prompts, group_size, ids, [True] * len(ids))
