"""Tools that return pictures: what the policy reads is what the model itself makes of the whole dialogue's pixels."""

import base64
import gc
import importlib.util
import io
import json
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Callback
from PIL import Image, ImageDraw

from grail_lightning import (
    DatasetSpec,
    DrGRPO,
    EnvironmentTask,
    EpisodeLimits,
    GrailModule,
    HFEngine,
    KeepRollouts,
    Kept,
    MathData,
    PredictionWriter,
    Sampling,
    VLLMServer,
)
from grail_lightning.answers import LastNumber
from grail_lightning.core.engines.base import TurnRequest
from grail_lightning.core.environments.calls import ParsedCall
from grail_lightning.core.environments.tools import ToolSet, run_calls
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.records.episode import episode_json, read_episode, transcript
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, pictures_in
from grail_lightning.core.step.episodes import play
from grail_lightning.credit import GRAIL
from tests.app.views.test_page import data_of
from tests.picture_models import MAKERS, checkpoint, cut_off, image, letters, pictures, question, seeing
from tests.runs import Watch, trainer, weights
from tests.test_picture_runs import module_of
from tests.test_pictures import Seen
from tests.tolerance import assert_near
from tests.written_turns import WritingEngine, WrittenTurns

END = "<end>"
CALLS = {
    "tags": "<draw>{}</draw>",
    "hermes": '<tool_call>{{"name": "draw", "arguments": {{"seed": {}}}}}</tool_call><end>',
}
CHAT = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Sketch:
    """It shows two pictures among texts, one of which looks like a third."""

    def reset(self, images: list[Image.Image] | None = None, **row):
        """Begin with the pictures of the prompt."""
        self.images = images

    def draw(self, seed: int) -> list[str | Image.Image]:
        """Draw.

        Args:
            seed: What is drawn.
        """
        return ["picture ", image(seed), " of <image> ", image(seed + 1, 30, 20)]


def task_of(environment=Sketch, calls="tags", **options):
    bare = {"instruction": "", "tool_instruction": "", "answer": LastNumber(), "rewards": [letters]}
    return EnvironmentTask(environment, calls=calls, **(bare | options))


def roomy(name, folder):
    """A policy with room for many pictures."""
    policy = seeing(name, folder).eval()
    policy.model.config.get_text_config().max_position_embeddings = 4096
    return policy


def played(policy, task, texts, shown=()):
    """The rollouts with these turns, of a prompt with the pictures `shown`."""
    engine = WritingEngine(texts)
    engine.update_weights(policy)
    prompt = replace(task.prompt({"problem": "what is 3 + 4 ?", "answer": "7"}), messages=question(*shown))
    return play(engine, policy, [prompt], len(texts), Sampling(max_response_length=200), [*range(len(texts))])


def told(batch, row=0):
    """The ids that the environment put into a row."""
    return batch.response_ids[row][batch.valid_mask[row] & ~batch.response_mask[row]].tolist()


@pytest.mark.parametrize(
    ("name", "calls"), [("idefics3", "hermes"), ("llava", "tags"), ("qwen2.5-vl", "hermes"), ("qwen2.5-vl", "tags")]
)
def test_log_probabilities_are_those_of_the_model_called_with_the_pixels_of_the_whole_dialogue(name, calls, tmp_path):
    policy = roomy(name, tmp_path)
    processor = policy.vision.pictures.processor
    if calls == "hermes":
        policy.tokenizer.chat_template = CHAT
    (first,) = pictures(1)
    answers = [f"so \\boxed{{7}}{END}", f"it is 8 .{END}"]
    batch = played(policy, task_of(calls=calls), [[CALLS[calls].format(3 * k), answers[k]] for k in (0, 1)], [first])
    for trees in (None, [0]):
        found = policy(policy.layout(batch.select(torch.arange(2)), trees))
        for row in range(2):
            shown = [first.open(), image(3 * row), image(3 * row + 1, 30, 20)]
            result = "picture <image> of < image> <image>"
            if calls == "tags":
                text = processor.apply_chat_template(question(first), tokenize=False)
                between = f"\n<result>{result}</result>\n"
            else:
                text = "draw\nuser:<image>what is 3 + 4 ?<end>\nassistant:"
                between = f"\ntool:{result}<end>\nassistant:"
            text += CALLS[calls].format(3 * row) + between + answers[row]
            made = processor(text=[text], images=[shown], return_tensors="pt")
            valid, place = batch.attention_mask[row], policy.vision.pictures.place_id
            ids = batch.input_ids[row][valid].long()
            assert made["input_ids"][0].tolist() == [place if i >= FIRST_PICTURE_ID else i for i in ids.tolist()]
            pixels = {k: v.double() if v.is_floating_point() else v for k, v in made.items()}
            logprobs = policy.model(**pixels).logits.log_softmax(-1)[0, :-1]
            sampled = batch.response_mask[row]
            places = (torch.nn.functional.pad(sampled, (batch.prompt_width, 0))[valid]).nonzero().flatten()
            expected = logprobs[places - 1].gather(-1, ids[places][:, None]).squeeze(1)
            assert_near(found[row][sampled], expected, 16, torch.float32)
            assert policy.tokenizer.decode(ids[places]) == CALLS[calls].format(3 * row) + answers[row]
            assert sum(i >= FIRST_PICTURE_ID for i in told(batch, row)) > 0
    assert told(batch, 0) != told(batch, 1)
    episode = batch.episodes[0]
    assert episode.calls[0].result == "picture <image> of < image> <image>"
    # Kept as text with places for its pictures.
    assert "    picture <image> of < image> <image>" in transcript(episode)
    again = read_episode(episode_json(episode))
    assert (again.calls[0].result, again.calls[0].pictures) == (episode.calls[0].result, ())


@pytest.mark.parametrize("name", [*MAKERS])
def test_a_turn_behind_a_picture_continues_from_the_keys_and_values_of_the_turn_before(name, tmp_path):
    policy, engine = seeing(name, tmp_path).eval(), HFEngine()
    engine.update_weights(policy)
    shown = pictures(2)
    ids = policy.encode(question())
    with engine.turns(Sampling(max_response_length=6)) as sampler:
        for turn, picture in enumerate(shown):
            requests = [TurnRequest(row=0, prompt=None, ids=ids, limit=6, seed=turn)]
            assert bool(sampler.waiting) is bool(turn), "the second turn continues"
            (made,) = sampler(requests)
            whole = torch.tensor([ids + made.ids])
            own = policy.hidden(torch.ones_like(whole, dtype=bool), whole)
            expected = policy.head(own).log_softmax(-1)[0, len(ids) - 1 : -1]
            expected = expected.gather(-1, torch.tensor(made.ids)[:, None]).squeeze(1)
            assert_near(torch.tensor(made.logprobs), expected.float(), 64, torch.float32)
            ids = [*ids, *made.ids, *policy.vision.pictures.hold(picture)]


SHOWN = {
    "too many": lambda: [image(0)] * 17,
    "ten thousand": lambda: ["a", *[image(0)] * 10_000],
    "too large": lambda: Image.new("1", (5000, 5000)),
    "empty": lambda: Image.new("RGB", (0, 5)),
    "cut off": lambda: Image.open(io.BytesIO(cut_off())),
    "too flat": lambda: Image.new("RGB", (100_000, 1)),
}


class Showing:
    """It shows one of these without saying that it shows pictures."""

    def reset(self, **row):
        """Begin."""

    def draw(self, what: str) -> str:
        """Draw.

        Args:
            what: Which one.
        """
        return SHOWN[what]()


def test_a_picture_that_cannot_be_used_is_an_observation(tmp_path):
    policy = roomy("qwen2.5-vl", tmp_path)
    task = task_of(Showing, limits=EpisodeLimits(max_failures=20, result_characters=100))
    texts = [*(f"<draw>{what}</draw>" for what in SHOWN), f"7 .{END}"]
    batch = played(policy, task, [texts])
    assert batch.episodes[0].end == "answered"
    calls = batch.episodes[0].calls
    assert [call.status for call in calls] == ["failed"] * len(SHOWN)
    assert all(call.result.startswith("Error: ") and not call.pictures for call in calls)
    assert "a result can have 16 pictures, but got 10,000" in calls[1].result
    assert "16,777,216 pixels, but got 5000 x 5000" in calls[2].result
    assert "the model's processor, which says" in calls[5].result
    assert all(i < FIRST_PICTURE_ID for i in told(batch))


@pytest.mark.parametrize(
    "returned",
    [
        lambda shown: ("look", shown),
        lambda shown: [{"type": "text", "text": "look"}, {"type": "image", "image": shown}],  # TRL's form.
    ],
)
def test_a_tuple_and_parts_of_a_message_are_a_text_and_a_picture(returned, monkeypatch):
    monkeypatch.setitem(SHOWN, "this", lambda: returned(image(3)))
    ((call,),) = run_calls([(ToolSet(Showing), Showing(), [ParsedCall("draw", {"what": "this"})])], [EpisodeLimits()])
    text, shown = call.parts
    assert (text, shown.open().tobytes()) == ("look", image(3).tobytes())


class Album(Sketch):
    """It goes on drawing on the picture that it has shown, and on those of the prompt."""

    def draw(self, seed: int) -> Image.Image:
        """Draw.

        Args:
            seed: How.
        """
        self.images[0].putpixel((0, 0), (seed, seed, seed))
        return self.images[0]


def test_a_picture_stays_what_it_was_when_a_tool_draws_on_it_and_its_ids_are_free_once_it_is_gone(tmp_path):
    policy, (first,) = roomy("llava", tmp_path), pictures(1)
    tokens = policy.vision.pictures
    ends = []
    for _ in range(2):
        texts = [CALLS["tags"].format(k) for k in (0, 9, 9)] + [f"7 .{END}"]
        batch = played(policy, task_of(Album), [texts] * 2, [first])
        shown = [call.pictures[0] for episode in batch.episodes for call in episode.calls]
        assert [picture.open().getpixel((0, 0)) for picture in shown] == [(k, k, k) for k in (0, 9, 9)] * 2
        assert shown[0] == shown[3] != shown[1] == shown[2]
        told_ids = [i for i in told(batch) if i >= FIRST_PICTURE_ID]
        assert told_ids[:16] != told_ids[16:32] == told_ids[32:]
        assert told(batch, 0) == told(batch, 1)
        ends.append(tokens._end)
        assert len(tokens._held) == 3
        del batch, shown
        gc.collect()
        assert [held.ids for held in tokens._held.values()] == [first.held.ids]
    assert ends[0] == ends[1]
    assert first.open().tobytes() == image(0).tobytes()


@pytest.mark.parametrize(
    ("environment", "policy", "engine", "words"),
    [
        (Sketch, "words", None, "A tool of `Sketch` returns pictures, but the policy takes text alone. Set another"),
        (Sketch, None, VLLMServer(["http://127.0.0.1:1"]), "`VLLMServer` does not sample from prompts with pictures"),
    ],
)
def test_a_run_that_cannot_show_pictures_says_so_before_the_weights_are_loaded(
    environment, policy, engine, words, tmp_path
):
    folder = policy or checkpoint("llava", tmp_path)
    module = GrailModule(folder, sampling=Sampling(max_response_length=8), engine=engine)
    data = MathData(train=[{"problem": "3 + 4 ?", "answer": "7"}], task=task_of(environment), prompts_per_batch=1)
    with pytest.raises(ValueError, match=re.escape(words)):
        trainer(1).fit(module, data)
    assert module.policy is None


def test_a_text_policy_that_is_shown_a_picture_after_all_ends_the_run():
    from tests.test_episodes import played as played_as_text

    with pytest.raises(ValueError, match=r"The tool `draw` returned a picture, but the policy takes text alone\."):
        played_as_text([task_of(Showing)], [["<draw>too flat</draw>", "7"]])


class Half(HFEngine):
    """An engine whose first turns are written, each with a drawing of its own, and whose second ones are sampled."""

    @contextmanager
    def turns(self, sampling):
        """See `RolloutEngine.turns`."""
        begun = []

        def sample(requests):
            begun.append(requests)
            if len(begun) > 1:
                return inner(requests)
            texts = [[CALLS["tags"].format(request.seed % 9)] for request in requests]
            return WrittenTurns(self._policy.tokenizer, texts)(requests)

        with super().turns(sampling) as inner:
            yield sample


def _run(folder, train, steps, *callbacks, **options):
    """A fit on pictures in prompts and in results: the module, and what its steps gave."""
    objective, sampling = DrGRPO(clip_high=0.28, kl_coefficient=0.1), Sampling(max_response_length=30)
    module = module_of(folder, sampling=sampling, engine=Half(), objective=objective, credit=GRAIL())
    data = MathData(train=DatasetSpec(train, images="picture"), task=task_of(), prompts_per_batch=2, **options)
    return module, data, trainer(steps, *callbacks)


class _Counting(Callback):
    def on_train_start(self, trainer, pl_module):
        self.seen = Seen(pl_module.policy)


@pytest.mark.filterwarnings("ignore:.* of the rollouts ended by the limit")
def test_a_run_learns_behind_pictures_and_its_frozen_tower_reads_each_of_them_once(tmp_path):
    """And what it predicts is kept with them."""
    folder = checkpoint("llava", tmp_path / "model")
    train = [{"problem": f"what is 3 + {k} ?", "answer": str(3 + k), "picture": image(k)} for k in range(4)]
    file, watch, counting = tmp_path / "predictions.parquet", Watch(), _Counting()
    writing = KeepRollouts(str(tmp_path / "rollouts")), PredictionWriter(str(file))
    red = Image.new("RGB", (16, 16), (200, 30, 40))
    predicted = DatasetSpec([train[0] | {"picture": red}], images="picture")
    module, data, run = _run(folder, train, 2, watch, counting, *writing, predict=predicted)
    run.fit(module, data)
    begun = load_policy(folder).state_dict()
    assert any(not torch.equal(begun[n], p) for n, p in weights(module).items())
    shown = [call.pictures for output in watch.outputs for e in output.batch.episodes for call in e.calls]
    assert all(len(each) == 2 for each in shown)
    own = {picture for output in watch.outputs for p in output.batch.prompts for picture in pictures_in(p.messages)}
    assert counting.seen.number == len({*own, *(picture for each in shown for picture in each)})
    assert all((o.batch.response_ids[o.batch.response_mask] < FIRST_PICTURE_ID).all() for o in watch.outputs)

    for steps, path in ((1, None), (2, tmp_path / "one.ckpt")):
        resumed, of_resumed, trainer = _run(folder, train, steps)
        trainer.fit(resumed, of_resumed, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert all(torch.equal(weights(module)[n], p) for n, p in weights(resumed).items())

    run.predict(module, data)
    (row,) = pq.read_table(file).to_pylist()
    assert [tokens for tokens in row["tokens"] if tokens == "<image>"] == ["<image>"] * 2
    pictures = json.loads(row["pictures"])
    assert len(pictures) == 3
    assert all(one["scores"] is None for one in pictures) is (row["box_start"] is None)
    kept = Image.open(io.BytesIO(base64.b64decode(pictures[0]["src"].partition(",")[2])))
    assert kept.tobytes() == red.tobytes()
    assert data_of(file.with_suffix(".html").read_text())["groups"][0]["sources"] == [one["src"] for one in pictures]
    module, data, run = _run(folder, train, 1, kept=Kept(folder=str(tmp_path / "rollouts")))
    with pytest.raises(ValueError, match=r"`data\.kept` cannot read rollouts with pictures"):
        run.predict(module, data)


def test_the_drawing_of_the_documentation(tmp_path):
    file = Path(__file__).parents[1] / "docs" / "examples" / "my_drawing.py"
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("my_drawing", file))
    sys.modules["my_drawing"] = module  # Where the hints of its tool are looked up.
    module.__spec__.loader.exec_module(module)
    boxes = ['{"left": 1, "top": 2, "right": 5, "bottom": 6}', '{"left": 1, "top": 2, "right": 99, "bottom": 6}']
    (first,) = pictures(1)
    task = task_of(module.Marker)
    assert task.tools.show_pictures
    batch = played(roomy("llava", tmp_path), task, [[*(f"<box>{box}</box>" for box in boxes), f"7 .{END}"]], [first])
    drawn, refused = batch.episodes[0].calls
    expected = first.open()
    ImageDraw.Draw(expected).rectangle((1, 2, 5, 6), outline=(220, 0, 0))
    assert drawn.pictures[0].open().tobytes() == expected.tobytes()
    assert refused.result == "Error: ValueError: a box must lie within 16 x 16 pixels"
