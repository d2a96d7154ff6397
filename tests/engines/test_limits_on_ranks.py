"""Ranks that are synchronised may sample with different limits, and with no rows at all, as continuations do."""

import json

from tests.processes import run_script

TWO_RANKS = """
import json, os, sys, warnings
import torch, torch.distributed as dist
warnings.filterwarnings("ignore")
from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.policy import load_policy
from tests.runs import problems

torch.set_num_threads(1)
rank, store = int(os.environ["RANK"]), sys.argv[1]
policy = load_policy("arithmetic")
passes = []
policy.model.register_forward_pre_hook(lambda *_: passes.append(1))

def sample(method, limit, number):
    passes.clear()
    engine = HFEngine(method=method)
    engine.update_weights(policy)
    sampled = engine.generate(problems(number, seed=limit), 2, Sampling(max_response_length=limit), seed=1)
    return sampled.response_ids.tolist(), len(passes)

# Each rank's limit and problems, of which a rank may have none. The first rank always has the larger limit.
calls = [[(30, 2), (9, 2)], [(30, 3), (12, 0)], [(8, 0), (7, 2)]]
methods = ("compact", "generate")
alone = {method: [sample(method, *call[rank]) if call[rank][1] else None for call in calls] for method in methods}
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
together = {method: [sample(method, *call[rank]) for call in calls] for method in methods}
print(json.dumps({
    method: {
        "same": [a is None or a[0] == b[0] for a, b in zip(alone[method], together[method])],
        "alone": [None if a is None else a[1] for a in alone[method]],
        "passes": [number for _, number in together[method]],
    } for method in methods
}))
dist.destroy_process_group()
"""


def test_each_rank_draws_what_it_draws_alone_in_equally_many_passes(tmp_path):
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    printed = run_script(tmp_path / "ranks.py", tmp_path / "store", ranks=2, timeout=90)
    for method in ("compact", "generate"):
        first, second = (json.loads(rank.stdout.splitlines()[-1])[method] for rank in printed)
        assert first["same"] == second["same"] == [True] * 3
        assert first["passes"] == second["passes"]
        assert first["alone"][0] > second["alone"][0], "the case must make one rank wait"
        if method == "compact":  # Transformers' loop waits for the end of the row that stands in for none.
            assert (first["passes"][1], second["passes"][2]) == (first["alone"][1], second["alone"][2])
