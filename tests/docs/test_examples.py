"""The examples of the documentation run as they stand, through the command line and on the packaged policies."""

import json
import os
import runpy
import shutil
import sys
import time
from pathlib import Path

import numpy
import pandas
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grail_lightning import GrailModule, MathTask, grade_answers
from grail_lightning.answers import Verifier
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.rollout.grading import labelled_steps
from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.isolation import Bubblewrap
from grail_lightning.worlds.programs.probe import refusal
from tests.runs import SAMPLING, problems
from tests.shell import fails, main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
RUN = Path("runs/example")


@pytest.fixture(autouse=True)
def _beside_the_examples(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for file in EXAMPLES.glob("*.py"):
        sys.modules.pop(file.stem, None)


CUT = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"]
CUT += ["--trainer.callbacks+=KeepRollouts", "--pictures.every_n_batches=0", "--data.prompts_per_batch=2"]
CUT += ["--model.execution.group_size=4", "--model.execution.mini_batches=1"]


def fit(name, *options):
    """The rollouts and the last figures of one small optimiser step of an example."""
    main(["fit", f"--config={name}.yaml", *CUT, *options])
    return pandas.read_parquet(RUN / "rollouts"), {tag: values[-1] for tag, values in curves().items()}


def curves():
    """What TensorBoard has of the run."""
    events = EventAccumulator(str(RUN)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# The examples that train: what stands on `small.yaml`.
TRAINED = [f.stem for f in sorted(EXAMPLES.glob("*.yaml")) if yaml.safe_load(f.read_text()).get("config")]


@pytest.mark.slow  # `test_notebook.py` trains with the same settings.
@pytest.mark.parametrize("name", TRAINED)
def test_an_example_learns_within_two_minutes_of_one_core(name, request):
    if name == "my_programs":
        request.getfixturevalue("programs_run")
    if name == "first_task":
        runpy.run_path("make_differences.py")
    start = time.process_time()
    main(["fit", f"--config={name}.yaml", "--trainer.enable_progress_bar=false"])
    accuracies = curves()["val/accuracy"]
    assert accuracies[-1] > accuracies[0] + 0.1
    assert time.process_time() - start < 120


def test_the_first_task_is_one_that_its_policy_knows_and_larger_numbers_are_answered_by_what_to_do(capsys):
    runpy.run_path("make_differences.py")
    rollouts, _ = fit("first_task")
    assert rollouts["prompt"].str.fullmatch(r"user: Compute \d(-\d){7}\.").all()
    assert "responses is right" not in capsys.readouterr().out
    larger = Path("make_differences.py").read_text().replace("randint(1, 9)", "randint(1, 20)")
    exec(compile(larger, "larger", "exec"), {})
    fit("first_task", "--trainer.logger.init_args.name=larger", "--responses.number=1")
    said = capsys.readouterr().out
    assert "None of 8 responses is right" in said or "Only " in said
    assert "`chains` knows sums and differences of five to ten numbers from 1 to 9" in said


def test_the_ten_lines_of_the_readme_train():
    lines = Path("ten_lines.py").read_text().split('"""')[2].strip().splitlines()
    assert len([line for line in lines if line]) <= 10
    short = "\n".join(lines).replace("num_val=256", "num_val=8").replace("max_steps=60", "max_steps=1")
    names = {"__name__": "__main__"}
    exec(compile(short, "ten_lines", "exec"), names)
    assert names["module"].trainer.global_step == 1


def test_the_problems_of_the_examples_are_those_of_the_generators(tmp_path):
    runpy.run_path(str(ROOT / "scripts" / "make_example_data.py"))["write"](tmp_path / "again")
    files = [file for file in (tmp_path / "again").rglob("*") if file.is_file()]
    assert len(files) == 6
    for file in files:
        assert file.read_bytes() == (EXAMPLES / file.relative_to(tmp_path / "again")).read_bytes()


def verdict_and_reward(task, row, text):
    """What a response to a row's prompt is worth."""
    prompt = task.prompt(row)
    with Verifier(num_workers=1) as verifier:
        verdicts = grade_answers([text], [prompt], verifier)
    return verdicts[0].status, task.reward([text], [prompt], verdicts)[0]


def test_a_task_of_ones_own_asks_its_question_and_pays_for_right_lines(capsys):
    rollouts, _ = fit("my_task")
    capsys.readouterr()
    runpy.run_path("read_rollouts.py")
    assert "num_tokens" in capsys.readouterr().out
    assert len(rollouts) == 2 * 4
    assert rollouts["prompt"].str.startswith("user: Compute ").all()
    from my_task import RunningTotals

    task, row = RunningTotals(), {"problem": "Compute 7+5-3.", "answer": "9", "terms": [7, 5, -3]}
    assert verdict_and_reward(task, row, "7+5=12\n12-3=9\n\\boxed{9}") == ("right", 1)
    assert verdict_and_reward(task, row, "7+5=12\n12-3=8\n\\boxed{8}") == ("wrong", 0.5 / 2)
    assert verdict_and_reward(task, row, "7+5=12\n12-3=9") == ("missing", 0.5)


def test_a_task_with_a_known_form_of_answers_takes_rewards_from_its_options():
    rollouts, figures = fit("my_answer_task")
    assert rollouts["prompt"].str.fullmatch(r"Compute \d([+-]\d){4}\.").all()
    terms = [json.loads(columns)["terms"] for columns in rollouts["columns"]]
    assert rollouts["reference"].tolist() == [str(sum(row)) for row in terms]
    assert figures["train/rewards/brevity/mean"] > 0
    from my_answer_task import SumOfTerms

    assert verdict_and_reward(SumOfTerms(), {"terms": [2, -6]}, r"2-6=-4, so \boxed{-4}") == ("right", 1)
    assert verdict_and_reward(SumOfTerms(), {"terms": [2, -6]}, "It is 4") == ("wrong", 0)


def test_a_task_labels_the_steps_of_its_rollouts():
    rollouts, _ = fit("my_labels")
    from my_labels import CheckedSums

    task, text = CheckedSums(), "So 7+5=13,\n13-3=10.\n-3-8=-11"
    prompt = task.prompt({"problem": "7+5-3", "answer": "9"})
    assert all(labelled_steps(response, prompt) for response in rollouts["response"])
    steps = labelled_steps(text, prompt)
    assert [(text[s.start : s.stop], s.kind, text[slice(*s.result)]) for s in steps] == [
        ("7+5=13", "slip", "13"),
        ("13-3=10", "sound", "10"),
        ("-3-8=-11", "sound", "-11"),
    ]


def test_one_option_says_that_an_answer_is_text():
    rollouts, _ = fit("my_text")
    assert rollouts["prompt"].str.endswith("?").all()
    options = yaml.safe_load(Path("my_text.yaml").read_text())["data"]["init_args"]["task"]["init_args"]
    from grail_lightning.answers import Marker

    task = MathTask(**(options | {"answer": Marker(**options["answer"]["init_args"])}))
    row = {"problem": "What is the capital of Norway?", "answer": "Oslo"}
    assert verdict_and_reward(task, row, "It is in the south.\n#### oslo")[0] == "right"
    assert verdict_and_reward(task, row, "#### Oslo or Bergen")[0] == "wrong"


def test_rewards_a_callback_and_a_credit_method_of_ones_own_in_one_run():
    credit = ["--model.credit=my_credit.Surprise", "--model.credit.top=3"]
    rollouts, figures = fit("my_callback", "--config=my_reward.yaml", *credit)
    brief = 1 / (1 + rollouts["num_tokens"] / 32)
    level = pandas.Series([json.loads(columns)["level"] for columns in rollouts["columns"]])
    hard = rollouts["correct"] & (level >= 3)
    assert rollouts["reward"].tolist() == pytest.approx((rollouts["correct"] + 0.1 * brief + 0.5 * hard).tolist())
    assert figures["train/rewards/brevity/mean"] == pytest.approx(brief.mean())
    for value, right in rollouts["correct"].groupby(level):
        assert figures[f"by_level/{value}"] == pytest.approx(right.mean())
    assert ("credit/wrong_answer_weight" in figures) == rollouts["status"].eq("wrong").any()
    assert 1 < figures["credit/weight_mean"] < 3


def test_the_share_of_tests_that_a_program_passes_is_paid(programs_run):
    rollouts, figures = fit("my_programs", "--data.num_train=8", "--data.num_val=8")
    assert set(rollouts["dataset"]) == {"functions"}
    paid = rollouts["reward"] - rollouts["correct"]
    assert paid[rollouts["correct"]].tolist() == pytest.approx([0.2] * int(rollouts["correct"].sum()))
    assert set((paid * 40).round(3)) <= set(range(9)), "eighths of 0.2"
    assert figures["train/rewards/tests_passed/mean"] == pytest.approx(5 * paid.mean())


def test_an_isolation_of_ones_own_runs_the_programs_of_a_run(programs_run):
    if reason := refusal(Bubblewrap()):
        pytest.skip(f"bubblewrap does not run programs here ({reason}); docs/reference/sandbox.md says what it needs")
    core = str(min(os.sched_getaffinity(0)))
    small = ["--data.num_train=8", "--data.num_val=8"]
    named = ["--data.task.isolation=my_isolation.OnCores", f"--data.task.isolation.cores={core}"]
    rollouts, _ = fit("my_programs", *small, *named)
    assert len(rollouts) == 2 * 4
    held = yaml.safe_load((RUN / "config.yaml").read_text())["data"]["init_args"]["task"]["init_args"]["isolation"]
    assert held == {"class_path": "my_isolation.OnCores", "init_args": {"cores": core}}
    from my_isolation import OnCores

    executor = Executor(OnCores(core))
    assert executor.printed("import os\nprint(os.sched_getaffinity(0))") == f"{{{core}}}\n"
    executor.close()


def test_a_reward_is_called_by_hand(capsys):
    runpy.run_path("by_hand.py", run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "right '2'"
    assert said[2] == f"[{1 + 0.1 / (1 + 6 / 1000)}]"


def test_a_mistake_in_a_credit_method_of_ones_own_is_told_and_others_keep_a_memory_or_have_a_service(capsys):
    small = ["--data.num_train=64", "--data.num_val=2"]
    said = fails(capsys, "fit", "--config=my_credit.yaml", *small, "--model.credit.top=0.5")
    assert "`top` must be at least 1" in said
    memory = ["--model.credit=my_memory.RememberedValues", "--model.credit.limit=50"]
    _, figures = fit("my_credit", *small, *memory)
    assert figures["credit/remembered"] == 50
    _, figures = fit("my_credit", *small, "--model.credit=my_service.ReMax")
    assert 0 <= figures["credit/greedy_reward"] <= 1
    said = fails(
        capsys, "fit", "--config=my_credit.yaml", *small, "--model.credit=my_service.ReMax", "--model.advantage=BNPO"
    )
    assert "`model.advantage` must be null with `ReMax`" in said


def test_an_estimator_of_the_advantage_of_ones_own_trains_beside_the_median(capsys):
    small = ["--data.num_train=64", "--data.num_val=2"]
    rollouts, _ = fit("my_advantage", *small)
    rewards = rollouts["reward"].to_numpy().reshape(-1, 8)
    medians = numpy.sort(rewards, axis=1)[:, 3]  # torch takes the lower one of two in the middle
    assert rollouts["advantage"].tolist() == pytest.approx((rewards - medians[:, None]).ravel().tolist())
    said = fails(capsys, "fit", "--config=my_advantage.yaml", *small, "--model.advantage=GroupMena")
    assert "Did you mean GroupMean" in said


@pytest.mark.slow
def test_an_objective_of_ones_own_scales_the_gradient_of_wrong_responses_alone():
    small = ["--data.num_train=64", "--data.num_val=2", "--model.credit=Uniform"]
    small += ["--model.execution.max_grad_norm=null"]
    share = ["--model.advantage=GroupMean", "--model.advantage.share=0"]  # Without it there would be praise, too.
    norms = {}
    for blame in ("1.0", "0.25"):
        for advantage in ((), share):
            _, figures = fit("my_objective", *small, f"--model.objective.blame={blame}", *advantage)
            norms[blame, bool(advantage)] = figures["policy/grad_norm"]
    assert norms["0.25", False] != pytest.approx(norms["1.0", False], rel=0.01)
    assert norms["0.25", True] == norms["1.0", True] > 0  # No response is blamed.


def test_a_data_module_of_ones_own_reads_csv_files():
    rollouts, _ = fit("my_data")
    assert set(rollouts["dataset"]) == {"train"}
    table = pandas.read_csv("csv/train.csv").set_index("question")["result"]
    results = [str(table[prompt.removeprefix("user: ")]) for prompt in rollouts["prompt"]]
    assert results == rollouts["reference"].tolist()


@pytest.mark.slow
def test_an_engine_of_ones_own_draws_from_the_policy(arithmetic):
    rollouts, figures = fit("my_engine")
    assert rollouts["num_tokens"].max() <= 40
    assert figures["policy/sampling/sampling_logp_difference/mean"] < 1e-5, "its log-probabilities are the trainer's"
    from my_engine import PlainEngine

    engine = PlainEngine()
    engine.update_weights(arithmetic)
    before = torch.random.get_rng_state()
    first, again, other = (engine.generate(problems(2), 3, SAMPLING, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.texts == again.texts != other.texts
    assert first.finished.any(), "the end token ends a response"
    with pytest.raises(ValueError, match="knows no `top_p`"):
        engine.generate(problems(1), 2, type(SAMPLING)(max_response_length=4, top_p=0.9), 1)


def test_predictions_are_read(capsys):
    options = ["--data.num_test=2", "--evaluation.num_samples=4", "--trainer.enable_progress_bar=false"]
    methods = ["--model.credit=GRAIL", "--predictions.compare+=OARGradient"]
    main(["predict", "--config=configs/saliency.yaml", *options, *methods])
    capsys.readouterr()
    runpy.run_path("read_predictions.py")
    assert "boxed" in capsys.readouterr().out
    runpy.run_path("read_methods.py")
    assert "weights.OARGradient" in capsys.readouterr().out


def test_kept_samples_are_read(capsys):
    options = ["--data.num_test=3", "--evaluation.num_samples=8", "--trainer.enable_progress_bar=false"]
    main(["test", "--config=configs/quickstart.yaml", *options])
    capsys.readouterr()
    runpy.run_path("read_samples.py")
    assert "arithmetic  0        0." in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_program_of_the_page_trains_on_given_rows():
    """Cut to one step; everything else is the text itself."""
    program, names = Path("from_python.py").read_text(), {}
    assert "max_steps=20" in program
    program = program.replace("max_steps=20", 'max_steps=1, accelerator="cpu"')
    fitted, predict, arguments = program.partition("trainer.predict")
    exec(compile(fitted, "from_python.py", "exec"), names)
    assert isinstance(names["module"], GrailModule)
    assert names["trainer"].global_step == 1
    figures = names["trainer"].callback_metrics
    assert 0 < figures["train/reward"] - figures["train/accuracy"] < 0.1, "the awaited reward adds its tenth"
    assert "val/accuracy" in figures
    given, trained = (dict(model.named_parameters()) for model in (load_policy("arithmetic").model, names["trained"]))
    assert any(not torch.equal(given[name], weight) for name, weight in trained.items())
    exec(predict + arguments, names)
    assert Path("runs/from_python/predictions.parquet").is_file()
