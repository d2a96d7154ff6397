"""A prompt begins with one BOS token, whoever writes it: the tokenizer, the chat template or the data."""

import re
import warnings

import pytest
from PIL import Image
from tokenizers import AddedToken, normalizers, processors

from grail_lightning import EnvironmentTask, FewShot, HFEngine, MathData, MathTask, Preflight, Prompt
from grail_lightning.core.engines import requests
from grail_lightning.core.engines.base import given_batch
from grail_lightning.core.policy.encode import encode_prompt
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.core.records.picture import with_pictures
from grail_lightning.core.records.task import TokenText
from tests import runs
from tests.picture_models import checkpoint
from tests.runs import SAMPLING, TASK

BOS, END = "<s>", "</s>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def beginning(tokenizer, *, adds=True, ends=False):
    """The packaged tokenizer with a BOS token, which a post-processor adds as those of Llama and Gemma do."""
    tokenizer.add_special_tokens({"bos_token": BOS})
    begin = (BOS, tokenizer.bos_token_id)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    single = f"{BOS if adds else ''} $A {end[0] if ends else ''}".strip()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair="$A $B", special_tokens=[begin, end]
    )
    return tokenizer


@pytest.fixture
def tokenizer():
    return beginning(load_tokenizer("arithmetic"))


def ids_of(tokenizer, text):
    """The ids of a text as it stands, whose control tokens are meant."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_tokenizer_of_these_tests_adds_a_beginning_even_where_one_is_written(tokenizer):
    """That is the fault of which the others keep prompts free."""
    assert tokenizer("1+1")["input_ids"][:1] == [tokenizer.bos_token_id]
    assert tokenizer(f"{BOS}1+1")["input_ids"][:2] == [tokenizer.bos_token_id] * 2


@pytest.mark.parametrize("messages", [f"{BOS}Compute 1+1.", [{"role": "user", "content": f"{BOS}Compute 1+1."}]])
def test_text_that_a_template_has_rendered_has_the_one_beginning_that_it_brings(tokenizer, messages):
    assert encode_prompt(tokenizer, messages) == ids_of(tokenizer, f"{BOS}Compute 1+1.")


@pytest.mark.parametrize("adds", [True, False])
def test_plain_text_has_the_beginning_that_its_tokenizer_adds(adds):
    tokenizer = beginning(load_tokenizer("arithmetic"), adds=adds)
    expected = [tokenizer.bos_token_id] * adds + ids_of(tokenizer, "Compute 1+1.")
    assert encode_prompt(tokenizer, "Compute 1+1.") == expected
    assert encode_prompt(tokenizer, [{"role": "user", "content": "Compute 1+1."}]) == expected


def test_a_beginning_is_known_by_its_id_however_the_text_writes_it(tokenizer):
    """A tokenizer may take blanks before a control token, and other forms of its characters."""
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(BOS, special=True, lstrip=True)])
    assert encode_prompt(tokenizer, f"  {BOS}1+1")[:2] == [tokenizer.bos_token_id, *ids_of(tokenizer, "1")]


def test_an_end_that_the_tokenizer_adds_does_not_end_a_prompt():
    """With `add_eos_token`, as tokenizers keep it from supervised training, the policy would go on behind an end."""
    tokenizer = beginning(load_tokenizer("arithmetic"), ends=True)
    assert tokenizer("1+1")["input_ids"][-1] == tokenizer.eos_token_id
    assert encode_prompt(tokenizer, "1+1") == [tokenizer.bos_token_id, *ids_of(tokenizer, "1+1")]
    assert encode_prompt(tokenizer, f"{BOS}1+1") == ids_of(tokenizer, f"{BOS}1+1")


def test_conversations_have_the_beginning_of_their_template_and_given_ids_are_kept(tokenizer):
    tokenizer.chat_template = TEMPLATE
    question = [{"role": "user", "content": "1+1"}]
    assert encode_prompt(tokenizer, question) == ids_of(tokenizer, f"{BOS}[user]1+1[assistant]")
    tokenizer.chat_template = TEMPLATE.removeprefix("{{ bos_token }}")
    assert encode_prompt(tokenizer, question) == ids_of(tokenizer, "[user]1+1[assistant]")
    twice = [tokenizer.bos_token_id] * 2
    assert encode_prompt(tokenizer, TokenText("", twice)) == twice


RENDERED = Prompt(messages=f"{BOS}Compute 1+1.", reference="2", task=TASK, columns={"problem": "1+1"})


@pytest.fixture
def policy():
    """The packaged policy with a BOS token."""
    made = load_policy("arithmetic")
    made.model.resize_token_embeddings(len(beginning(made.tokenizer)))
    return made


def test_engines_sample_from_one_beginning_and_rows_have_it_once(policy):
    expected = ids_of(policy.tokenizer, RENDERED.messages)
    engine = HFEngine()
    engine.update_weights(policy)
    sampled = engine.generate([RENDERED], 2, SAMPLING, seed=0)
    for ids, mask in zip(sampled.input_ids, sampled.attention_mask, strict=True):
        assert ids[: sampled.prompt_width][mask[: sampled.prompt_width]].tolist() == expected
    sent = []

    def send(asked):
        sent.extend(request.prompt for request in asked)
        return [requests.Completion([policy.end_token_ids[0]], [-1.0], "stop")] * len(asked)

    requests.sample(policy, [RENDERED], 2, SAMPLING, [1, 2], send)
    assert sent == [expected] * 2


def test_given_responses_stand_behind_one_beginning(policy):
    given = Prompt(messages=RENDERED.messages, reference="2", task=TASK, columns={"response": "1+1=2"})
    batch = given_batch(policy, [given])
    tokenizer = policy.tokenizer
    assert batch.input_ids[0].tolist() == ids_of(tokenizer, RENDERED.messages) + ids_of(tokenizer, "1+1=2")


class Lookup:
    """An environment whose problems continue."""

    def reset(self, **columns):
        return " Look it up."

    def find(self, word: str) -> str:
        """Find a word.

        Args:
            word: The word.
        """
        return word


def test_prompts_of_environments_have_one_beginning(tokenizer):
    task = EnvironmentTask(Lookup, calls="tags", instruction="")
    dialect = task.dialect(tokenizer, lambda messages: encode_prompt(tokenizer, messages), {}, None)
    assert dialect.prompt_ids(f"{BOS}Compute 1+1. Look it up.") == ids_of(tokenizer, f"{BOS}Compute 1+1. Look it up.")
    between = dialect.between(["3"])
    assert tokenizer.bos_token_id not in between


def test_prompts_with_pictures_have_one_beginning(tmp_path):
    seen = load_policy(checkpoint("llava", tmp_path))
    pictures, tokenizer = seen.vision.pictures, beginning(seen.tokenizer)
    pictures.tokenizer = tokenizer
    messages = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (16, 16))}]}]
    messages = with_pictures(messages, [], "row 1")
    for template in ("<image>What?", f"{BOS}<image>What?"):
        tokenizer.chat_template = template
        ids = seen.encode(messages)
        assert ids[:1] == [tokenizer.bos_token_id]
        assert tokenizer.bos_token_id not in ids[1:]


def plain(task, row):
    return Prompt(messages=row["problem"], reference=row["answer"], task=task, columns=row)


class Plain(MathTask):
    """Prompts are the problems as they are, without a template."""

    prompt = plain


def test_worked_examples_as_text_have_one_beginning(tokenizer):
    rows = [{"problem": f"{k}+{k}?", "answer": str(2 * k), "solution": f"\\boxed{{{2 * k}}}"} for k in range(3)]
    shots = FewShot(number=1, style="text")
    for task in (MathTask(instruction=""), Plain(instruction="")):
        (prompt, _) = MathData(train=rows, task=task, few_shot=shots).load("train")[0].prompts
        ids = encode_prompt(tokenizer, prompt.messages)
        assert ids == [tokenizer.bos_token_id, *ids_of(tokenizer, prompt.messages)]


EXAMPLES = [
    {"problem": f"{BOS}[user]{k}+{k}[assistant]", "answer": str(2 * k), "solution": f"\\boxed{{{2 * k}}}"}
    for k in range(4)
]
PROBLEMS = [row | {"problem": row["problem"][len(BOS) :]} for row in EXAMPLES]


@pytest.mark.parametrize(
    ("rows", "task", "few_shot", "said"),
    [
        (EXAMPLES, MathTask(instruction=""), None, "row 1: .*begins with the BOS token '<s>'.* rendered once more"),
        (
            EXAMPLES,
            Plain(instruction=""),
            FewShot(number=1, style="text"),
            "begins with the BOS token '<s>'.* examples the prompt has this token 2 times",
        ),
        (EXAMPLES, Plain(instruction=""), None, None),
        (PROBLEMS, MathTask(instruction=""), FewShot(number=1), None),
        (PROBLEMS, Plain(instruction=""), FewShot(number=1, style="text"), None),
    ],
)
def test_a_beginning_in_the_middle_of_a_prompt_is_told_before_the_model_is_loaded(rows, task, few_shot, said, tmp_path):
    load_policy("arithmetic").save(tmp_path)
    made = beginning(load_tokenizer("arithmetic"))
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    module = runs.GrailModule(str(tmp_path), sampling=SAMPLING)
    data = MathData(train=rows, task=task, prompts_per_batch=2, few_shot=few_shot)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.trainer(0, Preflight(), limit_val_batches=0).fit(module, data)
    told = [str(warning.message) for warning in caught if "BOS" in str(warning.message)]
    assert len(told) == (said is not None), told
    assert said is None or re.search(said, told[0]), told
