"""Prompts that are too long are left out of training before it begins, and named with file, line and length."""

import pytest

from grail_lightning import Curriculum, FewShot, MathData, MathTask, Prompt
from grail_lightning.core.data.loaders import PromptSet
from grail_lightning.core.data.modules import PromptLimit, check_held_out, long_prompts
from grail_lightning.core.policy.encode import encode_prompt
from grail_lightning.core.policy.source import load_tokenizer
from tests.core.data.recorder import TASK, Recorder, fit, problems, rows, write

PLAIN = MathTask(instruction="")


def as_bytes(messages):
    """One token a byte, and two for each turn."""
    turns = [messages] if isinstance(messages, str) else [f"<{turn['content']}>" for turn in messages]
    return list("".join(turns).encode())


def of_lengths(folder, lengths, name="train.jsonl"):
    return write(folder, [{"problem": "x" * (n - 2), "answer": "1", "level": n} for n in lengths], name)


def set_up(path, limit, **options):
    data = MathData(train=path, task=PLAIN, max_prompt_length=limit, prompts_per_batch=1, **options)
    data.encode = as_bytes
    data.setup("fit")
    return data


def test_long_prompts_are_left_out_and_named_by_file_line_and_length(tmp_path):
    path = of_lengths(tmp_path, (6, 9, 4, 7))
    named = r"2 of 4 prompts of .*train.jsonl are longer than 6 tokens, .*: line 2 \(9 tokens\), line 4 \(7 tokens\)\."
    with pytest.warns(UserWarning, match=named) as said:
        data = set_up(path, 6, curriculum=Curriculum("level", batches=3, start=0.1))
    assert len(said) == 1
    (part,) = data.train_dataloader().sets
    assert [len(prompt.columns["problem"]) + 2 for prompt in part.prompts] == list(part.difficulty) == [6, 4]

    with pytest.warns(UserWarning, match=r"line 6 \(1,000 tokens\), and 1,195 more\. .*Training leaves out"):
        set_up(of_lengths(tmp_path, [5] + [1000] * 1200), 999)


@pytest.mark.parametrize(
    ("limit", "options", "message"),
    [
        (5, {"overlong": "error"}, r"1 of 2 .* `data.max_prompt_length` 5 .*: line 2 \(9 tokens\)\. .* or set `data.o"),
        (2, {}, r"The longest has 9 tokens\. None is left"),
        (5, {"overlong": "cut"}, "`overlong` must be one of drop, error"),
        (0, {}, r"`max_prompt_length` must lie in \[1, inf\)"),
    ],
)
def test_long_prompts_are_an_error_if_asked_for_and_if_nothing_is_left(limit, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        set_up(of_lengths(tmp_path, (3, 9)), limit, **options)


@pytest.mark.parametrize("name", ["arithmetic", "words"])
def test_the_lengths_are_those_of_the_tokenizer_though_most_prompts_are_not_tokenised(name):
    tokenizer = load_tokenizer(name)
    texts = ["1+1", "x" * 40, "1" * 39, "é→≤" * 9, "\n\n  \n" * 8, "Anna has 8 coins. " * 3]
    chats = [[{"role": role, "content": text} for role in ("system", "user")[k:]] for text in texts for k in (0, 1)]
    asked = [Prompt(messages=messages, reference="", task=TASK) for messages in [*texts, *chats]]
    tokenised = []

    def encode(messages):
        tokenised.append(messages)
        return encode_prompt(tokenizer, messages)

    lengths = [len(encode_prompt(tokenizer, prompt.messages)) for prompt in asked]
    for most in range(max(lengths) + 1):
        expected = {number: length for number, length in enumerate(lengths) if length > most}
        assert long_prompts(asked, encode, most) == expected
    tokenised.clear()
    long_prompts(asked, encode, 200)
    assert len(tokenised) == 3, "one for each form of a prompt"


def test_worked_examples_count(tmp_path):
    given = [{"problem": f"{k}?", "answer": str(k), "solution": f"\\boxed{{{k}}}"} for k in (1, 2, 3333)]
    path = write(tmp_path, given)
    with pytest.warns(UserWarning, match=r"1 of 2 prompts of .*train.jsonl are longer .*: line 3 \(22 tokens\)"):
        data = set_up(path, 19, few_shot=FewShot(number=1))
    assert problems(data.train_dataloader()) == ["2?"]


class Small(Recorder):
    """A module whose model has room for 30 tokens."""

    def __init__(self, room=30):
        super().__init__()
        self.context_length, self.sampling = room, type("Sampling", (), {"max_response_length": 10})

    def prompt_encoder(self, task):
        return as_bytes


def test_by_default_the_limit_is_what_responses_leave_of_the_context(tmp_path):
    module = Small()
    data = MathData(train=of_lengths(tmp_path, (20, 21)), task=PLAIN, prompts_per_batch=1)
    context = r"than 20 tokens, .* context 30 less `sampling.max_response_length` 10: line 2 \(21 tokens\)"
    with pytest.warns(UserWarning, match=context):
        fit(module, data, max_epochs=1)
    assert [len(problem) for (problem,) in module.train_prompts] == [18]


def test_an_evaluation_leaves_nothing_out(tmp_path):
    data = MathData(val=of_lengths(tmp_path, (20, 21)), task=PLAIN, max_prompt_length=5)
    data.encode = as_bytes
    data.setup("validate")
    (loader,) = data.val_dataloader()
    assert len(loader.prompts) == 2
    check_held_out(loader.prompts, as_bytes, PromptLimit(None, 31, 10))
    with pytest.raises(ValueError, match=r"1 of 2 .*: line 2 \(21 tokens\)\. .* An evaluation leaves no problem out"):
        check_held_out(loader.prompts, as_bytes, PromptLimit(None, 30, 10))


def test_without_a_tokenizer_the_limit_is_not_applied_and_that_is_told(tmp_path):
    data = MathData(train=write(tmp_path, rows(10)), prompts_per_batch=10, max_prompt_length=1)
    with pytest.warns(UserWarning, match=r"`max_prompt_length` was not applied .*without a trainer"):
        data.setup("fit")
    assert [len(batch) for batch in data.train_dataloader()] == [10]


def test_a_data_module_without_training_prompts_is_refused():
    class Empty(MathData):
        def load(self, split):
            return [PromptSet("empty", [])]

    with pytest.raises(ValueError, match="at least one prompt"):
        fit(Small(30), Empty(), max_epochs=1)
