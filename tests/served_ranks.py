"""A short run on two CPU processes with a vLLM server, printed as JSON by each; tests/vllm/test_server.py starts it.

python tests/served_ranks.py ddp|fsdp2 URL
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from grail_lightning.batch import Sampling
from grail_lightning.data import ArithmeticData
from grail_lightning.distributed.sharding import gathered
from grail_lightning.engines import HFEngine, VLLMServer
from tests.runs import Watch, module, problems, trainer

GREEDY = Sampling(max_response_length=32, temperature=0)


def main(strategy, *urls):
    torch.set_num_threads(1)
    engine = VLLMServer(list(urls), patience_seconds=60)
    ours = module({"token_budget": 400}, engine=engine)
    data = ArithmeticData(num_train=64, num_val=5, prompts_per_batch=4, eval_prompts_per_batch=4)
    watch = Watch()
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(4, watch, devices=2, strategy=sharded if strategy == "fsdp2" else strategy, num_sanity_val_steps=0)
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
    statuses = [server.status() for server in engine._servers]
    report = {
        "rank": run.global_rank,
        "texts": watch.outputs[-1].batch.texts,
        "weights": weights,
        "pushes": engine._pushes,
        "versions": sorted({status.version for status in statuses}),
        "greedy": greedy,
        "expected": texts,
    }
    print("\n" + json.dumps(report), flush=True)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
