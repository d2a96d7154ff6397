"""What users get wrong on the command line is one line; what is a fault of ours keeps its traceback."""

import re
import sys

import pytest

from grail_lightning.app.cli.app import FitOptions
from tests.shell import SHORT, fails_early, main

OVERLONG = "--data.task.init_args.rewards=[{function: overlong, arguments: "
AHEAD = "--model.execution.sample_ahead=true --model.execution.sampler_cap=2"
MATH = "--data=MathData --data.train="
UNWRITABLE = "must be a folder that can be written, but got"
REWARD = "--data.task.rewards=[{function: mine.%s}]"
MINE = """
import functools
from grail_lightning import ArithmeticTask
class Thing: pass
class Other(ArithmeticTask): pass
def level(responses, references, *, difficulty, correct, weight=1): return [1.0] * len(responses)
def one(responses): return [1.0] * len(responses)
def keywords(responses, *, references): return [1.0] * len(responses)
def of_trl(completions, trainer_state): return [1.0] * len(completions)
class Judge:
    def __call__(self, texts): return [1.0] * len(texts)
judge = Judge()
short = lambda responses: [1.0] * len(responses)
partial = functools.partial(one)
def of_none(responses, correct): return [float(right) for right in correct]
"""
EARLIER = """
from grail_lightning.credit import Uniform
class Credit(Uniform):
    def needs(self): return None
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_files_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "earlier_credit.py").write_text(EARLIER)
    (tmp_path / "train.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n' * 8)
    (tmp_path / "cut.jsonl").write_text('{"problem": "1+1?"\n')
    (tmp_path / "long.jsonl").write_text('{"problem": "%s", "answer": "2"}\n' % ("1+" * 4000) * 8)
    (tmp_path / "text.ckpt").write_text("hello")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.fixture(scope="module")
def options():
    return FitOptions()


NO_OPTION = "There is no option `%s`.*Did you mean `?%s`?\\?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model.credit=GRIAL", "`model.credit` must be one of .*GRAIL, .* but got 'GRIAL'. Did you mean GRAIL"),
        ("--model.credit.wmin=1", NO_OPTION % ("model.credit.wmin", "w_min")),
        ("--model.credit.zzz=1", "There is no option `model.credit.zzz`. GRAIL of `model.credit` has: .*w_min, "),
        ("--model.credit.saliency.leef=first", NO_OPTION % ("model.credit.saliency.leef", "leaf")),
        ("--model.credit={class_path: GRAIL, init_args: {saliency: {leef: 1}}}", "`model.credit.saliency.leef`"),
        (
            "--model.credit=TreeAdvantage --model.credit.state=length",
            "state` must be one of 'prefix', .* but got 'length'",
        ),
        (
            "--data=CodeData --data.task=CodeTask --data.task.limits.second=1",
            NO_OPTION % ("data.task.limits.second", "seconds"),
        ),
        ("--trainer.gradient_clip_val=1", "Set `--model.execution.max_grad_norm` instead"),
        ("--trainer.precision=16-mixed", "Use bf16-mixed, or 32-true"),
        ("--trainer.val_check_interval=0", "`trainer.val_check_interval` must be positive, but got 0"),
        ("--config=nowhere.yaml", "`--config` must name a YAML file, but got nowhere.yaml: .*No such file"),
        ("--model.optimizer=nowhere.Adam", "`model.optimizer` must .*'nowhere.Adam': No module named 'nowhere'"),
        ("--model.credit=GRPO", "but got 'GRPO'. `GRPO` is an objective: --model.objective=GRPO.$"),
        ("--model.credit=GroupMean", "`GroupMean` is an estimator of the advantage: --model.advantage=GroupMean.$"),
        ("--model.credit=same_magnitude", "`SameMagnitude` is a control: --model.control=SameMagnitude.$"),
        ("--model.advantage=dr_grpo", "`DrGRPO` is an objective: --model.objective=DrGRPO.$"),
        (
            "--model.objective=gspo",
            "`model.objective` must be one of CISPO, .*but got .gspo.. Did you mean GSPOToken?",
        ),
        ("--model.objective=RLOO", "`LeaveOneOut` is an estimator of the advantage: --model.advantage=LeaveOneOut.$"),
        ("--model.credit=oar", "but got 'oar'. Did you mean OARGradient or OARPerturbation"),
        (
            "--model.credit=grail_lightning.credit.GRIAL",
            "'grail_lightning.credit.GRIAL': .* Did you mean GRAIL",
        ),
        ("--model.credit=grail_lightning.MathData", "it is no subclass of TokenCredit"),
        ("--model.engine=vllm", "but got 'vllm'. Did you mean VLLMEngine or VLLMServer"),
        ("--model.engine.urls=[a]", "`model.engine` must name a class .* `urls` is an option of VLLMServer"),
        (
            "--model.advantage=LeaveOneOut --model.advantage.share=1",
            "LeaveOneOut .* `share` is an option of .*GroupMean",
        ),
        ("--model.credit+=GRAIL", "`model.credit` must be given without a plus sign, since it is no list"),
        ("--model.execution.group_size", "`model.execution.group_size` must have a value, as in --model.execution"),
        ("--model.execution.group_size=2.5", "`model.execution.group_size` must be a whole number, but got 2.5"),
        ("--model.execution.group_size={a: 1}", "`model.execution.group_size` must be a whole number, but got {a: 1}"),
        ("--model.execution.group_size=null", "`model.execution.group_size` must be a whole number, but got null"),
        ("--model.execution.group_size=[2]", "must be a whole number, but got \\[2\\]. Leave out the brackets"),
        ("--model.sampling=null", "`model.sampling` must be a group of options, but got null"),
        ("--evaluation.pass_at=4", "must be a list in brackets of whole numbers, but got 4. Put it in brackets"),
        ("--evaluation.pass_at+=[x]", "`evaluation.pass_at` must be a list in brackets of whole numbers, but got"),
        ("--model.loading.lora=3", "must be a mapping in braces with the options rank, .*, or null, but got 3"),
        ("--data=null", "^`data` must be given, on the command line or in a file"),
        ("--data=MathData --data.train=[{limit: 2}]", "^`data.train.path` must be given, because DatasetSpec of"),
        (
            "--data=MathData --data.task=EnvironmentTask --data.task.environment=mine.Nowhere",
            "`data.task.environment` must be the import path of a class, but got 'mine.Nowhere': mine has no 'Nowhere'",
        ),
        (
            "--data=MathData --data.task=MathTask --data.task.rewards=correctness",
            "must be a list in brackets, .* Write \\[{function: correctness}\\].",
        ),
        ("data.yaml", "^Each argument must be an option, but got 'data.yaml'. Write --config data.yaml.$"),
        ("quickstart", "^Each argument must be an option, but got 'quickstart'. Write --config quickstart.yaml.$"),
        ("model.policy=a", "^Each argument must be an option, but got 'model.policy=a'. Write --model.policy=a.$"),
        ("--config", "^`--config` must be followed by the name of a YAML file, but got nothing.$"),
        ("--model.optimizer=Adamm", "`model.optimizer` must be one of .*AdamW.*'Adamm'. Did you mean Adam?"),
        (
            "--model.optimizer=mine.Thing",
            "`model.optimizer` must be one of .*'mine.Thing': .* no subclass of Optimizer",
        ),
        ("--model.sampling.temperature=hot", "`model.sampling.temperature` must be a number, but got 'hot'"),
        ("--model.optimizer.lr=abc", "`model.optimizer.lr` must be a number, but got 'abc'"),
        ("--trainer.max_epochs=ten", "`trainer.max_epochs` must be a whole number or null, but got 'ten'"),
        ("--model.zzz=1", "`model` has: policy, .*sampling, .*loading"),
        ("--model.optimizer.weight_deacy=1", NO_OPTION % ("model.optimizer.weight_deacy", "weight_decay")),
        ("--model.scheduler=StepLR", "^`model.scheduler.step_size` must be given, because StepLR .* no default for it"),
        (
            "--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStopping",
            "^`trainer.callbacks.monitor` must be given, .* Write --trainer.callbacks.monitor=VALUE.$",
        ),
        (
            "--model.scheduler=ReduceLROnPlateau",
            "'ReduceLROnPlateau': it cannot be used, because its step takes a metric",
        ),
        ("--trainer.callbacks+=KeepRolouts", "`trainer.callbacks` must be one of .*Did you mean KeepRollouts"),
        ("--data=MathData --data.task=MathTask --data.task.answer=Markr", "`data.task.answer` must .* mean Marker"),
        ("--data=mine.Thing", "`data` must be one of .*'mine.Thing': .*LightningDataModule"),
        ("--verbose=true", "no option `verbose`.*Did you mean `checkpoint.verbose`"),
        ("--checkpoint.save_top_k=3", "`checkpoint.save_top_k` 3 needs a `checkpoint.filename` of its own for each"),
        ("--checkpoint.save_last=true", "`checkpoint` must not write last.ckpt"),
        ("--checkpoint.filename=last", "`checkpoint` must not write last.ckpt"),
        ("--checkpoint.train_time_interval=soon", "must be a time such as 0:10:00 or null, but got 'soon'"),
        (
            "--data=MathData --data.task.rewards=[{function: correct}]",
            "`data.task` must name a class beside `data.task.rewards`, as in --data.task=ArithmeticTask",
        ),
        (
            "--trainer.callbacks+=LearningRateMonitor --trainer.callbacks.logging_interval=batch",
            "`trainer.callbacks.logging_interval` must be .*'step', 'epoch'.*, but got 'batch'",
        ),
        ("--model.credit=LESS --model.credit.std=1", "std`. LESS of `model.credit` has: share, min_length. .*of GRAIL"),
        (
            "--model.credit=Uniform --model.credit.std=1",
            "`model.credit.std`. Uniform of `model.credit` has no options.",
        ),
        ("--model.credit={class_path: Uniform, init_args: {std: 1}}", "Uniform of `model.credit` has no options."),
        ("--model.engine=HFEngine --model.engine.urls=[a]", "HFEngine .* has: .*`urls` is an option of VLLMServer."),
        ("--model.optimizer=SGD --model.optimizer.betas=[0,1]", "SGD of `model.optimizer` has: lr, .*option of Adam, "),
        ("--model.num_generations=8", "no option `model.num_generations`. Here it is `model.execution.group_size`."),
        ("--beta=0.1", "There is no option `beta`. Here it is `model.objective.kl_coefficient`."),
        ("--max_completion_length=9", "Here it is `model.sampling.max_response_length`."),
        ("--actor_rollout_ref.rollout.n=8", "Here it is `model.execution.group_size`."),
        ("--actor_rollout_ref.actor.clip_ratio_high=0.3", "Here it is `model.objective.clip_high`."),
        ("--model.objective.epsilon_high=0.3", "Here it is `model.objective.clip_high`."),
        ("--data=MathData --data.task=MathTask --data.task.reward_funcs=f", "Here it is `data.task.rewards`."),
        ("--data.train_files=x", "Here it is `data.train`."),
        ("--model.pol=arithmetic", NO_OPTION % ("model.pol", "policy")),
        (
            "--model.objective.group_size=4",
            "DrGRPO of `model.objective` has: .* Here it is `model.execution.group_size`.",
        ),
        ("--throughput.window=0", "There is no option `throughput.window`.* See `grail-lightning fit --help`"),
        ("--model.objective.aggregation=ppo", "must be .*'grpo', 'dr_grpo', 'dapo'.*, but got 'ppo'"),
        ("--model.loading.lora={ranks: 3}", NO_OPTION % ("model.loading.lora.ranks", "rank")),
        (
            "--data=MathData --data.train=[{path: t, limit: many}]",
            "^`data.train.limit` must be a whole number or null, but got 'many'",
        ),
    ],
)
def test_the_message_about_an_option_names_it_and_what_is_accepted(arguments, message, options):
    with pytest.raises(ValueError, match=message) as refused:
        options.parse([*SHORT, *re.split(" (?=--)", arguments)])
    assert "Namespace" not in str(refused.value), "nothing of jsonargparse's own forms"


CODE, TURNS = (
    "--data=CodeData --data.task=CodeTask --data.task.",
    "--data=MathData --data.task=EnvironmentTask --data.task.",
)
GROUP_MEAN = "Write --model.advantage=GroupMean --model.advantage."
SERVER = "Write --data.task.isolation=Server --data.task.isolation.url="
DISTILLED = "Write --model.objective=SDPG --model.objective.coefficient=0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model.objective.distillation.coefficient=0.1", f"`model.objective.distillation`. {DISTILLED}."),
        (
            "--model.objective.distillation={coefficient: 0.1, clamp: 3}",
            f"{DISTILLED} --model.objective.clamp=3.",
        ),
        ("--model.objective.distillation=null", "Leave it out: it is SDPG of `model.objective`."),
        ("--model.objective.scale_rewards=group", f"`model.objective.scale_rewards`. {GROUP_MEAN}scale=group."),
        ("--model.objective.scale_rewards=bnpo", "`model.objective.scale_rewards`. Write --model.advantage=BNPO."),
        ("--scale_rewards=True", f"There is no option `scale_rewards`. {GROUP_MEAN}scale=group."),
        ("--model.objective.baseline=0.5", f"`model.objective.baseline`. {GROUP_MEAN}share=0.5."),
        ("--model.objective.baseline=energy", "`model.objective.baseline`. Write --model.advantage=EnergyBaseline."),
        ("--model.objective.train_equal=true", f"`model.objective.train_equal`. {GROUP_MEAN}train_equal=true."),
        ("--model.advantage.scale=group", "as in --model.advantage=GroupMean --model.advantage.scale=group: "),
        ("--model.advantage.share=0.5", "as in --model.advantage=GroupMean --model.advantage.share=0.5: "),
        ("--model.credit.saliency.alignment=predictor", "Here it is `model.credit.saliency.read_at`."),
        ("--model.credit=OARGradient --model.credit.alignment=own", "Here it is `model.credit.read_at`."),
        (f"{CODE}isolation=auto", "but got 'auto'. Write null, "),
        (f"{CODE}isolation=http://127.0.0.1:80/run", f"run'. {SERVER}http://127.0.0.1:80/run."),
        (f"{CODE}backend=auto", "`data.task.backend`. Here it is `data.task.isolation`. Write null, "),
        (f"{CODE}backend=bubblewrap", "`data.task.backend`. Here it is `data.task.isolation`."),
        (f"{CODE}backend=http://a", f"Here it is `data.task.isolation`. {SERVER}http://a."),
        ("--model.credit=earlier_credit.Credit", "`Credit` must say what it uses in `services`, "),
        ("--model.credit=grail_lightning.credit.grail.GRAIL", "is not a package. Write GRAIL."),
        ("--model.objective=grail_lightning.step.options.Objective", "'grail_lightning.step'. Write DrGRPO."),
        ("--model.engine=grail_lightning.engines.hf.HFEngine", "'grail_lightning.engines'. Write HFEngine."),
        ("--data=grail_lightning.data.SearchData", "'grail_lightning.data'. Write SearchData."),
        ("--data=MathData --data.task=grail_lightning.tasks.EnvironmentTask", "Write EnvironmentTask."),
        *(
            (f"{TURNS}environment=grail_lightning.environments.{name.lower()}.{name}", f"Write {path}.{name}.")
            for name, path in {
                "Search": "grail_lightning.worlds.search.environment",
                "Charts": "grail_lightning.worlds.charts.environment",
                "Calculator": "grail_lightning.worlds.sums.calculator",
                "Python": "grail_lightning.worlds.code.python",
            }.items()
        ),
    ],
)
def test_what_earlier_versions_had_is_answered_with_what_replaces_it(arguments, message, options):
    with pytest.raises(ValueError, match=re.escape(message)):
        options.parse([*SHORT, *re.split(" (?=--)", arguments)])
    if present := re.search(r"Write (grail_lightning\.\S+)\.$", message):
        options.parse([*SHORT, *f"{TURNS}environment={present[1]}".split()])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model:\n  polcy: arithmetic\n", "no option `model.polcy`. Did you mean policy\\?"),
        (b"model: {execution: {grup_size: 4}}\n", "`model.execution.grup_size`. Did you mean group_size\\?"),
        (b"trainer: fast\n", "`trainer` must be a group of options, but got 'fast'"),
        (b"data: {class_path: ArithmeticData, num_val: 3}\n", "of a class in `data` must stand under `init_args`"),
        (b"model: {objective: {scale_rewards: group}}\n", "option `model.objective.scale_rewards`. Write --model.adv"),
        (
            b"model: {objective: {distillation: {clamp: 3}}}\n",
            "Write --model.objective=SDPG --model.objective.clamp=3.",
        ),
        (b"actor_rollout_ref: {rollout: {n: 8}}\n", "`actor_rollout_ref.rollout.n`. Here it is `model.execution"),
        (b"algorithm: {lam: 1}\n", "no option `algorithm.lam`. It is a group of verl's options"),
        (b"model: {beta: 0.1}\n", "There is no option `model.beta`. Here it is `model.objective.kl_coefficient`."),
        (b"", "must hold options, .* but got nothing"),
        (b"model:\n  policy: [a\ntrainer: {}\n", r'(?s)must name a YAML file, .*wrong.yaml", line 3, column 8'),
        (
            b"model: {policy: a}\ntrainer: {}\nmodel: {policy: b}\n",
            '(?s)a second .model.*"wrong.yaml", line 3, column 1',
        ),
        (b"trainer:\nseed_everything: 1\n", "`trainer` must be a group of options, but got None. Fill it in, or leave"),
        (b"model: {execution: }\n", "`model.execution` must be a group of options, but got None"),
        (
            b"model: {sampling: {max_response_length: 44, temperature: 1,5}}\n",
            "Options of `model.sampling` must have names, but got 5",
        ),
        (
            b"model: {credit: [GRAIL]}\n",
            "`model.credit` must be one of .*, but got \\[GRAIL\\]. Leave out the brackets.",
        ),
        (b"\xff\xfe", "got wrong.yaml: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"methods: {}\n", "wrong.yaml is a sweep of many runs. Run: python -m grail_lightning.sweep wrong.yaml"),
        (b"config: [other.yaml]\n", "`config` in other.yaml must name another file .* wrong.yaml builds on itself"),
        (b"config: [1]\n", "`config` in wrong.yaml must name a YAML file, but got 1"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_the_options_or_the_files_name(content, message, options, tmp_path):
    (tmp_path / "wrong.yaml").write_bytes(content)
    (tmp_path / "other.yaml").write_text("config: wrong.yaml\n")
    with pytest.raises(ValueError, match=message):
        options.parse([SHORT[0], "--config=wrong.yaml"])  # Options would override the file.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model.sampling.max_response_length=100000", "must leave room for a prompt in the 4096 positions"),
        ("--model.credit.w_min=null", "`model.credit.w_min` must be a number, but got null"),
        (
            "--data=MathData --data.train=[{path: train.jsonl, limit: -1}]",
            r"error: `limit` must lie in \[1, inf\), but got -1",
        ),
        ("--model.credit.w_min=9", r"`w_min` must lie in \[0, 5.0\], but got 9.0"),
        ("--model.policy=./nowhere", "`policy` './nowhere' cannot be loaded: it does not exist. Give a folder"),
        ("--model.policy=arithmetc", "`policy` 'arithmetc' cannot be loaded: .* a packaged policy such as"),
        ("--model.policy=", "`policy` '' cannot be loaded"),
        ("--model.policy=[a]", r"`policy` must be a folder .* but got '\[a\]', which is no folder here .*Correct it"),
        ("--ckpt_path=last", "last.ckpt does not exist .*Train first"),
        (
            "--ckpt_path=text.ckpt",
            "`ckpt_path` must be a checkpoint of a run, .* text.ckpt cannot be read",
        ),
        ("--data=MathData --data.train=cut.jsonl", "cut.jsonl, line 1: malformed JSON"),
        ("--data=MathData --data.val=[cut.jsonl,gone.jsonl]", "`data.val`: the dataset `path` 'gone.jsonl' does not"),
        ("--data=MathData --data.test=mine.py", "`data.test` must be a file of type"),
        (
            "--data=MathData --data.train=cut.jsonl --data.few_shot={dataset: gone.jsonl}",
            "`few_shot.dataset`: the data",
        ),
        (f"{OVERLONG}{{limit: 100}}}}]", "The reward `overlong` must get `arguments` .*missing 1 required"),
        (f"{OVERLONG}{{limit: 100, buffer: 9}}}}]", "`overlong` must begin below .*longest response, .* 44, but"),
        ("--evaluation.pass_at=[8]", "must lie between 1 and `num_samples`"),
        ("--model.optimizer.lr=-1", "`optimizer` cannot be used: Invalid learning rate: -1"),
        ("--model.optimizer=LBFGS", "`optimizer` cannot be used: missing a required argument: 'closure'"),
        ("--model.scheduler=OneCycleLR --model.scheduler.max_lr=1e-4", "You must define either total_steps"),
        ("--model.sampling.temperature=0", "Training must sample at random.*got `sampling.temperature` 0"),
        ("--model.sampling.top_k=1", "Training must sample at random.*got `sampling.top_k` 1"),
        ("--model.execution.group_size=1", r"`execution.group_size` must lie in \[2, inf\), but got 1"),
        (
            "--trainer.strategy=ModelParallelStrategy --trainer.strategy.tensor_parallel_size=2",
            "`tensor_parallel_size` 1, since layers are never split, but got 1 and 2",
        ),
        (REWARD % "level", r"The reward `mine.level` must take columns of the data, .*, but asks for \['difficulty'\]"),
        (REWARD % "one", r"The reward `mine.one` must take responses and references.*, but takes \(responses\)"),
        (
            REWARD % "of_trl",
            r"`mine.of_trl` must take .* but asks for \['trainer_state'\].* are those of TRL's",
        ),
        (
            REWARD % "partial",
            r"takes \(responses\). Write `def one\(responses, .*\)`. Give `functools.partial` the values",
        ),
        (REWARD % "short", r"reward `mine.short` .* Write `lambda responses, references, \*\*columns: …`."),
        (
            REWARD % "judge",
            r"takes \(texts\). Write `def __call__\(self, responses, references, \*\*columns\)` in Judge",
        ),
        (REWARD % "Judge", r"Give an object of the class, whose method is `def __call__\(self, responses, "),
        (REWARD % "of_none", r"takes \(responses, correct\). Write `def of_none\(responses, references"),
        (REWARD % "levle", "got 'mine.levle' .*Did you mean level\\?"),
        ("--data.task.rewards=[{function: corectness}]", "but got 'corectness'. Did you mean correctness\\?"),
        # What a run would find out late.
        (
            "--trainer.logger.init_args.save_dir=/dev/null/x",
            f"`trainer.logger.save_dir` {UNWRITABLE} .*Not a dir",
        ),
        ("--trainer.logger=false --trainer.default_root_dir=/proc/x", f"`trainer.default_root_dir` {UNWRITABLE}"),
        ("--checkpoint.dirpath=/proc/x", f"`dirpath` of ModelCheckpoint {UNWRITABLE}"),
        ("--checkpoint.train_time_interval=0:10:0", "`train_time_interval` of ModelCheckpoint must be left out"),
        ("--last_checkpoint.folder=/dev/null/x", f"`folder` of LastCheckpoint {UNWRITABLE}"),
        ("--export.folder=mine.py", f"`folder` of ExportPolicy {UNWRITABLE}"),
        (f"{MATH}train.jsonl --data.task=ArithmeticTask", r"must be whole numbers .*but got '1\+1\?'"),
        (f"{MATH}long.jsonl", r"8 of 8 prompts of long.jsonl are longer than 4,052 tokens.*line 1.*8,022 tokens"),
        ("predict --predictions.file=.", r"`predictions.file` must be a file, but \. is a folder"),
        ("predict --predictions.compare+=LES", "`predictions.compare` must be one of .*LESS, .* but got 'LES'"),
        ("predict --predictions.compare+=LESS --predictions.compare.zz=1", "no option `predictions.compare.zz`"),
        ("predict --model.credit=PRIME", "`model.credit` must not be `PRIME` in `predict`"),
        ("predict --predictions.compare+=PRIME", "`predictions.compare` must not be `PRIME` in `predict`"),
        ("--model.credit=PRIME --model.credit.model=./nowhere", "`model.credit.model` './nowhere' cannot be loaded"),
        (AHEAD, "`execution.sample_ahead` needs an engine that samples elsewhere.*but got HFEngine"),
        (
            f"{AHEAD} --model.execution.sampler_cap=null --model.engine=tests.copying_engine.Elsewhere",
            "`execution.sampler_cap` must be set with `execution.sample_ahead`",
        ),
        ("--model.policy=Qwen3ForCausalLM given in Python", "cannot repeat. Run that program again"),
        ("--data=MathData --data.train=2 rows given in Python", "cannot repeat. Run that program again"),
        (
            "--data.task=ArithmeticTask --data.task.rewards=[{function: Length given in Python}]",
            "Length given in Python",
        ),
    ],
)
@pytest.mark.filterwarnings(r"ignore:[\s\S]*Unable to serialize instance")
def test_a_mistake_is_one_line_before_a_model_is_loaded(arguments, message, capsys):
    *subcommand, options = arguments.split(" ", 1) if arguments.startswith("predict") else [arguments]
    assert re.search(message, fails_early(capsys, *(subcommand or ["fit"]), *SHORT, *re.split(" (?=--)", options)))


def test_an_evaluation_without_data_is_one_line_and_the_traceback_is_shown_on_request(capsys, monkeypatch):
    monkeypatch.setenv("GRAIL_DEBUG", "1")
    with pytest.raises(SystemExit):
        main(["validate", *SHORT, "--data=MathData", "--data.train=train.jsonl"])
    said = capsys.readouterr().err
    assert "`validate` needs `data.val`" in said
    assert "Traceback" in said


def test_an_error_of_ours_inside_a_run_keeps_its_traceback(monkeypatch):
    """A mistake of the user's is one line; a fault of a library's is not hidden."""

    def broken(*_, **__):
        raise RuntimeError("a fault")

    monkeypatch.setattr("grail_lightning.core.step.assign.assign_credit", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["fit", *SHORT, "--evaluation.at_start=false"])
