"""Several ranks under accelerate: the advantages and weights of two processes are those of one."""

import json
import os
import warnings

import pytest
import torch

from tests.processes import on_ranks
from tests.tolerance import assert_near
from tests.trl_trainers import OF_TRL

pytestmark = [*OF_TRL, pytest.mark.slow]


def _run(folder, methods, ranks, sharded):
    """Advantages of each generation, and the weights after two steps, of this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"} if ranks > 1 else {}
    if sharded:
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
        }  # fmt: skip
    import grail_lightning.credit as credits
    from grail_lightning.core.runtime.collectives import whole_tensor
    from tests.runs import graded_rollouts
    from tests.trl_trainers import TokenCreditGRPOTrainer, handing_over, rows_of, trainer_of

    whole = graded_rollouts(4, seed=2)
    own = torch.arange(16).reshape(ranks, -1)[int(os.environ.get("RANK", "0"))]
    batch = whole.select(own)
    results = {}
    for name in methods:
        made = trainer_of(
            folder, TokenCreditGRPOTrainer, **handing_over(batch), credit=getattr(credits, name)(),
            rows=rows_of([whole.prompts[k] for k in range(0, 16, 4)]),
            args={"per_device_train_batch_size": 16 // ranks, "max_steps": 2, "seed": 0, "max_grad_norm": 0.0,
                  "optim": "sgd", "learning_rate": 0.1},
        )  # fmt: skip
        before, kept = {n: p.detach().clone() for n, p in made.model.named_parameters()}, []
        score = made._generate_and_score_completions

        def keeping(inputs, score=score, kept=kept):
            output = score(inputs)
            kept.append(output["advantages"].tolist())
            return output

        made._generate_and_score_completions = keeping
        made.train()
        model = made.accelerator.unwrap_model(made.model)
        moves = {n: (whole_tensor(p) - before[n]).flatten()[:50].tolist() for n, p in model.named_parameters()}
        logged = [row for row in made.state.log_history if "credit/ess_ratio" in row]
        figures = [{k: v for k, v in row.items() if k.startswith("credit/")} for row in logged]
        results[name] = {"advantages": kept, "moves": moves, "figures": figures}
    return json.dumps(results)


def assert_same(methods, folder, sharded):
    (alone,) = map(json.loads, on_ranks(_run, folder / "one", methods, 1, False, ranks=1, timeout=900))
    both = [json.loads(made) for made in on_ranks(_run, folder / "two", methods, 2, sharded, ranks=2, timeout=900)]
    for name in methods:
        one, parts = alone[name], [made[name] for made in both]
        for step in range(2):
            expected = torch.tensor(one["advantages"][step])
            found = [torch.tensor(part["advantages"][step]) for part in parts]
            for rank, rows in enumerate(found):
                width = min(rows.shape[1], expected.shape[1])
                assert_near(rows[:, :width], expected[8 * rank : 8 * rank + 8, :width], 3000, torch.float32)
        scale = max(max(map(abs, values)) for values in one["moves"].values())
        assert scale > 1e-4, "the weights move"
        for part in parts:
            assert part["figures"][0].keys() == one["figures"][0].keys()
            for figure, value in one["figures"][0].items():
                assert figure == "credit/seconds" or part["figures"][0][figure] == pytest.approx(value, rel=1e-3)
            for weight, values in one["moves"].items():
                assert_near(torch.tensor(part["moves"][weight]), torch.tensor(values), 3000, torch.float32, scale)


def test_two_ranks_have_the_advantages_weights_and_figures_of_one(tmp_path):
    assert_same(["GRAIL", "TreeAdvantage", "HighEntropy"], tmp_path, sharded=False)


def test_two_ranks_of_fsdp2_have_the_advantages_of_one(tmp_path):
    assert_same(["GRAIL", "TreeAdvantage"], tmp_path, sharded=True)
