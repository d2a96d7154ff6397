"""Rewards and answer masks of a batch of responses."""

import threading

import pytest
import torch

from grail_lightning.answers import AnswerSpan, LastNumber, Marker, Pattern, Verdict, Verifier
from grail_lightning.engines.base import build_batch
from grail_lightning.grading import align_rows, answer_masks, grade_and_locate, grade_answers
from grail_lightning.tasks import MathTask


def _batch(policy):
    prompts = [MathTask().prompt({"problem": "7+5?", "answer": "12"}) for _ in range(3)]
    texts = [r"7+5=12 \boxed{12}.", r"7+5=13 \boxed{13}.", "7+5=12"]
    return build_batch(policy, prompts, 1, [policy.tokenizer.encode(text) for text in texts], [True] * 3)


def test_rewards_and_masks_are_those_of_one_after_the_other(arithmetic):
    batch = _batch(arithmetic)
    with Verifier(num_workers=1) as verifier:
        found = grade_and_locate(batch, verifier, arithmetic.tokenizer)
        expected = grade_answers(batch.texts, batch.prompts, verifier)
    masks = answer_masks(batch, align_rows(batch, arithmetic.tokenizer))
    assert found.verdicts == expected
    assert found.correct.tolist() == [verdict.correct for verdict in expected] == [True, False, False]
    assert found.rewards.tolist() == MathTask().reward(batch.texts, batch.prompts, expected) == [1.0, 0.0, 0.0]
    for name in ("whole", "content", "marker", "after"):
        assert torch.equal(getattr(found.answer, name), getattr(masks, name)), name
    assert found.answer.whole.any(1).tolist() == [True, True, False]


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

    batch = grade_and_locate(_batch(arithmetic), Waiting(), Tokenizer())
    assert batch.answer.whole.any(1).tolist() == [True, True, False]


def test_an_error_in_grading_is_the_one_that_is_seen(arithmetic):
    class Broken:
        def grade(self, pairs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade_and_locate(_batch(arithmetic), Broken(), arithmetic.tokenizer)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("answer-masks")]


@pytest.mark.parametrize("answer", [7, ("7",), b"7"], ids=["a number", "a tuple", "bytes"])
def test_an_answer_that_is_no_string_is_an_error_that_names_the_task(answer, arithmetic):
    class Mine(MathTask):
        def answer(self, text):
            return answer

    prompts = [Mine().prompt({"problem": "3+4?", "answer": "7"})]
    batch = build_batch(arithmetic, prompts, 1, [arithmetic.tokenizer.encode("7")], [True])
    message = rf"`Mine\.answer` must return a string, or None .*, but got {type(answer).__name__} \("
    with Verifier(num_workers=1) as verifier, pytest.raises(ValueError, match=message):
        grade_and_locate(batch, verifier, arithmetic.tokenizer)


@pytest.mark.parametrize(
    ("form", "text", "marked"),
    [
        (Marker("Answer:"), "3+4=7\nAnswer: 7\nBye", ("Answer: 7", "7", "Answer:")),
        (LastNumber(), "3+4=7", ("7", "7", "")),
        (Pattern(r"is (\d+)\."), "It is 7. So 8", ("is 7.", "7", "is .")),
    ],
)
def test_the_tokens_of_an_answer_are_those_of_its_form(form, text, marked, arithmetic):
    tokenizer = arithmetic.tokenizer
    task = MathTask(answer=form, instruction="")
    prompts = [task.prompt({"problem": "3+4?", "answer": "7"})]
    batch = build_batch(arithmetic, prompts, 1, [tokenizer.encode(text)], [True])
    masks = answer_masks(batch, align_rows(batch, tokenizer))
    whole, content, marker, after = (
        "".join(tokenizer.decode([token]) for token in batch.response_ids[mask].tolist())
        for mask in (masks.whole, masks.content, masks.marker, masks.after)
    )
    assert (whole, content, "".join(marker.split(" "))) == (marked[0], marked[1], "".join(marked[2].split(" ")))
    assert text.endswith(after)
    with Verifier(num_workers=1) as verifier:
        assert grade_answers(batch.texts, batch.prompts, verifier)[0].correct


@pytest.mark.parametrize(
    ("compare", "reference", "answer", "status"),
    [
        ("text", "New  York", "new york", "right"),
        ("exact", "New York", "new york", "wrong"),
        ("exact", "New York", "New\tYork", "right"),
        ("text", "1/2", "0.5", "wrong"),
        ("math", "1/2", "0.5", "right"),
        ("text", "caf\u00e9", "cafe\u0301", "right"),
        ("text", "1/2", "  ", "missing"),
    ],
)
def test_answers_that_are_text_are_compared_as_text(compare, reference, answer, status):
    task = MathTask(answer=Pattern(r"<(.*)>"), instruction="", compare=compare)
    prompt = task.prompt({"problem": "Where?", "answer": reference})
    with Verifier(num_workers=1) as verifier:
        (verdict,) = grade_answers([f"<{answer}>"], [prompt], verifier)
    assert (verdict.status, verdict.correct) == (status, status == "right")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("7", r"`Mine\.answer_spans` must return a list of `AnswerSpan`"),
        ([(0, 1)], r"`Mine\.answer_spans` must return a list of `AnswerSpan`"),
        ([AnswerSpan(start=0, stop=99, content_start=0, content_stop=1)], r"ranges within the text"),
    ],
)
def test_ranges_of_answers_that_a_task_invents_are_an_error_that_names_it(answers, message, arithmetic):
    class Mine(MathTask):
        def answer_spans(self, text):
            return answers

    prompts = [Mine().prompt({"problem": "3+4?", "answer": "7"})]
    batch = build_batch(arithmetic, prompts, 1, [arithmetic.tokenizer.encode("7")], [True])
    with pytest.raises(ValueError, match=message):
        answer_masks(batch, align_rows(batch, arithmetic.tokenizer))
