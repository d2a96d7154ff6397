r"""Make the packaged policy `grail_lightning/worlds/assets/charts`: a tiny model that sees, draws and errs on purpose.

An Idefics3 of 1.3 M parameters first learns to mark the elements of charts, then imitates demonstrations in which
drawings are sometimes wrong. See make_arithmetic_policy.py for why.

    python scripts/make_charts_policy.py --output build/begun_charts
    python scripts/make_charts_policy.py --start build/begun_charts --seed 1 --num-reading 0 --num-batches 400 \
      --learning-rate 0.001 --slip 0.12 --misconception 0.7

The first one learns to see, and the second one to err more often. The same seed, thread count and library versions give
the same weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from policy_making import ASSETS, Training, make_repeatable, make_tokenizer, pad_right, parse_arguments, save, shape
from policy_measures import Page, write_card
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from grail_lightning import ChartsData, Prompt, Task
from grail_lightning.core.records.picture import with_pictures
from grail_lightning.worlds.charts.environment import COLOURS, PIXELS, UNITS
from grail_lightning.worlds.charts.task import ChartProblem, ChartSpace, chart_demonstration

# A tag is one token, and so is a number; both numbers and words own the blank in front of them.
PIECES = r"</?[\p{L}-]+>| ?\p{N}+| ?\p{L}+|\s|[^\s\p{L}\p{N}<]|<"
VOCAB_SIZE = 400
NUM_PROBLEMS, MAX_LENGTH = 128, 48
SIZE, PATCH = UNITS * PIXELS, 16
NUM_PATCHES = (SIZE // PATCH) ** 2
TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
)
Rows = list[tuple[list[int], list[int], list[Image]]]


@dataclass(frozen=True, kw_only=True)
class ChartsRecipe(Training):
    """How a policy that draws is made; the rates are those of `chart_demonstration`."""

    num_batches: int = 2400
    batch_size: int = 48
    learning_rate: float = 3e-3
    num_reading: int = 400  # The optimiser steps of the first part, in which elements are marked by their colours.
    slip: float = 0.06
    misconception: float = 0.4
    start: str = ""  # The folder of a policy whose weights are the beginning; random ones if empty.


def make_processor() -> Idefics3Processor:
    """The processor: a picture of any size is resized to one tile."""
    texts = [
        "<line></line><box></box><point></point><result></result><global-img>",
        " ".join(["", *COLOURS, "rise", "fall", *map(str, range(UNITS + 1))]),
        "\n".join(map(str, range(UNITS + 1))),
        *(problem.text for problem in ChartSpace().draw(200, "train")),
        "Answer: ",
    ]
    tokenizer = make_tokenizer(texts, VOCAB_SIZE, PIECES)
    image = Idefics3ImageProcessorPil(
        size={"longest_edge": SIZE},
        max_image_size={"longest_edge": SIZE},
        do_image_splitting=False,
        image_mean=[0.999]
        * 3,  # White is almost 0, so that what is drawn stands out; Idefics3 drops pictures of zeros.
        image_std=[0.5] * 3,
    )
    return Idefics3Processor(image, tokenizer, image_seq_len=NUM_PATCHES, chat_template=TEMPLATE)


def make_model(tokenizer: Any) -> Idefics3ForConditionalGeneration:
    """Two layers that see and four that write, of width 128, with random weights."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    layers = {"hidden_size": 128, "num_attention_heads": 4, "initializer_range": 0.05}
    config = Idefics3Config(
        text_config=layers
        | ends
        | {
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 4,
            "intermediate_size": 384,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "bos_token_id": None,
            "tie_word_embeddings": True,
        },
        vision_config=layers
        | {"num_hidden_layers": 2, "intermediate_size": 256, "image_size": SIZE, "patch_size": PATCH},
        scale_factor=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    config.dtype = torch.float32
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    return model


class Encoder:
    """Solutions as token ids, targets (-100 on what a policy does not sample) and pictures."""

    def __init__(self, processor: Idefics3Processor) -> None:
        self.tokenizer = processor.tokenizer
        made = processor(text=["<image>"], images=[[ChartSpace().draw(1, "train")[0].chart.picture()]])
        self.shown = list(made["input_ids"][0])
        self.ids = {text: self._encode(text) for text in ("\n", "\n<result>", "</result>\n")}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def reading(self, problem: ChartProblem, rng: random.Random) -> tuple[list[int], list[int], list[Image]]:
        """The mark of each element of a chart, in any order."""
        ids, chart = self.shown.copy(), problem.chart
        targets = [-100] * len(ids)
        for number in rng.sample(range(len(chart.values)), len(chart.values)):
            tool, places = chart.element(number)
            asked = self._encode(f" {chart.colours[number]}")
            said = self._encode(f"<{tool}>{' '.join(map(str, places))}</{tool}>")
            ids, targets = ids + asked + said, targets + [-100] * len(asked) + said
        return ids, targets, [chart.picture()]

    def solution(
        self, problem: ChartProblem, rng: random.Random, **rates: float
    ) -> tuple[list[int], list[int], list[Image]]:
        """A demonstration, as it is sampled and as its pictures come back."""
        ids, pictures = self.shown + self._encode(problem.text) + self.ids["\n"], [problem.chart.picture()]
        targets = [-100] * len(ids)
        for said, told in chart_demonstration(problem, rng, **rates):
            sampled = self._encode(said)
            given = [] if told is None else [*self.ids["\n<result>"], *self.shown, *self.ids["</result>\n"]]
            ids, targets = ids + sampled + given, targets + sampled + [-100] * len(given)
            pictures += [] if told is None else [told]
        end = self.tokenizer.eos_token_id
        return [*ids, end], [*targets, end], pictures


def pixels(pictures: list[Image]) -> torch.Tensor:
    """``[N, 1, 3, H, W]``, as the processor makes them but for its shift by a thousandth."""
    array = np.stack([np.asarray(picture) for picture in pictures]).transpose(0, 3, 1, 2)[:, None]
    return torch.from_numpy(array / 127.5 - 2).float()


def logits(model: Idefics3ForConditionalGeneration, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits of the targets ``[k, V]``, the targets ``[k]`` and their rows ``[k]``."""
    ids, targets = pad_right([(ids, targets) for ids, targets, _ in rows], pad=0)
    targets = targets[:, 1:]
    features = model.get_image_features(pixels([p for row in rows for p in row[2]]), return_dict=True).pooler_output
    shown = ids == model.config.image_token_id
    embeds = model.get_input_embeddings()(ids).masked_scatter(shown[..., None], torch.cat(list(features)).float())
    hidden = model.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, :-1]
    learnt = targets != -100
    return model.lm_head(hidden[learnt]), targets[learnt], learnt.nonzero()[:, 0]


def batches(encoder: Encoder, recipe: ChartsRecipe) -> Iterator[Rows]:
    """The batches of both parts; those of the second have solutions of about one length, so that little is padded."""
    rng, size = random.Random(recipe.seed), recipe.batch_size
    problems = iter(ChartSpace().draw((recipe.num_reading + recipe.num_batches + 8) * size, "train", recipe.seed))
    for _ in range(recipe.num_reading):
        yield [encoder.reading(next(problems), rng) for _ in range(size)]
    rates = {"slip": recipe.slip, "misconception": recipe.misconception}
    for _ in range(0, recipe.num_batches, 8):
        rows = [encoder.solution(next(problems), rng, **rates) for _ in range(8 * size)]
        rows.sort(key=lambda row: len(row[0]))
        yield from rng.sample([rows[k : k + size] for k in range(0, len(rows), size)], 8)


@torch.no_grad()
def probe(model: Idefics3ForConditionalGeneration, encoder: Encoder) -> str:
    """The shares of clean held-out solutions and readings whose every token is the likeliest."""
    rng, found = random.Random(0), []
    problems = ChartSpace().draw(128, "validation")
    for rows in ([encoder.reading(p, rng) for p in problems], [encoder.solution(p, rng) for p in problems]):
        scores, targets, row = logits(model, rows)
        wrong = scores.argmax(-1) != targets
        whole = torch.zeros(len(rows)).index_add(0, row, wrong.float()) == 0
        found.append(f"{1 - wrong.float().mean():.3f} of tokens, {whole.float().mean():.3f} of rows")
    return f"readings {found[0]}; solutions {found[1]}"


def imitate(model: Idefics3ForConditionalGeneration, encoder: Encoder, recipe: ChartsRecipe) -> None:
    """Maximise the likelihood of what is sampled."""
    steps = recipe.num_reading + recipe.num_batches
    model.set_attn_implementation("eager")  # On a CPU faster than SDPA's backward pass at these lengths.
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape(step / steps))
    begun = time.perf_counter()
    for step, rows in enumerate(batches(encoder, recipe)):
        with torch.autocast("cpu", torch.bfloat16):
            scores, targets, _ = logits(model, rows)
        loss = F.cross_entropy(scores.float(), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

        if step % 50 == 49:
            seconds = time.perf_counter() - begun
            print(f"batch {step + 1}: {seconds:.0f} s, loss {loss.item():.3f}; {probe(model, encoder)}", flush=True)


def prompt_of(problem: ChartProblem, task: Task) -> Prompt:
    """The prompt with the picture."""
    row = problem.row()
    pictures, prompt = [row.pop("image")], task.prompt(row)
    return replace(prompt, messages=with_pictures(prompt.messages, pictures, "a chart"))


def page_of(recipe: ChartsRecipe, output: Path) -> Page:
    """The README, with a question about bars."""
    problem = next(p for p in ChartSpace(asks=["difference"]).draw(99, "test") if p.chart.form == "bars")
    told = "\n<result>(the picture with the box)</result>\n"
    turns = chart_demonstration(problem, random.Random(0))
    bars = ", ".join(f"{c} {v}" for c, v in zip(problem.chart.colours, problem.chart.values, strict=True))
    return Page(
        output=output,
        recipe=recipe,
        script="make_charts_policy.py",
        what="An Idefics3 of {:,} parameters with a byte-level tokenizer of its own, which draws on small charts,\n"
        f"looks at them again and errs on purpose. A picture has {NUM_PATCHES} tokens.",
        example=(
            f"{problem.text} (bars: {bars})",
            "".join(said + told * (picture is not None) for said, picture in turns),
        ),
        errors="In its demonstrations a drawing is at the wrong height or at a neighbour, the first peak is taken\n"
        "for the largest, what is at a level for above it, the neighbour for one of two colours, and the last two\n"
        "elements for the first and the last.",
        beginning="from what the script makes without other options than `--output`, " * bool(recipe.start),
    )


def main() -> None:
    """Make, measure and save."""
    options, recipe = parse_arguments(__doc__, ChartsRecipe(), ASSETS / "charts")
    make_repeatable(recipe, options.threads)
    processor, begun = make_processor(), time.process_time()
    model = make_model(processor.tokenizer)
    if recipe.start:
        model.load_state_dict(Idefics3ForConditionalGeneration.from_pretrained(recipe.start).float().state_dict())
    print(f"{model.num_parameters():,} parameters, {len(processor.tokenizer)} tokens")
    imitate(model, Encoder(processor), recipe)
    save(model, processor, options.output, torch.bfloat16)
    minutes, task = (time.process_time() - begun) / 60, ChartsData().task
    drawn = {asks: ChartSpace(asks=[asks]).draw(NUM_PROBLEMS, "validation") for asks in ChartSpace().asks}
    held_out = {asks: [prompt_of(problem, task) for problem in problems] for asks, problems in drawn.items()}
    write_card(page_of(recipe, options.output), held_out, MAX_LENGTH, minutes)


if __name__ == "__main__":
    main()
