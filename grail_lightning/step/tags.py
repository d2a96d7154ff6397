"""The tags under which loggers and callbacks see the figures of training.

TensorBoard shows a group for whatever stands before the first slash of a tag. There are six groups: ``train`` (rollouts
and their rewards), ``policy`` (the update), ``credit`` (token weights), ``speed`` (seconds, tokens, memory), and
``val`` and ``test`` (held-out problems). What follows the group is the name that users of GRPO know.
"""

from __future__ import annotations

GROUPS = ("train", "policy", "credit", "speed", "val", "test")
# The group of a figure, by what stands before the first slash of its name.
GROUP_OF = {
    name: group
    for group, names in {
        "train": "reward reward_std rewards accuracy verdict completions episodes refill frac_reward_zero_std "
        "frac_correct_zero_std",
        "policy": "loss grad_norm learning_rate kl distillation_kl clip_ratio sampling entropy entropy_sampled",
        "speed": "time step_time tokens_per_second num_tokens shared_tokens peak_memory_gb",
    }.items()
    for name in names.split()
}


def tag(figure: str) -> str:
    """The tag of a figure: its group and its name; a name that begins with a group is a tag already.

    A figure without a group, of a user's own module, belongs to ``train``.

    >>> tag("reward"), tag("clip_ratio/low_mean"), tag("credit/top10_mass")
    ('train/reward', 'policy/clip_ratio/low_mean', 'credit/top10_mass')
    """
    first, slash, _ = figure.partition("/")
    if slash and first in GROUPS:
        return figure
    return f"{GROUP_OF.get(first, 'train')}/{figure}"
