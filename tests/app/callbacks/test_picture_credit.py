"""The saliency of picture tokens, and the parts of the picture that they see."""

import pytest
import torch
from torch.nn import functional as F

from grail_lightning import MathTask, Prompt, RolloutBatch, build_batch
from grail_lightning.answers import Verifier
from grail_lightning.core.credit.saliency import picture_saliency
from grail_lightning.core.policy.vision import _Expansion
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, Picture
from grail_lightning.core.rollout.grading import grade_and_locate
from tests.picture_models import MAKERS, image, pictures, question, seeing
from tests.tolerance import assert_near

TASK = MathTask()


@pytest.mark.parametrize(
    ("name", "size"), [("idefics3", (64, 64)), ("idefics3", (96, 48)), ("llava", (96, 48)), ("qwen2.5-vl", (96, 48))]
)
def test_a_token_sees_the_part_of_the_picture_that_is_said(name, size, tmp_path):
    policy = seeing(name, tmp_path).eval()
    for key, weight in policy.named_parameters():
        # Without attention a patch sees itself alone.
        if any(tower in key and part in key for tower, part in (("vision", "out_proj"), ("visual", "attn.proj"))):
            torch.nn.init.zeros_(weight)
    tokens, before = policy.vision.pictures, image(0, *size)
    layers = tokens.layers(Picture(before))
    assert len(layers) == {"idefics3": 2, "llava": 1, "qwen2.5-vl": 1}[name]

    def embeddings(drawn):
        asked = question(Picture(drawn))
        ids = torch.tensor([i for i in policy.encode(asked) if i >= FIRST_PICTURE_ID])
        return policy.embed(ids[None])[0]

    plain, begun = embeddings(before), 0
    for layer in layers:
        cells = [
            (left + wide * column / columns, top + high * row / rows, wide / columns, high / rows)
            for left, top, wide, high, rows, columns in layer
            for row in range(rows)
            for column in range(columns)
        ]
        for k, (left, top, wide, high) in enumerate(cells):
            drawn = before.copy()
            share = (left + wide / 4, top + high / 4, left + 3 * wide / 4, top + 3 * high / 4)
            place = [round(part * whole) for part, whole in zip(share, size * 2, strict=True)]
            box = (place[0], place[1], max(place[2], place[0] + 1), max(place[3], place[1] + 1))
            drawn.paste((255, 0, 0), box)
            changed = (embeddings(drawn) - plain).norm(dim=1)[begun : begun + len(cells)]
            assert int(changed.argmax()) == k
        begun += len(cells)
    assert begun == len(plain)


@pytest.mark.parametrize("name", [*MAKERS])
def test_saliency_of_picture_tokens_is_gradient_times_embedding_at_their_own_places(name, tmp_path):
    policy = seeing(name, tmp_path).eval()
    prompts = [Prompt(messages=question(*shown), reference="7", task=TASK) for shown in (pictures(2), pictures(1), [])]
    texts = ["so \\boxed{7}", "so 7", "\\boxed{8}"]
    made = build_batch(policy, prompts, 1, [policy.tokenizer(text)["input_ids"] for text in texts], [True] * 3)
    with Verifier() as verifier:
        graded = grade_and_locate(made, verifier, policy.tokenizer)
    batch: RolloutBatch = graded.with_advantages(graded.correct.float() * 2 - 1)
    explained = batch.answer.whole
    found = picture_saliency(policy, batch, explained, token_budget=10_000)
    assert [len(own) for own in found] == [sum(i >= FIRST_PICTURE_ID for i in policy.encode(prompts[0].messages)), 0, 0]
    ids = batch.input_ids[:1][:, batch.attention_mask[0]].long()
    embeds = policy.embed(ids).detach().requires_grad_()
    positions = policy.position_ids(ids, torch.arange(ids.shape[1])[None])
    logprobs = policy.model(inputs_embeds=embeds, position_ids=positions).logits.log_softmax(-1)[0, :-1]
    logprobs = logprobs.gather(-1, ids.clamp(max=600)[0, 1:, None])[:, 0]
    places = F.pad(explained[0], (batch.prompt_width, 0))[batch.attention_mask[0]]
    (gradient,) = torch.autograd.grad(-logprobs[places[1:]].sum(), embeds)
    expected = (gradient * embeds).norm(dim=-1)[ids >= FIRST_PICTURE_ID]
    assert_near(torch.tensor(found[0]).double(), expected.detach(), 64, torch.float32)


def test_parts_of_which_no_tag_tells_the_place_are_not_guessed(tmp_path):
    """Nine tokens of three tiles in one run are no grid of the whole, nor are rows with breaks between them."""
    tokens = seeing("llava", tmp_path).vision.pictures
    place, picture = tokens.place, Picture(image(0, 32, 32))
    for text, views, layers in ((place * 9, 1, 1), (place * 9, 4, 0), (f"{place * 4}[BREAK]{place * 4}", 1, 0)):
        tokens._expansions[picture.size] = _Expansion(text, text.count(place), None, views)
        assert len(tokens.layers(picture)) == layers
