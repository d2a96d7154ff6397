"""Pictures in the decoder's input: every picture token of each distinct picture has an id of its own.

The ids lie beyond every vocabulary. Equal ids are then equal inputs, so that prefix trees, packing, groups of equal
prompts, continuation from keys and values, saliency and log-probabilities treat pictures as they treat text; and no
such id can be sampled. `PictureTokens` gives out the ids, and `Vision` turns them into the decoder's input.

Shapes: ``k`` picture tokens, ``D`` width.
"""

from __future__ import annotations

import bisect
import copy
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from grail_lightning.policy.layout import gather_rows
from grail_lightning.policy.options import LoadedPolicy, PolicySource, first_line, read_config, reading
from grail_lightning.tasks.picture import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FIRST_PICTURE_ID = 2**30
"""The first id of a picture token. No vocabulary reaches it, and as many ids follow it below the limit of int32."""

_AT_ONCE = 32  # The most pictures that the vision tower reads in one call.


class _Held:
    """What is kept of one distinct picture as long as a prompt has it."""

    def __init__(self, picture: Picture, count: int) -> None:
        self.source, self.place, self.count = picture.source, picture.place, count
        self.pixels: dict[str, Tensor] | None = None  # Kept for a tower that is trained, which reads them often.


class PictureTokens:
    """The picture tokens of a run: how many a picture has, what surrounds them, and the ids that name them.

    A policy, its reference and a second model share one, so that an id means the same picture for all of them.

    Args:
        processor: The model's processor.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.processor, self.tokenizer = processor, tokenizer
        self.place: str = processor.image_token
        self.place_id = int(tokenizer.convert_tokens_to_ids(self.place))
        self._expansions: dict[tuple[int, int], tuple[str, int]] = {}
        self._starts: list[int] = []  # The first id of each distinct picture, ascending, less `FIRST_PICTURE_ID`,
        self._digests: list[bytes] = []  # what the picture is,
        self._numbers: dict[bytes, int] = {}  # and its number by what it is.
        self._end = 0
        self._held: WeakValueDictionary[bytes, _Held] = WeakValueDictionary()

    def expand(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        """The token ids of a text, as the processor makes them: each place becomes the tokens of its picture.

        Every picture token has the id of the place; see `name`.

        Raises:
            ValueError: If the text has more or fewer places than there are pictures.
        """
        first, *rest = text.split(self.place)
        if len(rest) != len(pictures):
            raise ValueError(
                f"{pictures[0].place if pictures else 'A prompt'}: the prompt has {len(pictures)} pictures, but its "
                f"text {len(rest)} places ({self.place}) after the chat template. Use a template for pictures, and "
                f"leave {self.place} out of texts."
            )
        whole = first + "".join(self._expansion(p)[0] + after for p, after in zip(pictures, rest, strict=True))
        begin = self.tokenizer.bos_token
        special = begin is None or not text.startswith(begin)
        ids: list[int] = self.tokenizer(whole, add_special_tokens=special)["input_ids"]
        return ids

    def name(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """The ids from `expand` with an id of its own for each picture token."""
        tokens = [token for picture in pictures for token in self._ids_of(picture)]
        places = [k for k, token in enumerate(ids) if token == self.place_id]
        assert len(places) == len(tokens), "`expand` makes as many places as the pictures have tokens"
        named = list(ids)
        for place, token in zip(places, tokens, strict=True):
            named[place] = token
        return named

    def known(self, ids: Tensor) -> Tensor:
        """Whether each id names a token of some picture."""
        return (ids >= FIRST_PICTURE_ID) & (ids < FIRST_PICTURE_ID + self._end)

    def pixels(self, held: _Held) -> dict[str, Tensor]:
        """What the vision tower takes for one picture, from the model's processor."""
        if held.pixels is not None:
            return held.pixels
        made = self._process(Picture(held.source, held.place))
        text = {*self.tokenizer.model_input_names, "token_type_ids", "mm_token_type_ids"}
        return {name: value for name, value in made.items() if isinstance(value, Tensor) and name not in text}

    def spans(self, ids: Tensor) -> tuple[list[_Held], Tensor]:
        """The distinct pictures of the ids ``[k]``, and the index of each id among the tokens of these pictures."""
        flat = (ids - FIRST_PICTURE_ID).tolist()
        numbers = [bisect.bisect_right(self._starts, token) - 1 for token in flat]
        order = sorted(set(numbers))
        pictures = [self._held[self._digests[number]] for number in order]
        begins, total = {}, 0
        for number, held in zip(order, pictures, strict=True):
            begins[number], total = total, total + held.count
        index = [begins[n] + token - self._starts[n] for n, token in zip(numbers, flat, strict=True)]
        return pictures, torch.tensor(index, device=ids.device)

    def _ids_of(self, picture: Picture) -> range:
        if picture.digest not in self._numbers:
            count = self._expansion(picture)[1]
            if self._end + count > FIRST_PICTURE_ID:
                raise ValueError(f"A run can have {FIRST_PICTURE_ID:,} tokens of distinct pictures, but got more.")
            self._numbers[picture.digest] = len(self._starts)
            self._starts.append(self._end)
            self._digests.append(picture.digest)
            self._end += count
        held = self._held.get(picture.digest)
        if held is None:
            self._held[picture.digest] = held = _Held(picture, self._expansion(picture)[1])
        picture.held = held  # All equal pictures keep the one record.
        begin = FIRST_PICTURE_ID + self._starts[self._numbers[picture.digest]]
        return range(begin, begin + held.count)

    def _expansion(self, picture: Picture) -> tuple[str, int]:
        """What the processor puts in a picture's place, and the number of picture tokens in it, from its size alone."""
        from PIL import Image

        size = picture.size
        if size not in self._expansions:
            made = self._process(Picture(Image.new("RGB", size), picture.place))
            offsets = made.get("text_replacement_offsets")
            if not offsets:
                raise ValueError(
                    f"`policy` must have a processor that tells what replaces a picture, but {type(self.processor)} "
                    "does not. Update transformers, or give another model."
                )
            self._expansions[size] = offsets[0][0]["replacement"], int((made["input_ids"] == self.place_id).sum())
        return self._expansions[size]

    def _process(self, picture: Picture) -> dict[str, Any]:
        options = {"return_text_replacement_offsets": True, "return_tensors": "pt"}
        try:
            return dict(self.processor(text=[self.place], images=[[picture.open()]], **options))
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            if str(error).startswith(picture.place):
                raise
            size = " x ".join(map(str, picture.size))
            raise ValueError(
                f"{picture.place}: the model's processor refuses a picture of {size} pixels: {first_line(error)}"
            ) from error


class Vision:
    """The input embeddings of picture tokens, from the model's vision tower and connector.

    While these are frozen, the embeddings of a picture are computed once and kept as long as a prompt has it. If they
    are trained, each call computes them, with a gradient if there is one.
    """

    def __init__(self, model: PreTrainedModel, pictures: PictureTokens, *, trained: bool) -> None:
        self.pictures, self.trained = pictures, trained
        self.model = model
        self._kept: WeakKeyDictionary[_Held, Tensor] = WeakKeyDictionary()
        if not trained:
            for _, parameter in vision_parameters(model):
                parameter.requires_grad_(False)

    def __call__(self, ids: Tensor) -> Tensor:
        """``[k] -> [k, D]``: the embeddings of picture tokens."""
        held, index = self.pictures.spans(ids)
        if self.trained:
            return gather_rows(torch.cat(self._run(held)), index)
        new = [picture for picture in held if picture not in self._kept]
        if new:
            # Not as tensors of inference mode, in which Lightning evaluates: a later pass may have a graph.
            with torch.inference_mode(False), torch.no_grad(), self._as_evaluated():
                self._kept.update(zip(new, self._run(new), strict=True))
        table = torch.cat([self._kept[picture].to(ids.device) for picture in held])
        return table[index]

    def forget(self) -> None:
        """Forget embeddings, because the weights may be others from now on."""
        self._kept.clear()

    def _run(self, held: Sequence[_Held]) -> list[Tensor]:
        """The embeddings of distinct pictures, ``[tokens, D]`` each; pictures of one shape are run together."""
        pixels = [self.pictures.pixels(picture) for picture in held]
        by_shape: dict[tuple[Any, ...], list[int]] = {}
        for k, (picture, values) in enumerate(zip(held, pixels, strict=True)):
            picture.pixels = values if self.trained else None
            by_shape.setdefault(tuple((name, v.shape) for name, v in values.items()), []).append(k)
        embeddings: dict[int, Tensor] = {}
        for alike in by_shape.values():
            for start in range(0, len(alike), _AT_ONCE):
                part = alike[start : start + _AT_ONCE]
                together = {name: torch.cat([pixels[k][name] for k in part]) for name in pixels[part[0]]}
                found = self._tower(together)
                sizes = [held[k].count for k in part]
                if found.ndim != 2 or len(found) != sum(sizes):
                    raise ValueError(
                        f"{type(self.model).__name__} gives {tuple(found.shape)} for pictures of {sum(sizes)} "
                        "tokens, a form that is not supported. Give another model."
                    )
                embeddings |= dict(zip(part, torch.split(found, sizes), strict=True))
        return [embeddings[k] for k in range(len(held))]

    def _tower(self, inputs: dict[str, Tensor]) -> Tensor:
        """``[tokens, D]``: the embeddings of some pictures."""
        model = self.model
        placed = {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }
        found = model.get_image_features(**placed, return_dict=True).pooler_output
        return torch.cat(list(found)) if isinstance(found, list | tuple) else found.flatten(0, -2)

    @contextmanager
    def _as_evaluated(self) -> Iterator[None]:
        """Evaluation mode of the frozen tower: its embeddings are kept, and must not depend on draws of dropout."""
        training = [module for module in self.model.modules() if module.training]
        with ExitStack() as after:
            for module in training:
                module.training = False
                after.callback(setattr, module, "training", True)
            yield


def vision_parameters(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """The parameters that see pictures, by name: all outside of decoder, embedding and head."""
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    others = {id(parameter) for part in text for parameter in part.parameters()}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in others]


def takes_pictures(name: PolicySource, trust_remote_code: bool = False) -> bool:
    """Whether Transformers loads the policy as a model of pictures and text, by its config."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind: str = read_config(name, trust_remote_code).model_type
    # Those that are in both are loaded as causal language models, as they were before there were pictures.
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def load_pictures(
    name: PolicySource, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> PictureTokens | None:
    """The picture tokens of a policy; None for a policy of text.

    Raises:
        ValueError: If its processor cannot be loaded; the message names packages that it needs.
    """
    if not takes_pictures(name, trust_remote_code):
        return None
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("`policy` takes pictures, which need Pillow. Run: pip install pillow.")
    if isinstance(name, LoadedPolicy):
        if name.processor is None:
            raise ValueError("`policy` takes pictures: give it with its processor, (model, processor).")
        return PictureTokens(copy.deepcopy(name.processor), tokenizer)
    from transformers import AutoProcessor

    with reading(name) as path:
        try:
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        except ImportError as error:  # Its first line is empty, and its first sentence names the package.
            raise ImportError(" ".join(str(error).split()).partition(". ")[0] + ".") from error
    if not hasattr(processor, "image_token"):
        raise ValueError(
            f"`policy` {name!r} takes pictures, but has no processor for them ({type(processor).__name__}). Copy "
            "processor_config.json or preprocessor_config.json from the model that it was made of."
        )
    return PictureTokens(processor, tokenizer)
