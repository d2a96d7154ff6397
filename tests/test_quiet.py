"""A run says what its user needs, and nothing that nobody can do anything about."""

import logging
import warnings

import pytest

from tests.runs import batches, module, trainer
from tests.shell import SHORT, main


def test_a_run_says_nothing_of_advertisements_tpus_defaults_and_a_model_of_one_row(
    caplog, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    main(["fit", *SHORT, "--evaluation.at_start=false"])
    said = caplog.text + "".join(capsys.readouterr())
    for noise in ("Tip:", "litlogger", "TPU", "weights_only", "Trainable params"):
        assert noise not in said
    for needed in ("GPU available", "Wrote the policy (step 2)", "held-out accuracy"):
        assert needed in said


def test_lightnings_own_deprecation_still_needs_to_be_left_out():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", r"`isinstance\(treespec, LeafSpec\)", FutureWarning)
        with pytest.raises(FutureWarning, match="LeafSpec"):
            trainer(1).fit(module(), batches(1))
