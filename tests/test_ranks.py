"""Two CPU processes: replicated (DDP) and fully sharded (FSDP2) weights do the same."""

import json
from functools import cache

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grail_lightning.policy import load_policy
from tests.grid_on_ranks import compare
from tests.processes import on_ranks
from tests.runs_on_ranks import interrupted, strategies
from tests.same_rollouts import figures, run_cases
from tests.shell import main
from tests.steps import sums
from tests.tolerance import assert_near, near, roundings

# What the tests below ask of one script, so that one pair of processes runs it all; slow ones run by themselves.
TOGETHER = {
    (run_cases, "one"): ("GRAIL", "OptimalBaseline-energy", "GRAIL-half", "Uniform-cut-split"),
    (run_cases, "ddp"): ("GRAIL", "OptimalBaseline-energy", "GRAIL-half", "Uniform-cut-split"),
    (run_cases, "fsdp2"): (
        *("GRAIL", "GRAIL-cut-once", "GRAIL-own-cut-once"),
        *("Uniform", "Uniform-apart-once", "OptimalBaseline-energy"),
    ),
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


def test_gradients_of_two_ranks_are_those_of_one_for_every_objective():
    """Each aggregation with each scaling and each KL; uneven shares, so that the ranks cut different micro-batches."""
    reports = on_ranks(compare)
    assert len(reports[0]) == 3 * 7
    for first, second in zip(*reports, strict=True):
        assert first["options"] == second["options"]
        assert max(first["gap"], second["gap"]) <= roundings(64, torch.float32), first["options"]  # Norms run in it.
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
QUICK = ("GRAIL", "OptimalBaseline-energy", "Uniform-cut-split")
# The largest difference, of what a weight moved. OAR-G differentiates the KL of a noise of 1e-3: where trees are cut
# differently the rounding of norms, which run in float32, comes up to half a percent. Row by row all digits agree.
TOLERANCES = {
    ("ddp", "OARGradient"): roundings(16, torch.float32),
    ("fsdp2", "OARGradient"): 0.2,
    ("ddp", "PRIME"): roundings(1000, torch.float32),
    **{("ddp", credit): roundings(100, torch.float32) for credit in ("GRAIL", "Uniform", *QUICK[1:])},
    **{("fsdp2", credit): 1e-3 for credit in ("GRAIL", "Uniform", "PRIME", "OptimalBaseline-energy")},
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
    (alone,), ranks = (_run(kind, case) for kind in ("one", strategy))
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
        assert rank["loss"] == near(alone["loss"], 1000, torch.float32, scale=0.01)
        for which in ("weights", "second") if credit == "PRIME" else ("weights",):
            for ours, theirs, begun in zip(rank[which], alone[which], start, strict=True):
                moved = max(abs(a - b) for a, b in zip(theirs, begun, strict=True))
                assert moved > 0
                gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
                assert gap <= tolerance * moved + rounding, which


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


def test_sharded_blocks_run_common_prefixes_once_and_gradients_travel_with_each_micro_batch_or_once_a_step():
    together, apart = _run("fsdp2", "Uniform"), _run("fsdp2", "Uniform-apart-once")
    units, steps = 4 + 1, 3  # Four blocks and the root.
    for ours, theirs in zip(together, apart, strict=True):
        assert 0 < ours["embedded"] < 0.9 * theirs["embedded"]
        assert ours["reductions"] > units * steps == theirs["reductions"]
        assert ours["loss"] == near(theirs["loss"], 1000, torch.float32, scale=0.01)
        ours, theirs = (torch.tensor(np.concatenate(report["weights"])) for report in (ours, theirs))
        assert_near(ours, theirs, 8, torch.float32)


@pytest.mark.parametrize(
    ("ranks", "credit"),
    [
        (1, "GRAIL"),
        pytest.param(2, "GRAIL", marks=pytest.mark.slow),
        pytest.param(2, "PRIME", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_of_sharded_weights_ends_on_those_of_a_whole_one(ranks, credit, tmp_path):
    """To the bit: the optimiser's state comes back from a checkpoint, and the export has the same weights."""
    reports = on_ranks(interrupted, ranks, tmp_path, credit, ranks=ranks)
    assert [report["rank"] for report in reports] == [*range(ranks)]
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
