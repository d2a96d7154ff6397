"""Schedules and products of methods, and their names on the command line."""

import sys

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning.cli import GrailCLI
from grail_lightning.cli import main as entry_point
from grail_lightning.credit import GRAIL, UCAS, AdvantageReweighting, OARGradient, Product, SaliencyOptions, WarmUp
from tests.credit.rollouts import context, in_groups
from tests.tolerance import near


def test_warming_up_goes_from_uniform_to_full_strength(golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    inner = UCAS()(golden_policy, batch, context())
    for step, strength in ((0, 0.0), (3, 0.3), (10, 1.0), (99, 1.0)):
        found = WarmUp(UCAS(), steps=10)(golden_policy, batch, context(step=step))
        for row in range(6):
            for t in range(int(batch.response_lengths[row])):
                w, a = inner.values[row, t].item(), inner.additive[row, t].item()
                assert found.values[row, t].item() == near(1 + strength * (w - 1), 1000)
                assert found.additive[row, t].item() == near(strength * a, 1000)
        assert (found.values[~batch.response_mask] == 0).all()
        assert found.metrics["strength"] == strength


def test_a_warm_up_refreshes_as_its_inner_method_does():
    assert WarmUp(GRAIL(saliency=SaliencyOptions(refresh="update"))).refresh == "update"
    assert WarmUp(GRAIL()).refresh == "rollout"
    assert Product(GRAIL(), GRAIL(saliency=SaliencyOptions(refresh="update"))).refresh == "update"
    assert Product(GRAIL(), UCAS()).refresh == "rollout"


def test_a_product_multiplies_weights_and_adds_what_is_additive(golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    grail, reweighted, ucas = GRAIL(gate="all"), AdvantageReweighting(), UCAS()
    one, two, three = (credit(golden_policy, batch, context()) for credit in (grail, reweighted, ucas))
    found = Product(Product(grail, reweighted), ucas)(golden_policy, batch, context())
    for row, t in ((0, 0), (1, 5), (3, 100), (5, 140)):
        product = one.values[row, t].item() * two.values[row, t].item() * three.values[row, t].item()
        assert found.values[row, t].item() == near(product, 1000)
    assert torch.equal(found.additive, three.additive)
    doubled = Product(ucas, ucas)(golden_policy, batch, context())
    torch.testing.assert_close(doubled.additive, 2 * three.additive)
    assert Product(grail, reweighted)(golden_policy, batch, context()).additive is None
    assert torch.equal(found.fallback, one.fallback)
    assert found.fallback.any()
    assert found.metrics["first/first/eligible"] == one.metrics["eligible"]


def test_a_warm_up_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="`steps` must be at least 1, but got 0"):
        WarmUp(GRAIL(), steps=0)


def _built(monkeypatch, tmp_path, *options):
    """The credit that the command line builds; nothing is run."""
    seen = {}

    class Built(GrailCLI):
        def _run_subcommand(self, subcommand):
            seen["credit"] = self.model.credit

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grail_lightning.cli.GrailCLI", Built)
    monkeypatch.setattr("warnings.filterwarnings", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["grail-lightning", "fit", "--config=configs/quickstart.yaml", *options])
    entry_point()
    return seen["credit"]


@pytest.mark.parametrize(
    "name", ["OARPerturbation", "HighEntropy", "AdvantageReweighting", "LESS", "UCAS", "RLSD", "Uniform"]
)
def test_methods_are_found_by_their_short_names(name, monkeypatch, tmp_path):
    assert type(_built(monkeypatch, tmp_path, f"--model.credit={name}")) is getattr(credits, name)


def test_options_reach_the_method(monkeypatch, tmp_path):
    found = _built(
        monkeypatch,
        tmp_path,
        "--model.credit=OARPerturbation",
        "--model.credit.distribution=last",
        "--model.credit.bilevel.boost=3",
    )
    assert (found.distribution, found.bilevel.boost, found.bilevel.quantile) == ("last", 3.0, 0.4)


def test_a_warm_up_is_composed_on_the_command_line(monkeypatch, tmp_path):
    found = _built(
        monkeypatch,
        tmp_path,
        "--model.credit=WarmUp",
        "--model.credit.inner=GRAIL",
        "--model.credit.inner.w_max=3",
        "--model.credit.steps=7",
    )
    assert (type(found), found.steps, type(found.inner), found.inner.w_max) == (WarmUp, 7, GRAIL, 3.0)


def test_a_product_is_composed_in_a_file(monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        """
model:
  credit:
    class_path: Product
    init_args:
      first: {class_path: GRAIL, init_args: {gate: all}}
      second:
        class_path: WarmUp
        init_args: {inner: OARGradient, steps: 3}
"""
    )
    found = _built(monkeypatch, tmp_path, f"--config={tmp_path / 'mine.yaml'}")
    assert (type(found), found.first.gate, type(found.second.inner)) == (Product, "all", OARGradient)
