"""The real `test`, twice on the same problems, and the report of both."""

import csv
import io

import pytest
import torch

from grail_lightning.batch import Sampling
from grail_lightning.evaluation import read_samples
from grail_lightning.module import GrailModule
from grail_lightning.policy import load_policy
from grail_lightning.report.command import main
from tests.evaluation.tested import SAMPLING, run_test


@pytest.fixture(scope="module")
def tests(tmp_path_factory):
    """The packaged policy, one with disturbed weights, and the packaged one again at another temperature."""
    folder = tmp_path_factory.mktemp("tests")
    policy = load_policy("arithmetic")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    policy.save(folder / "policy")
    ours = GrailModule(str(folder / "policy"), sampling=SAMPLING)
    other = Sampling(max_response_length=40, temperature=0.5)
    for name, tested, sampling in (("plain", None, SAMPLING), ("disturbed", ours, SAMPLING), ("cold", None, other)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PL_GLOBAL_SEED", "2")
            run_test(folder / name, ours=tested, sampling=sampling, num_problems=40)
    return folder


def _right(folder):
    """The share of right samples of each problem."""
    found = {}
    for sample in read_samples(folder / "test" / "samples"):
        found.setdefault(sample.index, []).append(sample.correct)
    return {index: sum(right) / len(right) for index, right in found.items()}


def test_two_tests_of_the_same_problems_are_compared(tests, capsys):
    assert main([str(tests / "plain"), str(tests / "disturbed"), "--format=csv"]) == 0
    rows = {
        row["method"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out)) if row["figure"] == "acc@3"
    }
    shares = {name: _right(tests / name) for name in ("plain", "disturbed")}
    for name, share in shares.items():
        assert rows[name]["problems"] == "40"
        assert float(rows[name]["value"]) == pytest.approx(sum(share.values()) / 40)
    differences = [shares["disturbed"][k] - shares["plain"][k] for k in range(40)]
    assert any(differences)
    assert float(rows["disturbed"]["difference"]) == pytest.approx(sum(differences) / 40)
    assert 0 < float(rows["disturbed"]["p"]) <= 1


def test_two_tests_with_other_sampling_are_refused(tests, capsys):
    assert main([str(tests / "plain"), str(tests / "cold")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "differ in `sampling.temperature` (1.0, 0.5). Test them with the same config." in line
