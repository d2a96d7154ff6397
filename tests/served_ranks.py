"""A short run on two CPU processes with a vLLM server."""

import torch

from grail_lightning import ArithmeticData, HFEngine, Sampling, VLLMServer
from grail_lightning.core.distributed.sharding import gathered
from grail_lightning.core.engines.vllm.client import all_of
from tests.processes import on_ranks
from tests.runs import Watch, module, problems, strategy_of, trainer

GREEDY = Sampling(max_response_length=32, temperature=0)


def assert_ranks_in_step(strategy, url):
    """Run it, and check that the ranks stay in step and sample with the weights of the policy."""
    reports = on_ranks(_run, strategy, url, timeout=600)
    assert [report["rank"] for report in reports] == [0, 1]
    assert reports[0]["texts"] != reports[1]["texts"], "each rank has its own prompts"
    assert reports[0]["weights"] == reports[1]["weights"]
    for report in reports:
        # Four batches and a validation, each after an update: no rank pushes by itself.
        assert report["pushes"] == 5
        assert report["versions"] == [reports[0]["versions"][0]]
        assert report["greedy"] == report["expected"]


def _run(strategy, url):
    engine = VLLMServer([url], patience_seconds=60)
    ours = module({"token_budget": 400}, engine=engine)
    data = ArithmeticData(num_train=64, num_val=5, prompts_per_batch=4, eval_prompts_per_batch=4)
    watch = Watch()
    run = trainer(4, watch, devices=2, strategy=strategy_of(strategy), num_sanity_val_steps=0)
    run.fit(ours, data)
    run.validate(ours, data, verbose=False)
    policy, expected = ours.policy, HFEngine()
    prompts = problems(4, seed=run.global_rank)
    engine.update_weights(policy)
    greedy = engine.generate(prompts, 1, GREEDY, seed=0).texts
    with gathered(policy), torch.no_grad():
        expected.update_weights(policy)
        texts = expected.generate(prompts, 1, GREEDY, seed=0).texts
        weights = [p.detach().double().square().sum().item() for p in policy.parameters()]
    workers = engine._await(all_of(server.workers() for server in engine._servers))
    report = {
        "rank": run.global_rank,
        "texts": watch.outputs[-1].batch.texts,
        "weights": weights,
        "pushes": engine._pushes,
        "versions": sorted({worker["version"] for server in workers for worker in server}),
        "greedy": greedy,
        "expected": texts,
    }
    engine.close()
    return report
