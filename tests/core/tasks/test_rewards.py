"""Problems with an answer: their prompts, and rewards, of which anybody may write one."""

import asyncio
import math

import pytest
import torch

from grail_lightning import ArithmeticTask, MathTask, RewardSpec, build_batch, correctness
from grail_lightning.answers import Boxed, LastNumber, Marker, Pattern, Verdict, Verifier
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.rollout.grading import grade_and_locate
from grail_lightning.core.step.figures import Tally, add_rollouts
from grail_lightning.core.tasks.rewards import boxed_format, overlong


def by_level(responses, references, level, factor=1):
    return [None if here is None else factor * here for here in level]


def verdict(correct):
    return Verdict(correct=correct, status="right" if correct else "wrong", layer="number", gold="2", prediction="")


def reward(function, texts, correct=None, rows=None, lengths=None):
    task = MathTask(rewards=[RewardSpec(function=function)])
    prompts = [task.prompt({"problem": "1+1", "answer": "2"} | row) for row in rows or [{}] * len(texts)]
    verdicts = [verdict(right) for right in correct or [False] * len(texts)]
    return task.reward(texts, prompts, verdicts, lengths)


# ---- prompts

ROW = {"problem": "What is $1+1$?", "answer": " 2 ", "level": 1}


@pytest.mark.parametrize(
    ("options", "instruction"),
    [
        ({"answer": Boxed()}, r" Please reason step by step, and put your final answer within \boxed{}."),
        ({"answer": LastNumber()}, "end with the answer as a number."),
        ({"answer": Marker("Answer:")}, "on a last line after Answer:"),
        ({"instruction": "\nBox it."}, "\nBox it."),
        ({"instruction": ""}, ROW["problem"]),
    ],
)
def test_the_prompt_is_the_problem_with_an_instruction_that_asks_for_the_form_of_the_answer(options, instruction):
    prompt = MathTask(system_prompt="Be brief.", **options).prompt(ROW)
    system, user = prompt.messages
    assert (system, user["role"]) == ({"role": "system", "content": "Be brief."}, "user")
    assert user["content"].startswith(ROW["problem"])
    assert user["content"].endswith(instruction)
    assert (prompt.reference, prompt.columns) == ("2", ROW)
    assert len(MathTask(**options).prompt(ROW).messages) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instruction": "within \boxed{}."}, r"`instruction` must not hold a backspace character.*use single quotes"),
        ({"answer": Pattern(r"is (\d+)")}, "`instruction` must be given with `answer: Pattern`"),
        ({"compare": "words"}, "`compare` must be one of math, text, exact, relaxed, but got 'words'"),
        ({}, r"columns `problem` and `answer`, but got only \['question'\]"),
    ],
)
def test_what_cannot_be_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        MathTask(**options).prompt({"question": "1+1?"})


def test_references_and_format_rewards_follow_the_form_of_the_answer():
    task = MathTask(rewards=[RewardSpec(function="answer_format")], answer=Marker())
    prompt = task.prompt(ROW | {"answer": "1 + 1\n#### 2"})
    assert prompt.reference == "2"
    texts = ["#### 3", "#### **3**\n", "#### 3\nor so", "3", r"\boxed{3}"]
    assert task.reward(texts, [prompt] * 5, [verdict(False)] * 5, lengths=[1] * 5) == [1, 1, 0, 0, 0]


# ---- rewards


@pytest.mark.parametrize(("task", "row"), [(MathTask, {"answer": "2"}), (ArithmeticTask, {})])
def test_rewards_add_up_with_their_weights_and_their_values_have_their_names(task, row):
    hard = RewardSpec(function=by_level, weight=0.5, arguments={"factor": 10}, name="hard")
    made = task(rewards=[RewardSpec(function="correctness", weight=7.0), hard])
    prompts = [made.prompt({"problem": "1+1", "level": level} | row) for level in (3, None)]
    earned = made.earn(["", ""], prompts, [verdict(True), verdict(True)], [1, 1])
    assert earned.values == {"correctness": [1.0, 1.0], "hard": [30.0, None]}
    assert earned.total == [22.0, 7.0]  # 7 + 0.5*30; None is no opinion: 7


def _silent(*values):
    return lambda responses, references: [*values]


def test_a_response_has_no_reward_if_no_function_has_an_opinion_about_it():
    """The sum of nothing is None, not 0; a sum of numbers that is 0 is 0."""
    some, others = _silent(None, None, 1.0, None, 1.0), _silent(None, 0.0, None, None, -1.0)
    specs = [RewardSpec(function=some, name="some"), RewardSpec(function=others, name="others")]
    task = MathTask(rewards=specs)
    prompts = [task.prompt({"problem": "1+1", "answer": "2"})] * 5
    assert task.reward([""] * 5, prompts, [verdict(True)] * 5) == [None, 0.0, 1.0, None, 0.0]


@pytest.mark.parametrize(("weight", "totals"), [(1.0, [1.0, None]), (0.0, [0.0, 0.0])])
def test_a_reward_of_weight_0_scores_nothing_unless_all_have_it(weight, totals):
    judge = RewardSpec(function=_silent(1.0, None), name="judge", weight=weight)
    task = MathTask(rewards=[judge, RewardSpec(function="correctness", weight=0.0)])
    prompts = [task.prompt({"problem": "1+1", "answer": "2"})] * 2
    earned = task.earn(["", ""], prompts, [verdict(True)] * 2, [1, 1])
    assert earned.total == totals
    assert earned.values["correctness"] == [1.0, 1.0], "it is logged"


def test_a_function_sees_the_columns_of_all_rows_and_the_verdicts():
    seen = {}

    def sees(responses, references, **columns):
        seen.update(columns, responses=responses, references=references)
        return [0.0] * len(responses)

    rows = [{"level": 1, "lengths": "not ours"}, {"source": "x", "references": "not ours"}]
    reward(sees, [r"\boxed{2}", "no"], [True, False], rows, lengths=[5, 6])
    expected = {
        "responses": [r"\boxed{2}", "no"],
        "references": ["2", "2"],
        "correct": [True, False],
        "status": ["right", "wrong"],
        "answers": ["2", None],
        "ends_with_answer": [True, False],
        "lengths": [5, 6],
        "level": [1, None],
        "source": [None, "x"],
    }
    assert {name: seen[name] for name in expected} == expected


def test_a_function_that_changes_what_it_is_given_changes_neither_the_data_nor_the_next_response():
    def takes_out(responses, references, cases):
        return [case.pop() for case in cases]

    row = {"cases": [1.0, 2.0]}
    assert reward(takes_out, ["", ""], rows=[row, row]) == [2.0, 2.0]
    assert row == {"cases": [1.0, 2.0]}


def test_the_built_in_rewards():
    texts = [r"So \boxed{1}", r"So $\boxed{\frac{1}{2}}$. ", r"\[\boxed{1}\]", r"\boxed{}"]
    assert boxed_format(texts, [""] * 4) == [1.0] * 4
    texts = ["1", r"\boxed{1", r"\boxed{1} or 2", r"\boxed{1} and \boxed{2", ""]
    assert boxed_format(texts, [""] * 5) == [0.0] * 5
    assert correctness(["", ""], ["", ""], correct=[True, False]) == [1.0, 0.0]
    # limit 100, buffer 20: free up to 80, then 1/20 a token, -1 at 100 and behind
    values = overlong([""] * 6, [""] * 6, lengths=[1, 80, 81, 90, 100, 150], limit=100, buffer=20)
    assert values == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])


OVERLONG = "`overlong` must get `arguments` that it can use, .*"
MODULE = "grail_lightning.core.tasks.rewards"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"function": f"{MODULE}.nothing"}, r"has no 'nothing'\). Correct the name"),
        ({"function": f"{MODULE}.overlng"}, r"Did you mean overlong\?"),
        ({"function": "nowhere.at_all"}, r"No module named 'nowhere'\). Is its folder on PYTHONPATH\?"),
        ({"function": "broken.reward"}, r"\(No module named 'not_installed'\)\.$"),
        ({"function": f"{MODULE}.GIVEN"}, "which cannot be called"),
        ({"function": "overlong", "arguments": {"length": 3}}, f"{OVERLONG}unexpected keyword argument 'length'"),
        ({"function": "overlong", "arguments": {"limit": 10, "buffer": 11}}, f"{OVERLONG}`limit` .10. tokens"),
        ({"function": "overlong", "arguments": {"limit": "ten", "buffer": 4}}, f"{OVERLONG}not supported between"),
        ({"function": by_level, "arguments": {"fctor": 2}}, "must get `arguments` .*unexpected .*'fctor'"),
        ({"function": "correctness", "retries": -1}, r"`correctness` must have `retries` and .* but got -1, 1.0 and"),
        ({"function": "correctness", "after_retries": "skip"}, r"`after_retries` stop or none, but got .*'skip'"),
        ({"function": "correctness", "weight": math.inf}, r"`weight` of the reward `correctness` must be a finite"),
        ([RewardSpec(function="correctness")] * 2, r"`rewards` must have different names, but got \['correctness', 'c"),
        ([], r"`rewards` must name at least one reward, but got \[\]"),
        ([{"function": "correctness"}], r"must be a list of `RewardSpec`, but got {'function'.*write their type"),
    ],
)
def test_a_reward_that_cannot_be_is_found_before_anything_runs(spec, message, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        MathTask(rewards=[RewardSpec(**spec)] if isinstance(spec, dict) else spec)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda texts: [1 / len(text) for text in texts], r"ZeroDivisionError: .*It got 3 responses.*by hand"),
        (lambda texts: [1.0], r"must return 3 finite numbers or None.*but got 1\. .*whole batch"),
        (lambda texts: [math.nan if text == "b" else 0.0 for text in texts], "but got nan for the response 'b'"),
        (lambda texts: 1.0, "must return .* but got 1.0 .*Return a list of floats"),
        (lambda texts: ["good" for _ in texts], r"must return .* but got \['good'"),
        (lambda texts: dict.fromkeys(range(3), 1.0), r"must return .* \(a dict has no order of responses\)"),
        (lambda texts: (1 / len(text) for text in texts), r"must return .* \(division by zero\)"),
        (lambda texts: [10**400] * 3, "must return .* too large"),
        (lambda texts: [0.0, -1e39, 0.0], r"±1\.7e\+38, .* float32, but got -1e\+39 for the response 'b'\. Divide"),
    ],
)
def test_a_reward_that_fails_is_named(values, message):
    def mine(responses, references):
        return values(responses)

    with pytest.raises(ValueError, match=f"The reward `mine given in Python` .*{message}"):
        reward(mine, ["a", "b", ""])


class Lenient(ArithmeticTask):
    """A task of a user's that has a reward of its own and knows nothing of lengths."""

    def reward(self, texts, prompts, verdicts):
        return [0.5 + verdict.correct for verdict in verdicts]


def test_a_subclass_with_a_reward_of_its_own_is_asked_for_it():
    task = Lenient()
    earned = task.earn(["", ""], [task.prompt({"problem": "1+1"})] * 2, [verdict(True), verdict(False)], [1, 1])
    assert (earned.total, earned.values) == ([1.5, 0.5], {})


# ---- judges that fail now and then


class Judge:
    """Fails in its first calls, and changes the cells that it is given, as a caller may."""

    def __init__(self, failures, error=ConnectionError):
        self.failures, self.error, self.calls, self.seen = failures, error, 0, []

    def __call__(self, responses, references, cases):
        self.calls += 1
        self.seen.append([list(case) for case in cases])
        for case in cases:
            case.clear()
        if self.calls <= self.failures:
            raise self.error(f"call {self.calls}")
        return [0.5] * len(responses)


class AsyncJudge(Judge):
    async def __call__(self, responses, references, cases):
        await asyncio.sleep(0)
        return super().__call__(responses, references, cases)


def judged(judge, **options):
    task = MathTask(rewards=[RewardSpec(function="correctness"), RewardSpec(function=judge, name="judge", **options)])
    prompts = [task.prompt({"problem": "1+1", "answer": "2", "cases": [1, 2]})] * 2
    return task.earn(["", ""], prompts, [verdict(True), verdict(False)], [1, 1])


@pytest.mark.parametrize("kind", [Judge, AsyncJudge])
@pytest.mark.parametrize("error", [ConnectionError, asyncio.CancelledError, SystemExit])
def test_a_reward_that_fails_is_called_again_as_often_as_was_asked_for(kind, error):
    judge = kind(2, error)
    earned = judged(judge, retries=2, pause_seconds=0)
    assert earned.values["judge"] == [0.5, 0.5]
    assert earned.total == [1.5, 0.5]
    assert earned.shares == {"judge/failed": [0.0, 0.0], "judge/retried": [1.0, 1.0]}
    assert judge.seen == [[[1, 2], [1, 2]]] * 3, "each call gets cells of its own"
    judge = kind(3, error)
    with pytest.raises(ValueError, match=rf"The reward `{kind.__name__} given in .* raised {error.__name__}: call 3\."):
        judged(judge, retries=2, pause_seconds=0)
    assert judge.calls == 3
    assert judged(kind(0), retries=2).shares == {"judge/failed": [0.0, 0.0], "judge/retried": [0.0, 0.0]}
    assert judged(kind(0)).shares == {}


@pytest.mark.parametrize("kind", [Judge, AsyncJudge])
def test_after_the_last_retry_it_has_no_opinion_if_that_is_what_was_asked_for(kind):
    judge = kind(9)
    with pytest.warns(UserWarning, match=r"raised ConnectionError: call 2\..*After 1 retries .*`rewards/judge/failed`"):
        earned = judged(judge, retries=1, pause_seconds=0, after_retries="none")
    assert judge.calls == 2
    assert earned.values["judge"] == [None, None]
    assert earned.total == [1.0, 0.0]
    assert earned.shares == {"judge/failed": [1.0, 1.0], "judge/retried": [1.0, 1.0]}


def test_values_that_are_wrong_are_not_asked_for_again():
    calls = []

    def short(responses, references):
        calls.append(1)
        return [1.0]

    with pytest.raises(ValueError, match="must return 2 finite numbers"):
        judged(short, retries=3, after_retries="none")
    assert len(calls) == 1


def test_the_pauses_double(monkeypatch):
    slept = []
    monkeypatch.setattr("grail_lightning.core.tasks.attempts.time.sleep", slept.append)
    judged(Judge(9), retries=9, pause_seconds=0.5)
    assert slept == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_the_figures_of_a_batch_are_the_shares_of_its_responses_whose_judge_failed():
    """Two tasks of a mix: the judge of the first one fails; the second has none."""
    reward = RewardSpec(function=Judge(1), name="judge", pause_seconds=0, after_retries="none")
    one, other = MathTask(rewards=[reward]), MathTask()
    row = {"problem": "1+1", "answer": "2", "cases": [1]}
    policy = load_policy("arithmetic")
    ids = policy.tokenizer("17", add_special_tokens=False)["input_ids"]
    batch = build_batch(policy, [one.prompt(row), other.prompt(row)], 2, [ids] * 4, [True] * 4)
    with Verifier(num_workers=1) as verifiers, pytest.warns(UserWarning, match="After 0 retries"):
        graded = grade_and_locate(batch, verifiers, policy.tokenizer)
    tally = Tally()
    add_rollouts(tally, graded)
    figures = tally.compute()
    assert (figures["rewards/judge/failed"], figures["rewards/judge/retried"]) == (1.0, 0.0)
    assert "rewards/judge/mean" not in figures
    assert graded.select(torch.tensor([0, 3])).reward_shares["judge/failed"].tolist()[0] == 1.0
