"""Verdicts, rewards, and the tokens of answers and labelled steps, with the packaged tokenizer."""

import math
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from grail_lightning import ArithmeticTask, MathTask, RewardSpec, Step, build_batch, grade_answers
from grail_lightning.answers import AnswerSpan, Conventions, LastNumber, Marker, Pattern, Verdict, Verifier
from grail_lightning.core.rollout.grading import TaskVerifiers, align_rows, answer_masks, grade_and_locate, step_masks
from grail_lightning.core.step.figures import Tally, add_rollouts
from tests.tolerance import assert_near

TEXTS = [
    "7+5=2\nSo \\boxed{1}\n2-3=-1\n\\boxed{-1} then",  # a forgotten carry (a misconception), and two boxes
    "7+5=13\n13-3=10\n\\boxed{10}",  # a slip, then a step that inherits it
    "7+5=12\n12-3=9",  # no box
]


def _batch(policy, prompt, texts, group_size=1):
    ids = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return build_batch(policy, [prompt] * (len(ids) // group_size), group_size, ids, [True] * len(ids))


def _chains(policy):
    return _batch(policy, ArithmeticTask().prompt({"problem": "7+5-3"}), TEXTS)


def _boxes(policy):
    prompt = MathTask().prompt({"problem": "7+5?", "answer": "12"})
    return _batch(policy, prompt, [r"7+5=12 \boxed{12}.", r"7+5=13 \boxed{13}.", "7+5=12"])


def _text(policy, batch, mask, row):
    return policy.tokenizer.decode(batch.response_ids[row][mask[row]])


# ---- verdicts and rewards


def test_rewards_and_masks_are_those_of_one_after_the_other(arithmetic):
    batch = _boxes(arithmetic)
    with Verifier(num_workers=1) as verifier:
        graded = grade_and_locate(batch, verifier, arithmetic.tokenizer)
        expected = grade_answers(batch.texts, batch.prompts, verifier)
    masks = answer_masks(batch, align_rows(batch, arithmetic.tokenizer))
    assert graded.verdicts == expected
    assert graded.correct.tolist() == [verdict.correct for verdict in expected] == [True, False, False]
    assert graded.rewards.tolist() == MathTask().reward(batch.texts, batch.prompts, expected) == [1.0, 0.0, 0.0]
    for name in ("whole", "content", "marker", "after"):
        assert torch.equal(getattr(graded.answer, name), getattr(masks, name)), name
    assert graded.answer.whole.any(1).tolist() == [True, True, False]


def test_answers_are_located_while_the_verifier_is_at_work(arithmetic):
    """Neither side gets on without the other here: one after the other would not end."""
    grading, locating = threading.Event(), threading.Event()

    class Waiting:
        """A verifier whose workers take as long as it takes to locate the first answer."""

        def grade(self, pairs):
            grading.set()
            assert locating.wait(60), "no answer was located meanwhile"
            return [Verdict.missing(gold) for gold, _ in pairs]

    class Tokenizer:
        def __getattr__(self, name):
            assert grading.wait(60), "grading did not begin meanwhile"
            locating.set()
            return getattr(arithmetic.tokenizer, name)

    batch = grade_and_locate(_boxes(arithmetic), Waiting(), Tokenizer())
    assert batch.answer.whole.any(1).tolist() == [True, True, False]


def test_an_error_in_grading_is_the_one_that_is_seen(arithmetic):
    class Broken:
        def grade(self, pairs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade_and_locate(_boxes(arithmetic), Broken(), arithmetic.tokenizer)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("answer-masks")]


def test_answers_that_are_text_are_compared_as_text():
    rows = [
        ("text", "New  York", "new york", "right"),
        ("exact", "New York", "new york", "wrong"),
        ("exact", "New York", "New\tYork", "right"),
        ("text", "1/2", "0.5", "wrong"),
        ("math", "1/2", "0.5", "right"),
        ("text", "caf\u00e9", "cafe\u0301", "right"),
        ("text", "1/2", "  ", "missing"),
    ]
    tasks = {how: MathTask(answer=Pattern(r"<(.*)>"), instruction="", compare=how) for how in ("text", "exact", "math")}
    prompts = [tasks[how].prompt({"problem": "Where?", "answer": reference}) for how, reference, _, _ in rows]
    with Verifier(num_workers=1) as verifier:
        verdicts = grade_answers([f"<{answer}>" for _, _, answer, _ in rows], prompts, verifier)
    assert [verdict.status for verdict in verdicts] == [status for *_, status in rows]
    assert [verdict.correct for verdict in verdicts] == [status == "right" for *_, status in rows]


def test_tasks_that_make_their_verifier_alike_share_one_and_another_has_its_own():
    class WithUnits(MathTask):
        @staticmethod
        def make_verifier():
            return Verifier(num_workers=1, conventions=Conventions(missing_unit=False))

    tasks = [MathTask(), WithUnits(), MathTask(compare="text"), ArithmeticTask(), WithUnits()]
    prompts = [task.prompt({"problem": "1+1", "answer": r"2\text{ cm}"}) for task in tasks]
    verifiers = TaskVerifiers()
    texts = [r"\boxed{2}"] * 4 + [r"\boxed{2\text{ cm}}"]
    verdicts = grade_answers(texts, prompts, verifiers)
    assert [verdict.correct for verdict in verdicts] == [True, False, False, True, True]
    assert [verdict.prediction for verdict in verdicts] == ["2", "2", "2", "2", r"2\text{ cm}"]
    copies = pickle.loads(pickle.dumps([tasks[0], tasks[3]]))
    shared, own = verifiers.of(tasks[0]), verifiers.of(tasks[1])
    assert all(verifiers.of(task) is shared for task in [*copies, tasks[2]])
    assert own is verifiers.of(tasks[4]) is not shared

    own.grade([("(x+1)^2", "x^2+2x+1")])
    (worker,) = own._pool.workers
    verifiers.close()
    assert worker.process.poll() is not None
    assert grade_answers([], [], TaskVerifiers()) == []


def test_shaped_rewards_leave_correctness_alone_and_are_logged_part_by_part(arithmetic):
    overlong = RewardSpec(function="overlong", weight=2.0, arguments={"limit": 64, "buffer": 64}, name="long")
    task = MathTask(rewards=[RewardSpec(function="correctness"), overlong])
    prompt = task.prompt({"problem": "Compute 1+1.", "answer": "2"})
    batch = _batch(arithmetic, prompt, [r"\boxed{2}", "no", r"\boxed{2}", r"\boxed{2}"], group_size=2)
    with Verifier(num_workers=1) as verifier:
        graded = grade_and_locate(batch, verifier, arithmetic.tokenizer)
    assert graded.correct.tolist() == [True, False, True, True]
    penalty = -(batch.response_lengths.double() / 64)  # limit = buffer: the slope begins at no token
    assert_near(graded.rewards, graded.correct.double() + 2 * penalty, 16)
    assert_near(graded.reward_values["long"], penalty, 16)
    assert graded.select(torch.tensor([1, 3])).reward_values["correctness"].tolist() == [0.0, 1.0]
    tally = Tally()
    add_rollouts(tally, graded)
    report = tally.compute()
    assert report["rewards/correctness/mean"] == report["accuracy"] == 0.75
    assert report["frac_correct_zero_std"] == 0.5  # the second group is right throughout
    assert report["verdict/missing"] == 0.25
    assert report["verdict/timeout"] == report["verdict/crashed"] == 0.0


# ---- the tokens of answers


def test_the_last_box_is_marked_unless_the_first_is_asked_for(arithmetic):
    batch = _chains(arithmetic)
    rows = align_rows(batch, arithmetic.tokenizer)
    last, first = answer_masks(batch, rows), answer_masks(batch, rows, "first")
    assert _text(arithmetic, batch, last.whole, 0).strip() == "\\boxed{-1}"
    assert _text(arithmetic, batch, first.whole, 0).strip() == "\\boxed{1}"
    assert _text(arithmetic, batch, last.content, 0) == "-1"
    assert _text(arithmetic, batch, last.after, 0) == " then"
    assert _text(arithmetic, batch, last.content & ~last.marker, 1) == "10"
    for mask in (last.whole, last.content, last.marker, last.after):  # The last row has no box.
        assert not mask[2].any()
        assert not (mask & ~batch.response_mask).any()


@pytest.mark.parametrize(
    ("form", "text", "marked"),
    [
        (Marker("Answer:"), "3+4=7\nAnswer: 7\nBye", ("Answer: 7", "7", "Answer:")),
        (LastNumber(), "3+4=7", ("7", "7", "")),
        (Pattern(r"is (\d+)\."), "It is 7. So 8", ("is 7.", "7", "is .")),
    ],
)
def test_the_tokens_of_an_answer_are_those_of_its_form(form, text, marked, arithmetic):
    prompt = MathTask(answer=form, instruction="").prompt({"problem": "3+4?", "answer": "7"})
    batch = _batch(arithmetic, prompt, [text])
    masks = answer_masks(batch, align_rows(batch, arithmetic.tokenizer))
    whole, content, marker, after = (
        "".join(arithmetic.tokenizer.decode([token]) for token in batch.response_ids[mask].tolist())
        for mask in (masks.whole, masks.content, masks.marker, masks.after)
    )
    assert (whole, content, marker.replace(" ", "")) == (marked[0], marked[1], marked[2].replace(" ", ""))
    assert text.endswith(after)
    with Verifier(num_workers=1) as verifier:
        assert grade_answers(batch.texts, batch.prompts, verifier)[0].correct


# ---- the tokens of labelled steps


def test_steps_are_marked_where_their_error_shows(arithmetic):
    batch = _chains(arithmetic)
    steps = step_masks(batch, arithmetic.tokenizer)
    assert _text(arithmetic, batch, steps["misconception"], 0) == "2"
    assert _text(arithmetic, batch, steps["slip"], 1) == "13"
    assert _text(arithmetic, batch, steps["inherited"], 1) == "10"
    assert _text(arithmetic, batch, steps["sound"], 2) == "129"
    assert torch.stack(list(steps.values())).sum(0).max() == 1, "a token is of one kind"
    assert step_masks(_boxes(arithmetic), arithmetic.tokenizer) is None, "the task cannot label"


# ---- what a task returns is checked: it may be anybody's


def mine(method, returned, base=MathTask):
    """A task of a user's, of which one method returns something."""
    return type("Mine", (base,), {method: lambda self, *_: returned})()


def _earned(total, **values):
    return mine("earn", SimpleNamespace(total=total, values=values), ArithmeticTask)


SPAN = AnswerSpan(start=0, stop=99, content_start=0, content_stop=1)
NO_STEPS = r"`Mine\.label_steps` must return a list of `Step` .*; but got %s.* for the prompt 'Compute 1\+1\.'"
RETURNED = [
    (_earned([1.0]), r"`Mine\.earn` must return 2 finite numbers or None, one a response, but got \[1\.0\]"),
    (_earned([1.0, math.nan]), r"`Mine\.earn` must return 2 finite numbers or None, .*but got \[1\.0, nan"),
    (_earned([None, -math.inf]), r"`Mine\.earn` must return 2 finite numbers or None, .*but got \[None, -inf"),
    (
        _earned([1.0, -1e39]),
        r"`Mine\.earn` must return .* between ±1\.7e\+38, since .* are float32, but got -1e\+39\. ",
    ),
    (_earned([1.0] * 2, half=[0.5]), r"`Mine\.earn` must return 2 .*its part `half` has 1"),
    (mine("answer_spans", [SPAN]), r"ranges within the text"),
    *(
        (mine("label_steps", steps, ArithmeticTask), NO_STEPS % shown)
        for steps, shown in (
            (map(str, ()), r"<map object"),  # It would be empty when it is read again.
            ([{"start": 0, "stop": 3}], r"\{'start': 0"),
            ([Step(start=0.0, stop=3, kind="slip")], r"Step\(start=0\.0"),
            ([Step(start=0, stop=3, kind="wrong")], r"Step\(.*'wrong'"),
            ([Step(start=0, stop=99, kind="slip")], r"Step\(.* stop=99"),
            ([Step(start=0, stop=3, kind="slip", result=(2, 99))], r".*result=\(2, 99\)"),
            ([Step(start=4, stop=5, kind="slip"), Step(start=0, stop=5, kind="sound")], r"Step\(start=0, stop=5, "),
        )
    ),
]


@pytest.mark.parametrize(("task", "message"), RETURNED, ids=range(len(RETURNED)))
def test_what_a_task_returns_is_checked_and_names_it(task, message, arithmetic):
    batch = _batch(arithmetic, task.prompt({"problem": "1+1", "answer": "2"}), ["1+1=2", "\\boxed{2}"])

    def grade():
        grade_and_locate(batch, verifier, arithmetic.tokenizer)
        step_masks(batch, arithmetic.tokenizer)

    with Verifier(num_workers=1) as verifier, pytest.raises(ValueError, match=message):
        grade()
