"""Prompts with pictures: the policy computes what the model itself computes from pixels, and shares what is equal.

Transformers' norms compute in float32, also in a model in float64: roundings are float32's.
"""

import copy

import PIL.Image
import pytest
import torch

from grail_lightning import HFEngine, Prompt, Sampling, build_batch
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import LoadedPolicy, as_source
from grail_lightning.core.policy.vision import vision_parameters
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, Picture
from tests.picture_models import MAKERS, TILES, image, pictures, plain, question, seeing
from tests.runs import TASK
from tests.tolerance import assert_near

NAMES = list(MAKERS)


def _prompts(*messages):
    return [Prompt(messages=m, reference="7", task=TASK) for m in messages]


def _asked():
    """Prompts with one picture, with two of which one is the first's, with a large one, and with none."""
    first, second = pictures(2)
    (large,) = pictures(1, 30, 20)
    text = [{"role": "user", "content": "what is 2 + 2 ?"}]
    return [question(first), question(second, first, text="how many ?"), question(large), text]


def _own_logprobs(policy, messages, response):
    """What the model gives for a response if it is called in its own way, with pixels."""
    processor = policy.vision.pictures.processor
    bare, images = plain(messages) if isinstance(messages[0]["content"], list) else (messages, [])
    bare = [
        m if isinstance(m["content"], list) else m | {"content": [{"type": "text", "text": m["content"]}]} for m in bare
    ]
    text = processor.apply_chat_template(bare, add_generation_prompt=True, tokenize=False)
    made = processor(text=[text], images=[images] if images else None, return_tensors="pt")
    prompt = made.pop("input_ids")
    ids = torch.cat([prompt, torch.tensor([response])], 1)
    if "mm_token_type_ids" in made:
        made["mm_token_type_ids"] = torch.nn.functional.pad(made["mm_token_type_ids"], (0, len(response)))
    pixels = {k: v.double() if v.is_floating_point() else v for k, v in made.items() if k != "attention_mask"}
    logits = policy.model(input_ids=ids, attention_mask=torch.ones_like(ids), **pixels).logits
    logprobs = logits.log_softmax(-1)[0, prompt.shape[1] - 1 : -1]
    return prompt[0].tolist(), logprobs.gather(-1, torch.tensor(response)[:, None]).squeeze(1)


def test_a_policy_is_loaded_inside_a_context_of_another_device(tmp_path):
    """Lightning loads on a GPU that way. Here what is made on the default device has no data."""
    policy = seeing("qwen2.5-vl", tmp_path)
    source = LoadedPolicy(policy.model, policy.tokenizer, policy.vision.pictures.processor)
    with torch.device("meta"):
        again = load_policy(as_source(source))
    assert again.device == torch.device("cpu")


FORMS = {"idefics3": ["padded", "trees"], "llava": ["packed"], "qwen2.5-vl": ["padded", "packed", "trees"]}


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_log_probabilities_are_those_of_the_model_called_with_pixels(name, form, tmp_path):
    policy, trees = seeing(name, tmp_path, packing=form == "packed").eval(), form == "trees"
    responses = [[30, 41, 52, 3], [30, 41, 17]]
    rows, expected = _asked(), []
    batch = build_batch(policy, _prompts(*rows), 2, [r for _ in rows for r in responses], [True] * 2 * len(rows))
    for messages in rows:
        for response in responses:
            prompt, logprobs = _own_logprobs(policy, messages, response)
            expected.append(logprobs)
            assert len(prompt) == len(policy.encode(messages))
            place = policy.vision.pictures.place_id
            assert prompt == [place if i >= FIRST_PICTURE_ID else i for i in policy.encode(messages)]
    layout = policy.layout(batch.select(torch.arange(len(batch))), range(0, len(batch), 2) if trees else None)
    found = policy(layout)
    for row, logprobs in enumerate(expected):
        assert_near(found[row, : len(logprobs)], logprobs, 16, torch.float32)
    assert not trees or layout.shares


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["compact", "static"])
def test_rollouts_from_pictures_are_sampled_by_the_log_probabilities_of_training(name, method, tmp_path):
    policy = seeing(name, tmp_path).eval()
    engine = HFEngine(method=method)
    engine.update_weights(policy)
    batch = engine.generate(_prompts(*_asked()), 4, Sampling(max_response_length=8), 5)
    found = policy(policy.layout(batch.select(torch.arange(len(batch)))))
    assert (batch.response_ids < FIRST_PICTURE_ID).all()
    assert len({tuple(row) for row in batch.response_ids.tolist()}) > 8
    # The sampler's are kept in float32.
    mask = batch.response_mask
    assert_near(found[mask].float(), batch.sampling_logprobs[mask], 64, torch.float32)


def _gradients(policy, batch, rows, starts):
    policy.zero_grad(set_to_none=True)
    logprobs = policy(policy.layout(batch.select(torch.tensor(rows)), starts))
    logprobs.sum().backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "trained"), [("idefics3", False), ("llava", True), ("qwen2.5-vl", False), ("qwen2.5-vl", True)]
)
def test_gradients_of_rows_in_a_group_are_those_of_rows_run_apart(name, trained, tmp_path):
    policy = seeing(name, tmp_path, train_vision=trained)
    responses = [[30, 41, 52], [30, 41, 17, 9], [8, 2]]
    batch = build_batch(policy, _prompts(question(*pictures(1, 30, 20))), 3, responses, [True] * 3)
    together = _gradients(policy, batch, [0, 1, 2], [0])
    apart = [_gradients(policy, batch, [row], None) for row in range(3)]
    seen = {f"model.{n}" for n, _ in vision_parameters(policy.model)}
    assert bool(seen & together.keys()) is trained
    scale = max(g.abs().max() for g in together.values())
    for n, gradient in together.items():
        assert_near(gradient, sum(one[n] for one in apart), 16, torch.float32, scale)
    if trained:
        assert all(together[n].abs().max() > 0 for n in seen & together.keys() if n.endswith("weight"))


def test_a_trained_tower_has_the_gradients_of_the_model_called_with_pixels(tmp_path):
    policy, response = seeing("idefics3", tmp_path, train_vision=True), [30, 41, 52]
    messages = question(*pictures(2))
    ours = _gradients(policy, build_batch(policy, _prompts(messages), 1, [response], [True]), [0], None)
    policy.zero_grad(set_to_none=True)
    _own_logprobs(policy, messages, response)[1].sum().backward()
    for n, p in policy.named_parameters():
        if p.grad is not None:
            assert_near(ours[n], p.grad, 16, torch.float32, max(1.0, p.grad.abs().max()))


def test_pictures_that_share_a_text_are_refused_where_the_processor_makes_others_of_them(tmp_path, monkeypatch):
    policy = seeing("llava", tmp_path)
    tokens, words = policy.vision.pictures, "other tokens of a picture that is not the only one of its text"

    def fewer(inputs, **_):
        return tokens.place * (16 // len(inputs["pixel_values"]))

    monkeypatch.setattr(tokens.processor, "replace_image_token", fewer)
    assert sum(i >= FIRST_PICTURE_ID for i in policy.encode(question(*pictures(1)))) == 16
    with pytest.raises(ValueError, match=words):
        policy.encode(question(*pictures(2)))
    with pytest.raises(ValueError, match=words):
        tokens.expand("<image>", pictures(1), begins=False)


def test_a_picture_of_which_the_processor_makes_no_token_is_refused(tmp_path, monkeypatch):
    """Processors that merge patches make none of a picture that is too narrow."""
    policy = seeing("llava", tmp_path)
    monkeypatch.setattr(policy.vision.pictures.processor, "replace_image_token", lambda *_, **__: "")
    with pytest.raises(ValueError, match="a prompt: the picture must have a token, but LlavaProcessor makes none"):
        policy.encode(question(*pictures(1, 200, 10)))


class Seen:
    """Counts the pictures, or tiles of pictures, that a policy's tower reads."""

    def __init__(self, policy):
        inner = policy.model.model
        names = "vision_model", "vision_tower", "visual"
        tower = next(getattr(inner, name) for name in names if hasattr(inner, name))
        self.number = 0
        tower.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        patches = kwargs.get("grid_thw")
        self.number += len(patches if patches is not None else args[0] if args else kwargs["pixel_values"])


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_tower_runs_once_for_each_distinct_picture_of_a_step(name, tmp_path):
    policy = seeing(name, tmp_path)
    seen, engine = Seen(policy), HFEngine()
    engine.update_weights(policy)
    # Three distinct ones among five.
    prompts = _prompts(*[question(p) for p in [*pictures(3), *pictures(2)]])
    batch = engine.generate(prompts, 2, Sampling(max_response_length=4), 5)
    _gradients(policy, batch, list(range(len(batch))), None)
    _gradients(policy, batch, list(range(len(batch))), list(range(0, len(batch), 2)))
    assert seen.number == 3 * TILES[name]
    del prompts, batch
    policy.encode(question(*pictures(1)))
    assert not policy.vision._kept


def test_a_trained_tower_runs_once_for_a_group_in_each_pass(tmp_path):
    policy = seeing("llava", tmp_path, train_vision=True)
    batch = build_batch(policy, _prompts(*map(question, pictures(2))), 4, [[30, 41]] * 8, [True] * 8)
    seen = Seen(policy)
    _gradients(policy, batch, list(range(8)), None)
    assert seen.number == 2


def test_a_picture_whose_prompt_was_dropped_stays_known_to_an_equal_one(tmp_path):
    policy = seeing("llava", tmp_path).eval()
    first, other = _prompts(question(*pictures(1)))[0], _prompts(question(*pictures(1)))[0]
    build_batch(policy, [first], 1, [[30, 41]], [True])
    batch = build_batch(policy, [other], 1, [[30, 41]], [True])
    before = policy(policy.layout(batch.select(torch.tensor([0]))))
    del first
    policy.vision.forget()
    for one in (policy, copy.deepcopy(policy)):
        assert torch.equal(before, one(one.layout(batch.select(torch.tensor([0])))))


def test_pictures_of_pillow_that_differ_in_orientation_alone_are_two(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    for name, more in (("plain", {}), ("turned", {"exif": exif})):
        image(0, 8, 6).save(tmp_path / f"{name}.png", **more)
    plain, turned = (Picture(PIL.Image.open(tmp_path / f"{name}.png")) for name in ("plain", "turned"))
    assert plain.digest != turned.digest
    assert (plain.size, turned.size) == ((8, 6), (6, 8))
