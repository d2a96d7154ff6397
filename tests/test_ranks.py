"""Two CPU processes: replicated (DDP) and fully sharded (FSDP2) weights do the same."""

import json
from functools import cache

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grail_lightning import BNPO, GDPO, BatchNormalised, DrGRPO, EnergyBaseline, GroupMean, LeaveOneOut, Sampling
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.assign import compute_advantages
from tests.batches import graded
from tests.processes import group, on_ranks
from tests.runs import problems, sampled
from tests.runs_on_ranks import interrupted, strategies
from tests.same_rollouts import figures, run_cases
from tests.shell import main
from tests.steps import context_for, sums, update_of
from tests.tolerance import near, roundings

# What the tests below ask of one script, so that one pair of processes runs it all; slow ones run by themselves.
REPLICATED = ("GRAIL", "AdvantageReweighting-energy", "GRAIL-half", "Uniform-cut-split")
TOGETHER = {
    (run_cases, "one"): REPLICATED,
    (run_cases, "ddp"): REPLICATED,
    (run_cases, "fsdp2"): ("GRAIL", "AdvantageReweighting-energy-once", "GRAIL-cut-once", "GRAIL-own-cut-once"),
}


@cache
def _reports(script, strategy, cases):
    ranks = 1 if strategy == "one" else 2
    how = [ranks] if script is strategies else []
    reports = on_ranks(script, *how, strategy, *cases, ranks=ranks, timeout=300 + 60 * len(cases))
    for number, of_rank in enumerate(reports):
        assert [report["rank"] for report in of_rank] == [number] * len(cases)
    return dict(zip(cases, zip(*reports, strict=True), strict=True))


def _run(strategy, case, script=run_cases):
    """The reports of the ranks on a case of the script."""
    together = TOGETHER.get((script, strategy), ())
    return _reports(script, strategy, together if case in together else (case,))[case]


LIMIT = 36
KL = [{}] + [
    {"kl_coefficient": 0.1, "kl_estimator": name, "kl_corrected": corrected}
    for name in ("k1", "k2", "k3")
    for corrected in (True, False)
]
# Every KL, every estimator of the advantage and every aggregation; some pairs of them.
AGGREGATIONS = ("grpo", "dr_grpo", "dapo")
ESTIMATORS = [
    GroupMean(),
    EnergyBaseline(scale="group"),
    GroupMean(scale="batch", share=0.5),
    BNPO(),
    LeaveOneOut(scale="batch"),
    BatchNormalised(),
    GDPO(),
]
OBJECTIVES = [
    kl | {"aggregation": AGGREGATIONS[k % 3], "estimator": estimator}
    for k, (kl, estimator) in enumerate(zip(KL, ESTIMATORS, strict=True))
]


def _gradient(policy, reference, batch, weights, options):
    """Of all weights, end to end, as DDP has it: the mean over the ranks; the loss, and the number of micro-batches."""
    options = dict(options)
    estimator, objective = options.pop("estimator"), DrGRPO(aggregation=options["aggregation"], mask_truncated=True)
    batch = compute_advantages(batch, 4, estimator, objective, policy, context_for(policy, 200, step=0))
    policy.zero_grad()
    frozen, numbers = reference if "kl_coefficient" in options else None, []
    how = {"limit": LIMIT, "token_budget": 200, "share_prefixes": False}
    update = update_of(policy, batch, weights, frozen, **how, **options)
    metrics = update.accumulate(0, lambda loss, last: numbers.append(loss.backward())).figures()
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(found)
        found /= 2
    return found, metrics["loss"], len(numbers)


def _compare():
    """Of each objective: how far the gradient of both ranks is from that of one process, the losses, and the passes.

    One rank has a group of rollouts, the other two, of which one is dead.
    """
    policy, reference = load_policy("arithmetic").double().train(), load_policy("arithmetic", trainable=False).double()
    for p in reference.parameters():
        p.data *= 1.01
    batch = sampled(policy, problems(3), 4, Sampling(max_response_length=LIMIT), seed=1)
    batch = graded(batch, torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0], dtype=torch.float64))
    weights = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(3)).double() + 0.5
    alone = [_gradient(policy, reference, batch, weights, options) for options in OBJECTIVES]
    report = []
    with group() as rank:
        rows = torch.arange(4, 12) if rank else torch.arange(4)
        mine = batch.select(rows)
        weights = weights[rows, : mine.response_mask.shape[1]]
        for options, (expected, loss, _) in zip(OBJECTIVES, alone, strict=True):
            found, ours, number = _gradient(policy, reference, mine, weights, options)
            gap = ((found - expected).abs().max() / expected.abs().max()).item()
            report.append({"gap": gap, "loss": [ours, loss], "backward": number})
    return report


def test_gradients_of_two_ranks_are_those_of_one_for_every_objective():
    """Uneven shares, so that the ranks cut different micro-batches."""
    for options, first, second in zip(OBJECTIVES, *on_ranks(_compare), strict=True):
        assert max(first["gap"], second["gap"]) <= roundings(64, torch.float32), options  # Norms run in it.
        assert first["loss"][0] == near(first["loss"][1], 64, torch.float32, scale=1.0)
        assert first["backward"] == second["backward"], "ranks must stay in step"


@pytest.mark.parametrize(
    "credit", ["GRAIL", *(pytest.param(c, marks=pytest.mark.slow) for c in ("DGPO", "OARGradient"))]
)
def test_sharded_weights_train_as_replicated_ones_do(credit):
    replicated, sharded = (_run(kind, credit, strategies) for kind in ("ddp", "fsdp2"))
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours["texts"] == theirs["texts"]
        assert ours["weights"] == near(theirs["weights"], 64 if credit == "OARGradient" else 16, torch.float32)
        # OAR-G differentiates the KL of a noise of 1e-3, of which float32 keeps a few digits.
        number = 10_000 if credit == "OARGradient" else 1000
        assert ours["metrics"] == near(theirs["metrics"], number, torch.float32, scale=0.01)


def test_ranks_sample_different_responses_and_agree_on_weights_and_metrics():
    first, second = _run("ddp", "GRAIL", strategies)
    assert first["texts"] != second["texts"]
    assert first["weights"] == second["weights"]
    assert "credit/eligible" in first["metrics"]
    for name in first["metrics"]:
        assert first["metrics"][name] == near(second["metrics"][name], 16, torch.float32), name


# The second balanced, and with the energies of all ranks in its baseline; the last with one deal of rows for all ranks.
QUICK = ("GRAIL", "AdvantageReweighting-energy", "Uniform-cut-split", "AdvantageReweighting-energy-once")
# The largest difference, of what a weight moved. OAR-G differentiates the KL of a noise of 1e-3: where trees are cut
# differently the rounding of norms, which run in float32, comes up to half a percent. Row by row all digits agree.
TOLERANCES = {
    ("ddp", "OARGradient"): roundings(16, torch.float32),
    ("fsdp2", "OARGradient"): 0.2,
    ("ddp", "PRIME"): roundings(1000, torch.float32),
    **{("ddp", credit): roundings(100, torch.float32) for credit in ("Uniform", *QUICK[:3])},
    **{("fsdp2", credit): 1e-3 for credit in ("GRAIL", "Uniform", "PRIME", "AdvantageReweighting-energy-once")},
}


@pytest.mark.parametrize(
    ("strategy", "credit"),
    [pytest.param(*case, marks=[] if case[1] in QUICK else pytest.mark.slow) for case in TOLERANCES],
)
def test_three_steps_on_two_ranks_end_on_the_weights_of_one_process(strategy, credit):
    """Plain SGD, so that a wrong scale shows; uneven lengths, a rank with dead groups only, a rank without a box.

    With PRIME, the weights of its own model, too; it is none of DDP's.
    """
    case = f"{credit}-apart" if (strategy, credit) == ("ddp", "OARGradient") else credit
    (alone,), ranks = _run("one", case.removesuffix("-once")), _run(strategy, case)
    assert alone["live"] == [16, 8, 16]
    assert sorted(rank["live"][1] for rank in ranks) == [0, 8]
    assert bool(alone["second"]) == (credit == "PRIME")
    start = figures(load_policy("arithmetic").parameters())
    tolerance = TOLERANCES[strategy, credit]
    # And of the weights themselves, which are around 1, where they are held in float32.
    rounding = roundings(2, torch.float32) if strategy == "fsdp2" else 0.0
    for rank in ranks:
        assert rank["synchronised"] == (0 if strategy != "ddp" else 6 if "cut" in credit else 3)  # Once a step.
        assert rank["micro_batches"] > 3
        if strategy == "fsdp2" and credit in QUICK:
            # Of four blocks and the root: with each micro-batch, or once a step.
            assert (rank["reductions"] == 5 * 3) == credit.endswith("-once")
        assert rank["loss"] == near(alone["loss"], 1000, torch.float32, scale=0.01)
        for which in ("weights", "second") if credit == "PRIME" else ("weights",):
            for ours, theirs, begun in zip(rank[which], alone[which], start, strict=True):
                moved = max(abs(a - b) for a, b in zip(theirs, begun, strict=True))
                assert moved > 0
                gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
                assert gap <= tolerance * moved + rounding, which
    if credit.endswith("-once"):
        assert sum(rank["embedded"] for rank in ranks) < 1.05 * alone["embedded"], "common beginnings are run once"


@pytest.mark.parametrize("how", [pytest.param("recomputed", marks=pytest.mark.slow), "cut-once"])
def test_saliency_of_sharded_weights_is_the_same_beside_the_update(how):
    """Rows that are trained at once and rows that are frozen first; a rank that has no row with saliency."""
    apart, beside = _run("fsdp2", f"GRAIL-own-{how}"), _run("fsdp2", f"GRAIL-{how}")
    begun = np.concatenate(figures(load_policy("arithmetic").parameters()))
    for figure in ("reductions", "gatherings"):
        assert beside[0][figure] == beside[1][figure] > 0, "ranks must stay in step"
    for ours, theirs in zip(beside, apart, strict=True):
        assert ours["eligible"] == theirs["eligible"]
        assert ours["loss"] == near(theirs["loss"], 10_000, torch.float32, scale=0.01)
        found, expected = (np.concatenate(report["weights"]) for report in (ours, theirs))
        assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected - begun)
    assert sum(r["embedded"] for r in beside) < sum(r["embedded"] for r in apart)


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["GRAIL", "PRIME"])
def test_an_interrupted_run_of_sharded_weights_ends_on_those_of_a_whole_one(credit, tmp_path):
    """To the bit: the optimiser's state comes back from a checkpoint, and the export has the same weights."""
    reports = on_ranks(interrupted, 2, tmp_path, credit)
    assert [report["rank"] for report in reports] == [0, 1]
    begun = sums(load_policy("arithmetic").parameters())
    for report in reports:
        for figure in ("texts", "norms", "weights", "second"):
            assert report[figure]["resumed"] == report[figure]["whole"], figure
        assert bool(report["second"]["whole"]) == (credit == "PRIME")
        assert report["second"]["whole"] != begun
        assert report["norms"]["resumed"] > 0
        assert report["weights"]["resumed"] != begun
    assert sums(load_policy(str(tmp_path / "export")).parameters()) == near(reports[0]["weights"]["resumed"], 64)


def test_masters_of_bfloat16_weights_are_the_same_on_two_ranks_and_move_as_those_of_one_process():
    """Micro-batches are cut differently and rounded to 8 bits each, so single weights differ; a wrong scale shows."""
    (alone,), ranks = (_run(strategy, "GRAIL-half") for strategy in ("one", "ddp"))
    begun = figures(load_policy("arithmetic").bfloat16().parameters())
    assert ranks[0]["weights"] == ranks[1]["weights"]
    start, theirs, ours = (np.concatenate(weights) for weights in (begun, alone["weights"], ranks[0]["weights"]))
    moved, also = theirs - start, ours - start
    assert also @ moved / (moved @ moved) == pytest.approx(1, abs=0.1)
    assert np.linalg.norm(also - moved) < 0.5 * np.linalg.norm(moved)


# Their collectives: none, the entropies of all ranks, sampling, the reference; and a sum over all ranks.
METHODS = [f"--model.credit={name}" for name in ("DGPO", "GRAIL", "HighEntropy", "Resampled")]
GIVEN = [
    {"problem": f"{k}+1", "answer": str(k + 1), "response": f"{k}+1={k + 1}\n\\boxed{{{k + k}}}"} for k in (1, 2, 3)
]


def _predict(*commands):
    for arguments in commands:
        main(["predict", *arguments])


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ModelParallelStrategy", marks=pytest.mark.slow)])
def test_predict_writes_every_rollout_where_the_last_batch_leaves_a_rank_without_a_prompt(strategy, tmp_path):
    """Of prompts that are sampled, and of texts that are given."""
    table = tmp_path / "given.jsonl"
    table.write_text("\n".join(map(json.dumps, GIVEN)))
    given = ["--data=MathData", f"--data.predict=[{{path: {table}}}]", "--data.train=[]", "--data.val=[]"]
    options = ["--config=configs/saliency.yaml", "--evaluation.num_samples=2", "--trainer.accelerator=cpu"]
    options += [*METHODS, "--model.control=SameMagnitude", "--trainer.enable_progress_bar=false"]
    options += ["--trainer.devices=2", f"--trainer.strategy={strategy}"]
    commands = [
        [*options, *data, "--data.eval_prompts_per_batch=2", f"--trainer.logger.init_args.save_dir={tmp_path / name}"]
        for name, data in (("sampled", ["--data.num_test=3"]), ("given", given))
    ]
    on_ranks(_predict, *commands, timeout=180)
    for name, number in (("sampled", 6), ("given", 3)):
        rows = pq.read_table(tmp_path / name / "saliency" / "predictions.parquet").to_pylist()
        assert len(rows) == number
        assert len({row["prompt"] for row in rows}) == 3
        assert len({row["group"] for row in rows}) == len({(row["group"], row["prompt"]) for row in rows}) == 3
