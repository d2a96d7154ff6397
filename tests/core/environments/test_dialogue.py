"""Conversations with tools as ids, with the chat templates of real models around small vocabularies."""

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grail_lightning.core.environments.calls import ParsedCall
from grail_lightning.core.environments.dialogue import Tags, describe, find_dialect

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
LLAMA += [f"<|reserved_special_token_{k}|>" for k in range(240)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _schema(name, **types):
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": [*types]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


SCHEMAS = [_schema("search", query="string"), _schema("move", x="integer", y="integer")]


def _tokenizer(template, special, plain=(), end=None, normalizer=None):
    """A byte-level BPE, trained on its own control tokens so that their pieces have merges."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([*special, *plain, "The result of a search, user and assistant"] * 20, trainer)
    # Control tokens of all kinds, normalised ones too: these are looked for after the normaliser.
    bpe.add_special_tokens([AddedToken(text, normalized=normalizer is not None) for text in special])
    bpe.add_tokens([AddedToken(text, normalized=normalizer is not None) for text in plain])
    bpe.add_tokens([AddedToken("    ", normalized=False), AddedToken("protein", normalized=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end or special[-1], bos_token=special[0])
    made.chat_template = template
    return made


def _shipped(name, replacement=("", "")):
    """The template of a real model, as TRL ships it."""
    package = importlib.util.find_spec("trl")
    if package is None:
        pytest.skip("the templates of real models come with trl")
    text = Path(package.origin).with_name("chat_templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8")
    return text.replace(*replacement) if replacement[0] else text


def _model(name):
    """A tokenizer with a real model's chat template and control tokens."""
    if name.startswith("llama"):
        return _tokenizer(_shipped(name), LLAMA, end="<|eot_id|>")
    return _tokenizer(_shipped(name), QWEN, QWEN_PLAIN, end="<|im_end|>")


def _find(tokenizer, kind="auto", schemas=SCHEMAS, **kwargs):
    def encode(messages):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return find_dialect(tokenizer, schemas, kind, encode, kwargs)


def _said(content, **arguments):
    function = {"name": "search", "arguments": arguments or {"query": "Ada"}}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


def _conversation(*contents):
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Who was Ada?"}]
    for k, content in enumerate(contents):
        messages += [_said(content, query=f"Ada {k}"), {"role": "tool", "name": "search", "content": f"Result {k}"}]
    return messages


CALLS = {
    "hermes": '<tool_call>\n{{"name": "search", "arguments": {{"query": "Ada {}"}}}}\n</tool_call><|im_end|>',
    "llama3": '{{"name": "search", "parameters": {{"query": "Ada {}"}}}}<|eot_id|>',
}


@pytest.mark.parametrize(
    ("model", "kind", "kwargs"),
    [
        ("qwen2_5", "hermes", {}),
        ("qwen3_instruct_2507", "hermes", {}),
        ("qwen3_vl", "hermes", {}),
        ("llama3_1", "llama3", {}),
        ("llama3_2", "llama3", {"date_string": "1 Jan 2030"}),
        ("llama3_1", "llama3", {"tools_in_user_message": False}),
    ],
)
def test_a_rollout_has_the_ids_of_the_whole_conversation_in_the_models_own_template(model, kind, kwargs):
    tokenizer = _model(model)
    dialect = _find(tokenizer, **kwargs)
    ids = dialect.prompt_ids(_conversation())
    for k in range(3):
        turn = tokenizer(CALLS[kind].format(k), add_special_tokens=False)["input_ids"]
        assert turn[-1] == dialect.end_token_id
        assert dialect.calls(turn) == [ParsedCall("search", {"query": f"Ada {k}"})]
        ids += turn + dialect.between([f"Result {k}"])
    whole = tokenizer.apply_chat_template(
        _conversation("", "", ""), tools=SCHEMAS, tokenize=False, add_generation_prompt=True, **kwargs
    )
    assert dialect.kind == kind
    assert tokenizer.decode(ids) == whole
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_has_its_own_prompts_and_keeps_every_thought_of_earlier_turns(thinking):
    tokenizer = _model("qwen3")
    dialect = _find(tokenizer, enable_thinking=thinking)
    earlier = {"role": "assistant", "content": "<think>\nOld\n</think>\n\nHello."}
    prompts = [
        _conversation(),
        _conversation()[1:],
        [*_conversation(), earlier, {"role": "user", "content": "And?"}],
        [*_conversation("<think>\nOld\n</think>\n\n")[1:], earlier, {"role": "user", "content": "And?"}],
    ]
    for messages in prompts:
        own = tokenizer.apply_chat_template(
            messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert tokenizer.decode(dialect.prompt_ids(messages)) == own
    # Several results stand in one message, as in its own template.
    two = [{"role": "tool", "content": "One"}, {"role": "tool", "content": "Two"}]
    own = tokenizer.apply_chat_template(
        [_conversation()[1], _said("<think>\nNew\n</think>\n\n"), *two],
        tokenize=False, add_generation_prompt=True, enable_thinking=thinking,
    )  # fmt: skip
    assert own.endswith("<|im_end|>" + tokenizer.decode(dialect.between(["One", "Two"])))
    # What the policy writes stays in its template, with or without a thought.
    start = "" if thinking else "<think>\n\n</think>\n\n"
    for content in ("", "<think>\nNew\n</think>\n\n", "Hm.\n"):
        turns = [f"{content}\n" * bool(content) + CALLS["hermes"].format(k) for k in (0, 1)]
        steps = [turn + tokenizer.decode(dialect.between([f"Result {k}"])) for k, turn in enumerate(turns)]
        prompt = tokenizer.decode(dialect.prompt_ids(_conversation()))
        assert prompt.endswith(f"<|im_start|>assistant\n{start}")
        assert tokenizer.decode(dialect.prompt_ids(_conversation(content, content))) == prompt + "".join(steps)


def test_a_prompt_that_opens_the_block_of_thinking_is_known_to_have_opened_it():
    own = _shipped("qwen3", ("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}"))
    tokenizer = _tokenizer(own, QWEN, QWEN_PLAIN, end="<|im_end|>")
    dialect = _find(tokenizer)
    assert tokenizer.decode(dialect.between(["R"])).endswith("<|im_start|>assistant\n<think>\n")
    call = CALLS["hermes"].format(0)
    assert dialect.calls(tokenizer.encode(f"Perhaps {call}")) == []
    assert len(dialect.calls(tokenizer.encode(f"Perhaps {call}</think>{call}"))) == 1


def test_a_tokenizer_without_tools_in_its_template_or_without_a_template_gets_plain_tags():
    optional = {"n": {"type": "integer", "nullable": True}, "unit": {"type": "string", "enum": ["m", "km"]}}
    listed = {"function": {"name": "list", "description": "Lists.", "parameters": {"properties": optional}}}
    tokenizer = _tokenizer(CHATML, QWEN, end="<|im_end|>")
    dialect = _find(tokenizer, schemas=[*SCHEMAS, listed])
    assert (dialect.kind, dialect.stop, dialect.end_token_id) == ("tags", ("</search>", "</move>", "</list>"), None)
    plain = tokenizer.apply_chat_template(_conversation(), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(dialect.prompt_ids(_conversation())) == plain
    turn = tokenizer.encode('Two steps. <move>{"x": 1, "y": 2}</move>')
    assert dialect.calls(turn) == [ParsedCall("move", {"x": 1, "y": 2})]
    bare = [dialect.calls(tokenizer.encode(text)) for text in ("<list></list>", "<search></search>")]
    assert bare == [[ParsedCall("list")], [ParsedCall("search", {"query": ""})]], "all parameters of one have defaults"
    assert tokenizer.decode(dialect.between(["Done."])) == "\n<result>Done.</result>\n"
    assert _find(_tokenizer(None, QWEN)).kind == "tags"
    assert _find(_model("qwen2_5"), "tags").kind == "tags"
    assert _find(_model("qwen2_5"), schemas=[]).stop == ()
    assert describe([*SCHEMAS, listed]).splitlines()[1:] == [
        "<search>…</search> A tool. `query: string`: The query.",
        '<move>{"x": …, "y": …}</move> A tool. `x: integer`: The x. `y: integer`: The y.',
        '<list>{"n": …, "unit": …}</list> Lists. `n: integer or null (optional)` `unit: one of ["m", "km"] (optional)`',
    ]


DIALECTS = {
    "qwen3": cache(lambda: _find(_model("qwen3"), enable_thinking=False)),
    "llama3_1": cache(lambda: _find(_model("llama3_1"))),
    "tags": cache(lambda: _find(_tokenizer(CHATML, QWEN, QWEN_PLAIN))),
    "normalised": cache(
        lambda: _find(_tokenizer(_shipped("qwen2_5"), QWEN, QWEN_PLAIN, "<|im_end|>", normalizers.NFKC()))
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_result_adds_or_removes_a_control_token(name, data):
    dialect = DIALECTS[name]()
    control = {token: added.content for token, added in dialect.tokenizer.added_tokens_decoder.items()}
    control = {token: text for token, text in control.items() if text.strip() and text != "protein"}
    texts = [*control.values(), *(["</result>", "<result>", "</search>", "<search>"] if name == "tags" else [])]
    wide = [text.translate({k: k + 0xFEE0 for k in range(33, 127)}) for text in texts]
    halves = [half for text in texts for half in (text[:1], text[:-2], text[-2:], text[3:], text[:5])]
    nested = [text[:4] + text + text[4:] for text in texts]
    others = [*'\ud800\udfff\ufdd0\0\n \u200b\\"é', "<0x0A>", "protein", "    ", "{{ x }}"]
    parts = st.sampled_from(texts + texts + wide + halves + nested + others)
    result = "".join(data.draw(st.lists(parts, min_size=1, max_size=12)))
    ids, plain = dialect.between([result, "a"]), dialect.between(["a", "a"])
    assert [token for token in ids if token in control] == [token for token in plain if token in control]
    # The tags that only text can tell apart are as many as with harmless results, too.
    if name != "normalised":
        read, expected = (dialect.tokenizer.decode(one) for one in (ids, plain))
        assert [read.count(tag) for tag in texts] == [expected.count(tag) for tag in texts]


def test_every_control_token_as_text_stays_readable_and_harmless_text_stays_itself():
    dialect = DIALECTS["llama3_1"]()
    read = dialect.tokenizer.decode(dialect.between(["".join(LLAMA)]))
    assert read.count("< |reserved_special_token_") == 240
    harmless = 'A "protein"    and 1 < 2 | x>y: [1]\nnaïve 💡 #<b>'
    assert json.dumps(harmless, ensure_ascii=False) in dialect.tokenizer.decode(dialect.between([harmless]))
    tags = DIALECTS["tags"]()
    assert tags.tokenizer.decode(tags.between([harmless])) == f"\n<result>{harmless}</result>\n"


UNKNOWN = "qwen2_5", ("tool_call>", "call>")  # A form of calls that is not among ours.


@pytest.mark.parametrize(
    ("template", "kind", "message"),
    [
        (("nemotron_3_nano",), "auto", "an earlier turn is shown in another way"),
        (("lfm2",), "auto", "must have the form `hermes` or `llama3`, but it wrote"),
        (UNKNOWN, "hermes", "must have the form `hermes`, but it wrote '<call>"),
        (("qwen3_6",), "tokenizer", "must have the form `tokenizer`, but it wrote"),
        ("{{ tools }}" + CHATML.replace("<|im_end|>", ""), "auto", "ends the assistant's turn with no special token"),
        ("{{ tools }}" + CHATML, "hermes", "must have the form `hermes`"),
        ("{{ tools }}{% if messages[1] %}{{ raise_exception('no tools') }}{% endif %}", "auto", "no tools"),
        (None, "hermes", "chat_template is not set"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_what_to_do(template, kind, message):
    text = _shipped(*template) if isinstance(template, tuple) else template
    with pytest.raises(ValueError, match=message) as error:
        _find(_tokenizer(text, QWEN, QWEN_PLAIN, end="<|im_end|>"), kind)
    assert "`tags`" in str(error.value)


def test_a_form_of_calls_that_only_the_tokenizers_own_parser_knows_is_read_by_it():
    tokenizer = _tokenizer(_shipped(*UNKNOWN), QWEN, QWEN_PLAIN, end="<|im_end|>")
    calls = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    calls["transform"] = {"function": "{content}"}
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": calls, "content": {"close": "<|im_end|>"}},
    }
    dialect = _find(tokenizer)
    assert dialect.kind == "tokenizer"
    call = CALLS["hermes"].format(0).replace("tool_call>", "call>")
    assert dialect.calls(tokenizer.encode(f"Who?\n{call}")) == [ParsedCall("search", {"query": "Ada 0"})]
    assert dialect.calls(tokenizer.encode("Nobody.<|im_end|>")) == []
    (broken,) = dialect.calls(tokenizer.encode("<call>[</call>"))
    assert "could not be read" in broken.error


def test_a_prompt_in_plain_text_and_a_tool_named_like_the_tag_of_results_are_refused():
    with pytest.raises(ValueError, match="must be a conversation, but got the plain text 'Who"):
        _find(_model("qwen2_5")).prompt_ids("Who?")
    with pytest.raises(ValueError, match="must not be named `result`"):
        _find(_model("qwen2_5"), "tags", [_schema("result", x="string")])


def test_tools_are_named_behind_a_system_turn_of_parts():
    """As that of a prompt with pictures is."""
    turn = {"role": "system", "content": [{"type": "text", "text": "Be careful."}]}
    made = Tags(_tokenizer(CHATML, QWEN, end="<|im_end|>"), SCHEMAS, lambda messages: messages, None, "Tools: search")
    told = made.prompt_ids([turn, {"role": "user", "content": "1+1?"}])
    assert told[0] == {"role": "system", "content": [{"type": "text", "text": "Be careful.\n\nTools: search"}]}
