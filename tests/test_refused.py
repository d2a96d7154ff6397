"""Options and arguments from Python that mean nothing, in one table; `test_mistakes` has those of the command line."""

import math
import re

import numpy as np
import pytest
import torch

from grail_lightning import (
    BNPO,
    GRPO,
    SDPG,
    BatchNormalised,
    CodeTask,
    EnergyBaseline,
    EpisodeLimits,
    GroupMean,
    LeaveOneOut,
    Sampling,
    VLLMEngine,
    VLLMServer,
)
from grail_lightning.core.engines.requests import sampling_parameters
from grail_lightning.core.functional.advantages import beta_scale
from grail_lightning.core.functional.policy_gradient import sampler_correction
from grail_lightning.core.metrics import PassAtK
from grail_lightning.functional import (
    aggregate,
    clipped_surrogate,
    group_advantages,
    maj_at_k,
    pass_at_k,
    token_logprobs,
)
from grail_lightning.worlds.charts.task import ChartSpace
from tests.steps import configured

ONE = torch.ones(1, 1)
HALF, COUNT = torch.tensor([0.5]), torch.tensor([1])


def sampling(**options):
    return Sampling(**{"max_response_length": 8} | options)


def server(**options):
    return VLLMServer(**{"urls": ["http://localhost:1"]} | options)


def surrogate(**options):
    return clipped_surrogate(ONE, ONE, ONE, **options)


def options(**given):
    return configured(given)


NO_ADDRESS = (
    "127.0.0.1:8000",
    "ftp://host:1",
    "http://",
    "http://a:80000",
    "http://a:8000?key=1",
    "http://me:secret@a:8000",
)
FINITE = ("kl_coefficient", "entropy_coefficient", "max_grad_norm", "clip_low", "ratio_cap", "sampler_cap")
REFUSED = [
    (sampling, {"max_response_length": 0}, r"`max_response_length` must lie in \[1, inf\), but got 0"),
    *(
        (sampling, {"temperature": value}, r"`temperature` must lie in \[0, inf\)")
        for value in (-1.0, math.nan, math.inf)
    ),
    *((sampling, {"top_p": value}, "`top_p` must lie in") for value in (math.nan, 0.0)),
    (sampling, {"top_k": -1}, r"`top_k` must lie in \[0, inf\)"),
    (sampling, {"stop": "###"}, "must be a list of strings"),
    (sampling, {"stop": ("###", "")}, r"strings of at least one character, but got \['###', ''\]"),
    # The step.
    (options, {"group_size": 1}, r"`execution.group_size` must lie in \[2, inf\), but got 1"),
    (options, {"split_groups": True}, "`execution.mini_batches` must be at least 2 with `execution.split_groups`"),
    (options, {"token_budget": 0}, r"`execution.token_budget` must lie in \[1, inf\), but got 0"),
    (options, {"kl_coefficient": -1.0}, r"`objective.kl_coefficient` must lie in \[0, inf\), but got -1.0"),
    (options, {"max_grad_norm": 0.0}, r"`execution.max_grad_norm` must lie in \(0, inf\), but got 0.0"),
    (options, {"clip_low": 2.0}, "`clip_low` must lie in"),
    (options, {"clip_high": math.nan}, "`clip_high` .* but got .*nan"),
    *(
        (options, {name: value}, rf"`((objective|execution)\.)?{name}` .* but got .*{value}")
        for name in FINITE
        for value in (math.nan, math.inf)
    ),
    *((GroupMean, {"share": value}, r"`advantage.share` must lie in \[0, 1\]") for value in (-0.1, 1.1, math.nan)),
    *((kind, {"share": 2.0}, r"`advantage.share` must lie in \[0, 1\]") for kind in (BNPO, BatchNormalised)),
    *(
        (kind, {"scale": "bnpo"}, "`advantage.scale` must be one of")
        for kind in (GroupMean, LeaveOneOut, EnergyBaseline)
    ),
    *(
        (GroupMean, {"train_equal": True, **more}, r"needs an `advantage\.share` below 1")
        for more in ({}, {"share": 0.5, "scale": "group"})
    ),
    (SDPG, {"coefficient": 0.0}, r"`objective.coefficient` must lie in \(0, inf\), but got 0"),
    (SDPG, {"sentence": "Look."}, r"`objective.sentence` must contain \{answer\}, .* 'Look.'"),
    (
        ChartSpace,
        {"min_elements": 5, "max_elements": 4},
        "3 <= min_elements <= max_elements <= 5 and `asks` from largest",
    ),
    (ChartSpace, {"asks": []}, "3 <= min_elements <= max_elements <= 5 and `asks`"),
    (ChartSpace, {"asks": ["mean"]}, "3 <= min_elements <= max_elements <= 5 and `asks`"),
    (EpisodeLimits, {"max_turns": 0}, "`limits.max_turns` must be positive, but got 0"),
    (CodeTask, {"explained": "body"}, "`explained` must be one of return, program, but got 'body'"),
    (CodeTask, {"shown_tests": -1}, "`shown_tests` must be 0 or more, but got -1"),
    # Functions.
    (surrogate, {"surrogate": "cispo", "ratio_cap": 3.0}, "`ratio_cap` must be null with `surrogate` cispo, but got 3"),
    (surrogate, {"surrogate": "ppo"}, "`surrogate` must be clip or cispo, but got .ppo."),
    (surrogate, {"ratio_cap": 1.1}, r"`ratio_cap` must be finite and at least 1 \+ clip_high = 1.28, but got 1.1"),
    (lambda: sampler_correction(ONE, ONE, cap=0.5), {}, r"`sampler_cap` must be finite and at least 1, but got 0.5"),
    (
        lambda: aggregate(ONE, ONE.bool(), "bnpo", num_rollouts=2, num_tokens=4, max_response_length=8),
        {},
        "grpo, dr_grpo, dapo, but got 'bnpo'",
    ),
    (lambda: group_advantages(torch.ones(3), 1), {}, "`group_size` must be at least 2, but got 1"),
    (lambda: beta_scale(HALF, -HALF), {}, r"lies in \[0, 1\], but got -0.5.*`scale: group`"),
    (lambda: beta_scale(HALF, 3 * HALF), {}, r"lies in \[0, 1\], but got 1.5.*`scale: group`"),
    (lambda: token_logprobs(ONE, lambda x: x, COUNT, temperature=0), {}, "`temperature` must be positive, but got 0"),
    (lambda: pass_at_k(4, COUNT, 8), {}, "pass@8 needs at least 8 samples a problem, but got 4"),
    (lambda: pass_at_k(4, 5 * COUNT, 2), {}, "between 0 and"),
    (lambda: maj_at_k([0, 1], [True, False], 0), {}, "`k` must be at least 1"),
    (lambda: maj_at_k([0, 1], [True, False], 3), {}, "maj@3 needs at least 3 samples"),
    (lambda: PassAtK(k=4).update(ONE[0].bool(), COUNT), {}, "pass@4 needs at least 4 samples"),
    (PassAtK, {"k": 0}, "`k` must be at least 1, but got 0"),
    # Engines.
    (lambda: sampling_parameters(sampling(temperature=0.005), (), 0), {}, r"at least 0.01 with vLLM, but got 0.005"),
    (VLLMEngine, {"gpu_memory_utilization": 1.2}, r"`gpu_memory_utilization` must lie in \(0, 1\], but got 1.2"),
    (VLLMEngine, {"max_model_len": -5}, r"`max_model_len` must lie in \[1, inf\), but got -5"),
    (VLLMEngine, {"tensor_parallel_size": 0}, r"`tensor_parallel_size` must lie in \[1, inf\), but got 0"),
    (server, {"urls": []}, "^`urls` must be a list of at least one address"),
    (server, {"urls": "http://a:8000"}, "^`urls` must be a list of at least one address, but got 'http://a:8000'"),
    (server, {"urls": ["http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"]}, "^`urls` must hold each address once"),
    (server, {"patience_seconds": -1}, r"`patience_seconds` must lie in \[0, inf\), but got -1"),
    (server, {"push_folder": "/nowhere"}, "`push_folder` must be a folder that trainer and servers see"),
    (server, {"urls": ["http://node3:8000"]}, "but got '/dev/shm' with http://node3:8000. Make it, on a file system"),
    *(
        (
            server,
            {"urls": [url]},
            rf"^`urls` must hold addresses such as http://127.0.0.1:8000, but got '{re.escape(url)}'",
        )
        for url in NO_ADDRESS
    ),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED, ids=lambda it: it if isinstance(it, str) else "")
def test_what_means_nothing_is_refused_by_name(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(**given)


@pytest.mark.parametrize("name", ["aggregation", "kl_estimator", "level", "surrogate"])
def test_choices_of_the_objective_are_checked_also_from_python(name):
    with pytest.raises(ValueError, match=rf"`objective.{name}` must be one of .*, but got 'other'"):
        GRPO(**{name: "other"})


def test_the_upper_clip_range_alone_may_be_infinite():
    assert GRPO(clip_high=math.inf).clip_high == math.inf


def test_a_number_of_numpy_is_a_number():
    assert sampling(top_k=np.int64(3), top_p=np.float32(0.5)).top_k == 3
    with pytest.raises(ValueError, match=r"`top_k` must lie in \[0, inf\), but got -1"):
        sampling(top_k=np.int64(-1))
