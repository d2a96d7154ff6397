"""The statistics of benchmarks/credit_gradients.py, against gradients whose figures are known, and against loops."""

import math

import numpy as np
import pytest
import torch

from tests.benchmark_modules import BENCHMARKS, benchmark
from tests.tolerance import near

NUM_BATCHES = 6
ONCE = torch.ones(1, NUM_BATCHES, dtype=torch.float64)
LARGEST = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.9], dtype=torch.float64)


@pytest.fixture(scope="module")
def gradients():
    return benchmark("credit_gradients")


def figures(gradients, ours, uniform, draws=ONCE):
    """The columns, a list of one figure for each draw."""
    return {name: values.tolist() for name, values in gradients.figures(ours, uniform, draws).items()}


def test_noise_that_differs_between_two_halves_drops_out(gradients):
    """Each half adds noise of its own, which only the two halves' mean has: Adam's scale, but no power or signal."""
    mean, own = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.eye(NUM_BATCHES, dtype=torch.float64)
    none = torch.zeros_like(own)
    uniform = gradients.Gradients(each=torch.cat([mean.expand(NUM_BATCHES, -1), own, none, none], 1), largest=LARGEST)
    halves = (torch.cat([mean.expand(NUM_BATCHES, -1), own, *noise], 1) for noise in ((9 * own, none), (none, 9 * own)))
    both = gradients.Gradients(each=next(halves), again=next(halves), largest=LARGEST)
    found = figures(gradients, both, uniform)
    for name in ("direction", "gain, SGD", "gain, Adam", "size"):
        assert found[name] == near([1.0], 100)
    assert found["noise"] == near([1 / 25], 100)


def dot(one, other):
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def by_loops(ours, uniform, draw):
    """The columns of one draw, over its batches as a list in which a batch may stand several times."""
    drawn = [k for k, times in enumerate(draw) for _ in range(times)]

    def of_two(these, those):
        products = [dot(these[i], those[j]) for i in drawn for j in drawn if i != j]
        return math.fsum(products) / len(products)

    def scaled(rows):
        sizes = [math.sqrt(math.fsum(row[p] ** 2 for row in rows) / len(rows)) for p in range(len(rows[0]))]
        return [[value / size for value, size in zip(row, sizes, strict=True)] for row in rows]

    def rms(rows):
        return math.sqrt(math.fsum(dot(rows[k], rows[k]) for k in drawn) / len(drawn))

    own, base = ours.each.tolist(), uniform.each.tolist()
    return {
        "direction": of_two(own, base) / math.sqrt(of_two(own, own) * of_two(base, base)),
        "noise": rms(own) ** 2 / of_two(own, own) - 1,
        "size": rms(own) / rms(base),
        "gain, SGD": (of_two(own, base) / rms(own)) / (of_two(base, base) / rms(base)),
        "gain, Adam": of_two(scaled(own), base) / of_two(scaled(base), base),
        "one token": math.fsum(ours.largest.tolist()[k] for k in drawn) / len(drawn),
    }


def test_figures_of_each_draw_are_those_of_loops_over_its_batches(gradients):
    """A batch that is drawn twice is no pair with itself, and one that is not drawn counts for Adam's scale."""
    uniform = torch.randn(NUM_BATCHES, 9, dtype=torch.float64) + 2
    ours = gradients.Gradients(each=0.5 * uniform + torch.randn_like(uniform) + 1, largest=LARGEST)
    uniform = gradients.Gradients(each=uniform, largest=LARGEST.flip(0))
    draws = [[1, 1, 1, 1, 1, 1], [2, 0, 1, 1, 0, 2], [0, 3, 0, 1, 1, 1], [1, 2, 2, 0, 1, 0], [1, 0, 2, 0, 1, 0]]
    found = figures(gradients, ours, uniform, torch.tensor(draws, dtype=torch.float64))
    expected = [by_loops(ours, uniform, draw) for draw in draws]
    assert found == {name: near([one[name] for one in expected], 1000) for name in expected[0]}


def test_the_baseline_of_tree_and_energies_is_that_of_a_loop_over_prefixes():
    """Three rows begin alike, two go on alike, one is alone: each state's weighted mean, shrunk to the one before."""
    baselines = benchmark("credit_baselines")
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True], [True, False, False]])
    before = torch.tensor([[9, 0, 1], [9, 0, 1], [9, 0, 2], [9, 3, 3]])
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    weight = torch.rand(4, 3, dtype=torch.float64) + 0.5
    found = baselines.weighted_baseline(before, weight, mask, rewards)
    for row in range(4):
        value = None
        for t in range(int(mask[row].sum())):
            same = [j for j in range(4) if mask[j, t] and before[j, t] == before[row, t]]
            total = sum(float(weight[j, t]) for j in same)
            praised = sum(float(weight[j, t] * rewards[j]) for j in same)
            one = 0.0 if value is None else total / len(same)
            value = (praised + one * (value or 0.0)) / (total + one)
            assert float(found[row, t]) == near(value, 100)


@pytest.mark.parametrize(("world", "alike"), [("five_terms", 0.95), ("words", 0.95), ("search", 0.85), ("code", 0.94)])
def test_the_kept_values_are_those_of_the_kept_rollouts(world, alike):
    """A value is the chance of success: over many tokens it has the mean of the rewards, in either half."""
    values = benchmark("credit_values").read_values(BENCHMARKS / "values" / f"{world}.npz")
    known = ~np.isnan(values["value"][..., 0])
    assert (~np.isnan(values["best"][..., 1])).tolist() == known.tolist()
    value = values["value"].astype(float)
    excess = [
        (value[k][known[k]] - np.broadcast_to(rewards[:, None], known[k].shape)[known[k]][:, None]).mean(0)
        for k, rewards in enumerate(values["rewards"].astype(float))
    ]
    assert (np.abs(np.mean(excess, 0)) < 4 * np.std(excess, 0) / math.sqrt(len(excess))).all()  # Standard errors.
    assert np.corrcoef(value[known].T)[0, 1] > alike  # Of the two halves.


@pytest.mark.slow
def test_stored_rollouts_of_several_turns_are_played_again_and_a_turn_has_the_change_of_value(gradients):
    """Their ids and rewards are asserted where they are played."""
    module = benchmark("credit_values")
    values = module.read_values(BENCHMARKS / "values" / "search.npz")
    with module.open_lab(module.setting("search", 0, 16, 0)) as lab:
        (batch,) = lab.stored_rollouts(values, 1)
    _, (_, found) = gradients.of_values(values, 0.25)(0, batch, None)
    value = values["value"][0, ..., 1]
    expected = torch.zeros_like(found)
    for row, turns in enumerate(batch.turn.tolist()):
        begun = [float(v) for v in value[row] if not np.isnan(v)]
        for t in batch.response_mask[row].nonzero().flatten().tolist():
            expected[row, t] = [*begun[1:], float(batch.rewards[row])][turns[t]] - 0.25 * begun[turns[t]]
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_the_table_of_statements_is_printed(programs_run, monkeypatch, capsys):
    file = str(BENCHMARKS / "values" / "code.npz")
    options = ["--world", "code", "--prompts", "16", "--values", file, "--only", "Uniform", "EGCA, w_max"]
    monkeypatch.setattr("sys.argv", ["", *options])
    benchmark("credit_quality").main()
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines() if "|" in line]
    cells = {row[1]: dict(zip(rows[0], row, strict=True)) for row in rows}
    assert cells["Uniform"]["in rollout: slip"] == "0.50 ±0.00"
    found = {name: float(row["flawed"].partition(" ")[0]) for name, row in cells.items() if "±" in row["flawed"]}
    assert found["EGCA, w_max=1"] > 0.8 > 0.3 > found["Uniform"]
    assert float(cells["EGCA, w_max=1"]["rho (b): wrong"].partition(" ")[0]) > 0.5
