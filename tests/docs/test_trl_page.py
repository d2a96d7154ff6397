"""The page for users of TRL: its example runs, and the defaults that it compares are those of both."""

import inspect
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pandas
import pytest
import torch

from grail_lightning import DAPO, DrGRPO, EnvironmentTask, Execution, GroupMean, Loading, MathData, RewardSpec, Sampling
from grail_lightning.core.policy.load import load_policy
from tests.runs import problems
from tests.shell import main
from tests.test_episodes import played
from tests.tool_calling_policy import END

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "from_trl.md").read_text()
GROUPS = {
    "objective": DrGRPO,
    "advantage": GroupMean,
    "execution": Execution,
    "sampling": Sampling,
    "loading": Loading,
}


@pytest.fixture
def _beside_the_examples(tmp_path, monkeypatch):
    for file in (DOCS / "examples").glob("trl_*"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("trl_environment", "trl_program"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
def test_the_defaults_on_the_page_are_those_of_trl_and_ours():
    trl = pytest.importorskip("trl", minversion="1.16")
    theirs = trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    section = PAGE.partition("\n## Options\n")[2]
    rows = [re.findall(r"`([^`]+)`", line) for line in section.splitlines() if line.startswith("| `")]
    assert [len(row) for row in rows] == [4] * 4 + [3] * 9
    for name, *values in rows:
        option, default = (values[0], values[1]) if len(values) == 2 else (values[1], values[2])
        group, leaf = option.split(".")[1:]
        ours = inspect.signature(GROUPS[group]).parameters[leaf].default
        assert str(ours).lower() == default, option
        # The upper clip is the lower one where TRL's is None.
        value = theirs.epsilon if name == "epsilon_high" and theirs.epsilon_high is None else getattr(theirs, name)
        assert str(value).lower() == (values[0] if len(values) == 3 else default), name
    assert f"`max_completion_length` ({theirs.max_completion_length} in TRL)" in PAGE


ROWS = re.search(r"python -c '(import json; .*?)' > floors.jsonl", PAGE)[1]


@pytest.mark.filterwarnings("ignore:.*of the rollouts", "ignore:`data.prompts_per_batch` is")
@pytest.mark.usefixtures("_beside_the_examples")
def test_the_example_runs_from_its_config(capsys):
    capsys.readouterr()
    exec(ROWS, {})
    Path("floors.jsonl").write_text(capsys.readouterr().out)
    small = ["--model.policy=words", "--trainer.precision=32-true", "--trainer.max_steps=2", "--trainer.devices=1"]
    small += ["--data.prompts_per_batch=2", "--model.execution.group_size=2", "--model.sampling.max_response_length=32"]
    small += ["--trainer.callbacks+=KeepRollouts", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    main(["fit", "--config=trl_environment.yaml", *small])
    rollouts = pandas.concat(map(pandas.read_parquet, sorted(Path().rglob("step_*_rank_*.parquet"))))
    assert len(rollouts) == 2 * 2 * 2
    assert rollouts["prompt"].eq("user: Help me.").all()
    assert rollouts["transcript"].str.contains("You are on floor 0. Go to floor ").all()
    kept = [json.loads(columns)["function_rewards"] for columns in rollouts["columns"]]
    assert kept == [{"arrived": 0.0, "few_calls": None}] * 8


@pytest.mark.usefixtures("_beside_the_examples")
def test_a_sum_of_rewards_that_a_solution_may_not_reach_is_told():
    """A visitor on the right floor earns 1, less 0.05 for each call."""
    from trl_environment import House, arrived, few_calls

    paid = [arrived, RewardSpec(function=few_calls, weight=0.05)]
    row = {"prompt": [{"role": "user", "content": "Help."}], "target": 6}
    for options, rewards, told in (({}, paid, True), ({"solved_at": 0.5}, paid, False), ({}, paid[:1], False)):
        task = EnvironmentTask(House, rewards=rewards, **options)
        remark = task.check_prompts([task.prompt(row)])
        assert ("sum of `arrived`, `few_calls` of 1 on (`task.solved_at`)" in remark) == told
        assert task.check_prompts([task.prompt(row | {"answer": "6"})]) == ""


@pytest.mark.usefixtures("_beside_the_examples")
def test_the_example_pays_for_the_floor_and_for_few_calls():
    from trl_environment import House, arrived, few_calls, multiply

    paid = [arrived, RewardSpec(function=few_calls, weight=0.05)]
    task = EnvironmentTask(House, tools=[multiply], rewards=paid, calls="tags", tool_instruction="")
    texts = [
        ['<multiply>{"one": 2, "other": 3}</multiply>', "<climb>6</climb>", f"There.{END}"],
        ["<climb>30</climb>", f"Where?{END}"],
        [f"No.{END}"],
    ]
    batch = played([task] * 3, texts, [{"prompt": [{"role": "user", "content": "Help."}], "target": 6}])
    assert [[call.result for call in episode.calls] for episode in batch.episodes] == [
        ["6", "Floor 6."],
        ["Error: ValueError: There is no such floor."],
        [],
    ]
    assert batch.rewards.tolist() == pytest.approx([1 - 0.05 * 2, -0.05, 0.0])
    assert batch.correct.tolist() == [False, False, False], "0.9 is less than `solved_at`"


@pytest.mark.usefixtures("_beside_the_examples")
def test_the_program_of_the_page_makes_the_run_of_its_config():
    """Everything but `fit`, on a packaged policy."""
    program = Path("trl_program.py").read_text()
    Path("trl_program.py").write_text(program.replace("Qwen/Qwen3-0.6B", "words").replace("bf16-true", "32-true"))
    names = runpy.run_path("trl_program.py")
    data = names["data"]
    assert isinstance(data, MathData)
    (train,) = data.load("train")
    assert [prompt.columns["target"] for prompt in train.prompts] == list(range(1, 17))
    assert [*names["task"].tools.by_name] == ["multiply", "climb"]
    assert names["module"].objective == DAPO(clip_high=0.2, mask_truncated=False)
    assert names["module"].advantage.scale == "group"


@pytest.mark.usefixtures("_beside_the_examples")
@pytest.mark.filterwarnings("ignore")  # Of TRL, and of what it imports.
def test_the_first_script_of_trls_documentation_trains_with_token_credit(tmp_path):
    """The model and the dataset are others, since nothing is downloaded, and the run is cut to a step."""
    pytest.importorskip("trl", minversion="1.16")
    policy = load_policy("arithmetic")
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    policy.save(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": p.messages}], "solution": f"${p.reference}$"} for p in problems(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    program = Path("trl_credit.py").read_text()
    cut = (
        "GRPOConfig('out', use_cpu=True, bf16=False, report_to='none', max_steps=1, num_generations=4,"
        " per_device_train_batch_size=16, max_completion_length=48, save_strategy='no', logging_steps=1)"
    )
    for text, other in (
        ('"trl-lib/DeepMath-103K"', '"json", data_files="rows.jsonl"'),
        ('"Qwen/Qwen2.5-0.5B-Instruct"', '"model"'),
        ("credit=GRAIL(),", f"credit=GRAIL(), args={cut},"),
        ("from datasets", "from trl import GRPOConfig\nfrom datasets"),
    ):
        assert text in program
        program = program.replace(text, other)
    names = {}
    exec(compile(program, "trl_credit.py", "exec"), names)
    (figures,) = [row for row in names["trainer"].state.log_history if "reward" in row]
    assert figures["rewards/accuracy_reward/mean"] > 0
    assert figures["credit/weight_std"] > 0


@pytest.mark.usefixtures("_beside_the_examples")
def test_the_loop_of_ones_own_trains_with_run_credit(tmp_path):
    shutil.copy(DOCS / "examples" / "any_trainer.py", tmp_path)
    torch.manual_seed(0)
    names = runpy.run_path("any_trainer.py")
    mask, advantages, rewards = names["mask"], names["advantages"], names["rewards"]
    assert advantages.shape == mask.shape
    assert (advantages[~mask] == 0).all()
    assert (advantages[rewards < rewards.mean()][:, 0] < 0).any()
    assert advantages[advantages[:, 0] != 0].unique().numel() > 6
    assert len(names["history"]) == 4
