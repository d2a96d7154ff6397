"""Environments beside TRL: its own trainer finds the tools, tells them to the chat template, and calls them.

Where the definitions differ, and which call shows it:

- TRL shows the policy ``str(result)``: "None", "{'a': 1}". Here None is empty, and what can be JSON is JSON.
- An exception is ``str({"error": message})`` there, and "Error: Type: message" here.
- TRL puts the results of asynchronous tools behind the others. Here results stand in the order of the calls.
"""

import warnings
from pathlib import Path

import pytest

from grail_lightning.environments.calls import ParsedCall
from grail_lightning.environments.episode import EpisodeLimits
from grail_lightning.environments.tools import ToolSet, call_number, call_reset, run_calls
from grail_lightning.policy import load_policy
from tests.environments.test_tools import Desk

with warnings.catch_warnings():
    # Of the peer and its dependencies while they are imported; nothing of ours.
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", minversion="1.16")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

pytestmark = [
    # TRL uses names that Transformers has deprecated, and calls environments experimental.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'environment_factory'"),
]

CALLS = [
    ("add", {"number": 3, "times": 2}),
    ("ask", {"question": "How many"}),
    ("even", {"number": 8}),
    ("show", {"text": "x", "share": 1, "mood": "bad", "at": None, "words": ["a"], "table": {"b": [1]}}),
    ("add", {"number": -1}),
    ("even", {"number": -1}),
    ("ask", {"question": "fail"}),
    ("fly", {}),
]
ROW = {"prompt": [{"role": "user", "content": "Go."}], "number": 5}


class Scripted(GRPOTrainer):
    """TRL's trainer; only the turns are not sampled."""

    def _generate_single_turn(self, prompt_ids, *arguments, **options):
        ids = self.processing_class.encode("done" + self.processing_class.eos_token)
        return [ids for _ in prompt_ids], None


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    policy = load_policy("arithmetic")
    tokenizer = policy.tokenizer
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return Scripted(
        model=policy.model,
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", num_generations=2, per_device_train_batch_size=2, max_completion_length=100_000,
        ),
        train_dataset=Dataset.from_list([ROW]),
        processing_class=tokenizer,
        environment_factory=Desk,
    )  # fmt: skip


def test_the_chat_template_is_told_what_trl_tells_it(trainer):
    template = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    tokenizer, messages = trainer.processing_class, ROW["prompt"]
    theirs, ours = (
        tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
        for tools in (trainer.tools, ToolSet(Desk).schemas)
    )
    assert ours == theirs
    assert [tool.__name__ for tool in trainer.tools] == [*ToolSet(Desk).by_name]


def test_the_same_calls_give_what_they_give_under_trl(trainer):
    their, mine = Desk(), Desk()
    their.reset(**ROW)
    assert call_reset(mine, ROW, seed=0) == "Number 5."
    theirs = []
    for name, arguments in CALLS:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        theirs.append(_under_trl(trainer, their, [call]))
    (ours,) = run_calls([(ToolSet(Desk), mine, [ParsedCall(*call) for call in CALLS])], [EpisodeLimits()])
    assert [call.status for call in ours] == ["done"] * 5 + ["failed"] * 2 + ["invalid"]
    assert [call.result for call in ours[:5]] == theirs[:5]
    assert theirs[5:] == [str({"error": text}) for text in ("less than 0", "nobody knows", "Tool fly not found.")]
    assert [call.result for call in ours[5:7]] == ["Error: ValueError: less than 0", "Error: LookupError: nobody knows"]
    assert mine.log == their.log == [5, 6, -1]
    assert call_number(mine, "get_reward") == trainer.reward_funcs[0](environments=[their])[0] == 10.0


def _under_trl(trainer, environment, calls):
    """The text of the result that TRL's loop adds to the messages."""
    tools = [getattr(environment, tool.__name__) for tool in trainer.tools]
    trainer._async_tool_dicts = [{tool.__name__: tool for tool in tools if tool.__name__ == "ask"}]
    trainer._sync_tool_dicts = [{tool.__name__: tool for tool in tools if tool.__name__ != "ask"}]
    trainer._batch_environments = [None]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    ids = trainer.processing_class.encode("call" + trainer.processing_class.eos_token)
    completions = trainer._tool_call_loop([ROW["prompt"].copy()], [[1]], [ids], [messages], None, None, {})[1]
    (result,) = [message["content"] for message in completions[0] if message["role"] == "tool"]
    return result
