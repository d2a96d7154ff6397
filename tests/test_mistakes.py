"""What users get wrong on the command line is one line; what is a fault of ours keeps its traceback."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grail_lightning._version import __version__
from grail_lightning.cli.app import FitOptions
from grail_lightning.cli.mistakes import EXTRAS
from tests.shell import SHORT, fails, main

ROOT = Path(__file__).parents[1]
OVERLONG = "--data.task.init_args.rewards=[{function: overlong, arguments: "


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def options():
    return FitOptions()


NO_OPTION = "There is no option `%s`.*Did you mean `%s`"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model.credit=GRIAL", "`model.credit` must be one of .*GRAIL, .* but got 'GRIAL'. Did you mean GRAIL"),
        ("--model.control=Shufled", "`model.control` must be one of AnswerOnly, Balanced, Random, SameMagnitude, Shuffled, "),
        ("--model.credit.wmin=1", NO_OPTION % ("model.credit.wmin", "model.credit.w_min")),
        ("--model.credit=TreeAdvantage --model.credit.outcome=length", "outcome` must be one of reward, .*'length'"),
        ("--trainer.gradient_clip_val=1", "Set `--model.execution.max_grad_norm` instead"),
        ("--trainer.enable_checkpointing=false", "but got False. .* `--checkpoint.save_top_k=0`"),
        ("--trainer.precision=16-mixed", "Use bf16-mixed, or 32-true"),
        ("--config=nowhere.yaml", "nowhere.yaml cannot be read: No such file"),
        ("--model.optimizer=nowhere.Adam", "`model.optimizer` needs nowhere, which is not installed. Is it"),
        ("--model.optimizer=Adamm", "`model.optimizer` must be one of .*AdamW.*'Adamm'. Did you mean Adam?"),
        ("--model.sampling.temperature=hot", "`model.sampling.temperature` must be float, but got 'hot'"),
        ("--model.optimizer.lr=abc", "`model.optimizer.lr` must be float or .*, but got 'abc'"),
        ("--model.optimizer.weight_deacy=1", NO_OPTION % ("model.optimizer.weight_deacy", ".*weight_decay")),
        ("--model.optimizer.betas=0.9", "`model.optimizer.betas` must be tuple, but got '0.9'"),
        ("--model.scheduler=StepLR", "`model.scheduler` must be given step_size"),
        ("--model.scheduler=ReduceLROnPlateau", "Multiple subclasses with name ReduceLROnPlateau"),
        ("--trainer.callbacks+=KeepRolouts", "`trainer.callbacks` must be one of .*Did you mean KeepRollouts"),
        ("--data=MathData --data.task=MathTask --data.task.answer=Markr", "`data.task.answer` must .* mean Marker"),
        ("--verbose=true", "no option `verbose`"),
        ("--checkpoint.train_time_interval=soon", "`checkpoint.train_time_interval` must .*'soon': .*h:m:s"),
        ("--model.credit=grail_lightning.credit.TokenCredit", "must be .*TokenCredit': Expected an instantiatable"),
        ("--data=MathData --data.task.rewards=[{function: correct}]", "`data.task` must be one of .* is abstract"),
        (
            "--trainer.callbacks+=LearningRateMonitor --trainer.callbacks.logging_interval=batch",
            "`trainer.callbacks.logging_interval` must be one of step, epoch or null, but got 'batch'",
        ),
        ("--model.pol=arithmetic", NO_OPTION % ("model.pol", "model.policy")),
        ("--model.objective.group_size=4", NO_OPTION % ("model.objective.group_size", "model.execution.group_size")),
        ("--throughput.window=0", "There is no option `throughput.window`.* `grail-lightning fit --help all` lists"),
        ("model.policy=arithmetic", "must begin with two dashes"),
        ("--model.objective.aggregation=ppo", "must be one of grpo, dr_grpo, dapo, but got 'ppo'"),
        ("--model.loading.lora={ranks: 3}", NO_OPTION % ("model.loading.lora.ranks", "model.loading.lora.rank")),
        ("--model.loading.lora=yes", "`model.loading.lora` must be .*, but got 'yes'"),
        (
            "--data=MathData --data.train={path: t, probelm: q}",
            NO_OPTION % ("data.train.probelm", "data.train.problem"),
        ),
        ("--data=MathData --data.train=[{path: t, limit: many}]", "^`data.train.limit` must be int or null, .*'many'"),
    ],
)
def test_the_message_about_an_option_names_it_and_what_is_accepted(arguments, message, options):
    with pytest.raises(ValueError, match=message) as refused:
        options.parse([*SHORT, *re.split(" (?=--)", arguments)])
    assert "Namespace" not in str(refused.value), "nothing of jsonargparse's own forms"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.sampling.max_response_length=100000"], "must leave room for a prompt in the 4096 positions"),
        (["--model.credit.w_min=9"], r"0 ≤ w_min ≤ w_max, but got 9.0 and 5.0"),
        (["--model.loading.dtype=float16"], "`loading.dtype` must not be float16 in training.* Use bfloat16"),
        (["--model.policy=./nowhere"], "`policy` './nowhere' cannot be loaded: .* Give a folder"),
        (["--model.policy=arithmetc"], "`policy` 'arithmetc' cannot be loaded: .* a packaged policy such as"),
        (["--ckpt_path=last"], "last.ckpt does not exist .*Train first"),
        (["--data=MathData", "--data.train.path=nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        ([f"{OVERLONG}{{limit: 100}}}}]"], "The reward `overlong` must get `arguments` .*missing 1 required"),
        ([f"{OVERLONG}{{limit: 100, buffer: 9}}}}]"], "`overlong` must begin below .*longest response, .* 44, but"),
        (["--evaluation.pass_at=[8]"], "must lie between 1 and `num_samples`"),
        (["--model.optimizer.lr=-1"], "`optimizer` cannot be used: Invalid learning rate: -1"),
        (["--model.optimizer=LBFGS"], "`optimizer` cannot be used: missing a required argument: 'closure'"),
        (
            ["--model.scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"],
            "`scheduler` cannot be used: missing a required argument: 'metrics'",
        ),
        (["--model.scheduler=OneCycleLR", "--model.scheduler.max_lr=1e-4"], "You must define either total_steps"),
        (["--model.loading.lora.rank=0"], "`loading.lora.rank` must be at least 1, but got 0"),
        (["--trainer.val_check_interval=0"], "`trainer.val_check_interval` must be positive, but got 0"),
        (["--model.execution.group_size=1"], "`execution.group_size` must be at least 2, but got 1"),
        (["--model.sampling.stop=['']"], "strings of at least one character"),
        (
            ["--trainer.strategy=ModelParallelStrategy", "--trainer.strategy.tensor_parallel_size=2"],
            "`tensor_parallel_size` 1, since layers are never split, but got 1 and 2",
        ),
    ],
)
def test_a_mistake_is_one_line_before_a_model_is_loaded(options, message, capsys, monkeypatch):
    monkeypatch.setattr(
        "grail_lightning.distributed.sharding.load_policy", lambda *_, **__: pytest.fail("a model was loaded")
    )
    assert re.search(message, fails(capsys, "fit", *SHORT, *options))


def test_a_missing_module_is_named_with_the_extra_that_installs_it(capsys, monkeypatch):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert EXTRAS.items() >= {("torchao", "torchao"), ("peft", "lora")}
    assert set(EXTRAS.values()) <= set(setup["options.extras_require"])
    monkeypatch.setitem(EXTRAS, "nowhere", "torchao")
    said = fails(capsys, "fit", *SHORT, "--model.optimizer=nowhere.AdamW8bit")
    assert (
        "`model.optimizer` needs nowhere, which is not installed. Run: pip install 'grail-lightning[torchao]'." in said
    )


REWARD = "--data.task.rewards=[{function: mine.%s}]"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (REWARD % "level", r"The reward `mine.level` must take columns of the data, .*, but asks for \['difficulty'\]"),
        (REWARD % "one", r"The reward `mine.one` must take responses and references.*, but takes \(responses\)"),
        (REWARD % "keywords", r"The reward `mine.keywords` must take responses and references"),
        (
            REWARD % "of_trl",
            r"takes prompts, completions, as TRL's rewards do. Write `def of_trl\(responses, references",
        ),
        (REWARD % "levle", "got 'mine.levle' .*Did you mean level\\?"),
        ("--data.task.rewards=[{function: grail_lightning.tasks.rewards.overlng}]", "Did you mean overlong\\?"),
        ("--data.task.rewards=[{function: corectness}]", "but got 'corectness'. Did you mean correctness\\?"),
        ("--data.task=mine.Thing", "but got 'mine.Thing', which is a class that does not derive from `ArithmeticTask`"),
        ("--data.task=mine.level", "but got 'mine.level', which is a function"),
        ("--data=mine.Thing", "'mine.Thing', which is a class that does not derive from `LightningDataModule`"),
        ("--model.optimizer=mine.Thing", "'mine.Thing', which is a class that does not derive from `Optimizer`"),
        ("--data.task=mine.Othr", "but got 'mine.Othr'. Did you mean Other\\?"),
        ("--data.task=grail_lightning.tasks.MathTsk", "Did you mean MathTask\\?"),
        ("--config=child.yaml", "`config` in child.yaml must name a file to build on, but there is no nowhere.yaml"),
        ("--config=other.yaml", "`config` in child.yaml must name a file to build on, but there is no nowhere.yaml"),
    ],
)
def test_a_mistake_in_what_the_user_wrote_is_one_line_before_a_model_is_loaded(
    option, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        "grail_lightning.distributed.sharding.load_policy", lambda *_, **__: pytest.fail("a model was loaded")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(
        "from grail_lightning.tasks import ArithmeticTask\nclass Thing: pass\nclass Other(ArithmeticTask): pass\n"
        "def level(responses, references, *, difficulty, correct, weight=1): return [1.0] * len(responses)\n"
        "def one(responses): return [1.0] * len(responses)\n"
        "def keywords(responses, *, references): return [1.0] * len(responses)\n"
        "def of_trl(prompts, completions, **columns): return [1.0] * len(prompts)\n"
    )
    (tmp_path / "child.yaml").write_text("config: nowhere.yaml\n")
    (tmp_path / "other.yaml").write_text("config: child.yaml\n")
    assert re.search(message, fails(capsys, "fit", *SHORT, option))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model:\n  polcy: arithmetic\n", "no option `model.polcy`. Did you mean `model.policy`\\? It is set in"),
        (b"model: {execution: {grup_size: 4}}\n", "Did you mean `model.execution.group_size`\\? It is set in"),
        (
            b"model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: abc}}}",
            "`model.optimizer.lr` must be float",
        ),
        (b"trainer: fast\n", "`trainer` must have another value: Unable to load config .fast.*It is set in"),
        (b"data: {class_path: ArithmeticData, num_val: 3}\n", "must stand under `init_args`.* `data` has others"),
        (b"", "must hold options, .* but got nothing"),
        (b"# a comment\n", "must hold options, .* but got nothing"),
        (b"- 1\n", "must hold options, .* but got a list"),
        (b"model:\n  policy: [a\ntrainer: {}\n", 'must be well-formed YAML: .*wrong.yaml", line 3, column 8'),
        (b"model:\n\tpolicy: a\n", 'wrong.yaml", line 2, column 1'),
        (
            b"model: {policy: a}\ntrainer: {}\nmodel: {policy: b}\n",
            "a second 'model' in \"wrong.yaml\", line 3, column 1",
        ),
        (b"trainer:\nseed_everything: 1\n", "`trainer` must be a group of options, but got null. Fill it in, or leave"),
        (b"model: {execution: }\n", "`model.execution` must be a group of options, but got null"),
        (b"model: {sampling: {max_response_length: 44, temperature: 1,5}}\n", "must be a string, got: 5"),
        (b"model: {credit: [GRAIL]}\n", "`model.credit` must be one of .*'GRAIL'.*It is set in"),
        (b"\xff\xfe", "must be UTF-8 text, but byte 0 is not"),
        (b"methods: {}\n", "wrong.yaml is a sweep of many. Run: python -m grail_lightning.sweep wrong.yaml"),
        (b"config: wrong.yaml\n", "`config` must name another file .*: wrong.yaml -> wrong.yaml"),
        (b"config: other.yaml\n", "`config` must name another file .*: wrong.yaml -> other.yaml -> wrong.yaml"),
        (b"config: [other.yaml]\n", "`config` must name another file .*: wrong.yaml -> other.yaml -> wrong.yaml"),
        (b"config: [1]\n", r"`config` in wrong.yaml must be the path of a file to build on, .* got \[1\]"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_the_files_name(content, message, options, tmp_path):
    (tmp_path / "wrong.yaml").write_bytes(content)
    (tmp_path / "other.yaml").write_text("config: wrong.yaml\n")
    with pytest.raises(ValueError, match=message):
        options.parse([*SHORT, "--config=wrong.yaml"])


def test_an_option_of_the_command_line_is_not_blamed_on_a_file(options, tmp_path):
    (tmp_path / "right.yaml").write_text("model: {optimizer: {init_args: {lr: 1.0e-3}}}\n")
    with pytest.raises(ValueError, match=r"`model\.optimizer\.lr` must be float") as refused:
        options.parse([*SHORT, "--config=right.yaml", "--model.optimizer.lr=abc"])
    assert "is set in" not in str(refused.value)


def test_a_subcommand_that_is_none_is_named(capsys):
    for given in ([], ["fti", "--config=quickstart.yaml"]):
        assert "must be followed by fit, validate, test, predict or --help, but got" in fails(capsys, *given)


def test_a_version_and_a_mistyped_subcommand_are_answered_before_torch_is_imported():
    said = (
        "import sys; sys.argv[1:] = {}\nfrom grail_lightning.__main__ import main\n"
        "try: main()\nexcept SystemExit as end: print(end.code)\nprint('torch' in sys.modules)"
    )
    for arguments, lines in ((["--version"], [f"grail-lightning {__version__}", "False"]), (["fti"], ["2", "False"])):
        done = subprocess.run(
            [sys.executable, "-c", said.format(arguments)], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == lines


def test_the_traceback_is_shown_on_request(capsys, monkeypatch):
    monkeypatch.setenv("GRAIL_DEBUG", "1")
    with pytest.raises(SystemExit):
        main(["fit", *SHORT, "--trainer.gradient_clip_val=1"])
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_ours_inside_a_run_keeps_its_traceback(monkeypatch):
    """A mistake of the user's is one line; a fault of a library's is not hidden."""

    def broken(*_, **__):
        raise RuntimeError("a fault")

    monkeypatch.setattr("grail_lightning.module.assign_credit", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["fit", *SHORT])
