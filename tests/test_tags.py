"""Every figure of a run has its place in a group of TensorBoard."""

import pytest

from grail_lightning.credit import GRAIL
from grail_lightning.step.tags import GROUP_OF, GROUPS, tag
from tests.runs import Watch, batches, module, trainer


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("reward", "train/reward"),
        ("completions/mean_length", "train/completions/mean_length"),
        ("clip_ratio/region_mean", "policy/clip_ratio/region_mean"),
        ("time/sample", "speed/time/sample"),
        ("credit/top10_mass", "credit/top10_mass"),
        ("val/accuracy", "val/accuracy"),
        ("of_a_users_module", "train/of_a_users_module"),
        ("credit", "train/credit"),
    ],
)
def test_a_figure_keeps_its_name_as_the_last_part_of_its_tag(figure, expected):
    assert tag(figure) == expected
    assert tag(expected) == expected


def test_every_figure_of_a_step_has_a_group_of_its_own_choice():
    watch = Watch()
    objective = {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "updates_per_batch": 2}
    trainer(2, watch).fit(module(objective, credit=GRAIL()), batches(1, size=8))
    figures = watch.outputs[0].metrics
    assert {"kl", "entropy", "loss", "sampling/sampling_logp_difference/mean"} <= figures.keys()
    assert not [name for name in figures if name.partition("/")[0] not in (*GROUP_OF, *GROUPS)]
