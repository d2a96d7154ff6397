"""Pictures in the decoder's input: every picture token of each distinct picture has an id of its own.

The ids lie beyond every vocabulary. Equal ids are then equal inputs, so that prefix trees, packing, groups of equal
prompts, continuation from keys and values, saliency and log-probabilities treat pictures as they treat text; and no
such id can be sampled. `PictureTokens` gives out the ids, and `Vision` turns them into the decoder's input.

Shapes: ``k`` picture tokens, ``D`` width.
"""

from __future__ import annotations

import copy
import math
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from grail_lightning.core.policy.encode import begun_ids
from grail_lightning.core.policy.layout import gather_rows
from grail_lightning.core.policy.source import LoadedPolicy, PolicySource, first_line, read_config, reading
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, Picture

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_AT_ONCE = 32  # The most pictures that the vision tower reads in one call.


class Grid(NamedTuple):
    """A part of a picture, in shares of its width and height, and the rows and columns of its tokens."""

    left: float
    top: float
    width: float
    height: float
    rows: int
    columns: int


class _Expansion(NamedTuple):
    text: str  # What the processor puts in a picture's place.
    tokens: int  # The number of picture tokens in it.
    patches: Tensor | None  # `image_grid_thw` of Qwen's processors: patches in time, height and width, ``[1, 3]``.
    views: int  # The number of images that the tower sees of it: the whole, and perhaps tiles.


class _Held:
    """What is kept of one distinct picture as long as a prompt has it."""

    def __init__(self, picture: Picture, ids: range, patches: Tensor | None) -> None:
        self.source, self.place, self.ids, self.patches = picture.source, picture.place, ids, patches
        self.pixels: dict[str, Tensor] = {}


class PictureTokens:
    """The picture tokens of a run: how many a picture has, what surrounds them, and the ids that name them.

    A policy, its reference and a second model share one, so that an id means the same picture for all of them.
    """

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.processor, self.tokenizer = processor, tokenizer
        self.place: str = processor.image_token
        self.place_id = int(tokenizer.convert_tokens_to_ids(self.place))
        self._expansions: dict[tuple[int, int], _Expansion] = {}
        self._free: defaultdict[int, list[range]] = defaultdict(list)  # Ids of pictures that are gone, by their number.
        self._end = FIRST_PICTURE_ID
        self._held: WeakValueDictionary[bytes, _Held] = WeakValueDictionary()

    def __deepcopy__(self, memo: object) -> PictureTokens:
        return self  # A copy of the policy shares it.

    def expand(self, text: str, pictures: Sequence[Picture], *, begins: bool = True) -> list[int]:
        """The token ids of a text, as the processor makes them: each place becomes the tokens of its picture.

        Every picture token has the id of the place; see `name`. The text `begins` a prompt if it is no later part. An
        error if the places are more or fewer than pictures.
        """
        first, *rest = text.split(self.place)
        if len(rest) != len(pictures):
            where = pictures[0].place if pictures else text[:60]
            raise ValueError(
                f"{where}: a prompt must have a place ({self.place}) for each picture, but after the chat template it "
                f"has {len(rest)} for {len(pictures)}. Use a template for pictures."
            )
        if len(pictures) > begins and self._reads_others:
            raise ValueError(
                f"{pictures[0].place}: {type(self.processor).__name__} makes other tokens of a picture that is not the "
                "only one of its text, but here each is read alone. Give prompts of one picture, and none in results."
            )
        whole = first + "".join(self._expansion(p).text + after for p, after in zip(pictures, rest, strict=True))
        if begins:
            return begun_ids(self.tokenizer, whole)
        ids: list[int] = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
        return ids

    def name(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """The ids from `expand` with an id of its own for each picture token."""
        if not pictures:  # A response may have the id of a place; it is a text token there.
            return ids
        tokens = iter([token for picture in pictures for token in self.hold(picture)])
        return [next(tokens) if token == self.place_id else token for token in ids]

    def known(self, ids: Tensor) -> Tensor:
        """Whether each id names a token of some picture."""
        return (ids >= FIRST_PICTURE_ID) & (ids < self._end)

    def pixels(self, held: _Held, *, keep: bool) -> dict[str, Tensor]:
        """What the vision tower takes for one picture, from the model's processor; `keep` it for further passes."""
        if held.pixels:
            return held.pixels
        encoding = self._process(Picture(held.source, held.place))
        text = {*self.tokenizer.model_input_names, "token_type_ids", "mm_token_type_ids"}
        pixels = {name: value for name, value in encoding.items() if isinstance(value, Tensor) and name not in text}
        held.pixels = pixels if keep else {}
        return pixels

    def spans(self, ids: Tensor) -> tuple[list[_Held], Tensor]:
        """The distinct pictures of the ids ``[k]``, and the index of each id among the tokens of these pictures."""
        pictures = sorted(self._held.values(), key=lambda held: held.ids.start)
        starts = torch.tensor([held.ids.start for held in pictures], dtype=ids.dtype)
        of_picture = torch.bucketize(ids.cpu(), starts, right=True) - 1
        numbers, place = torch.unique(of_picture, return_inverse=True)
        held = [pictures[number] for number in numbers.tolist()]
        sizes = torch.tensor([len(picture.ids) for picture in held])
        offset = ids.cpu() - starts[numbers][place]
        assert (offset < sizes[place]).all(), "an id of a picture that is gone"
        index = (sizes.cumsum(0) - sizes)[place] + offset
        return held, index.to(ids.device)

    def hold(self, picture: Picture) -> range:
        """The ids of a picture, which are its own as long as it or an equal one lives."""
        held = self._held.get(picture.digest)
        if held is None:
            _, count, patches, _ = self._expansion(picture)
            free = self._free[count]
            if not free:
                if self._end + count > 2 * FIRST_PICTURE_ID:
                    raise ValueError(f"A run can have {FIRST_PICTURE_ID:,} tokens of distinct pictures, but got more.")
                free.append(range(self._end, self._end + count))
                self._end += count
            held = self._held[picture.digest] = _Held(picture, free.pop(), patches)
            weakref.finalize(held, free.append, held.ids).atexit = False
        picture.held = held  # All equal pictures keep the one record.
        return held.ids

    def layers(self, picture: Picture) -> list[list[Grid]]:
        """The parts of a picture that its tokens see, in their order: grids, whose tokens are read row by row.

        Idefics3 has a layer of tiles and one of the whole; LLaVA has one, of what its processor cuts out, and
        Qwen2.5-VL one of the whole. Without a layer if it is not known which part a token sees: tiles that have no tags
        of their places (InternVL, LLaVA-Next), or parts whose tokens are no square.
        """
        text, count, patches, views = self._expansion(picture)
        if patches is not None:
            merged = math.isqrt(int(patches.prod()) // count)  # Patches on a side of what one token sees.
            return [[Grid(0.0, 0.0, 1.0, 1.0, *(patches[0, 1:] // merged).tolist())]]
        parts = re.findall(rf"(?:<row_(\d+)_col_(\d+)>)?((?:{re.escape(self.place)})+)", text)
        sides = [math.isqrt(text.count(self.place)) for _, _, text in parts]
        without_tags = sum(not row for row, *_ in parts)
        if without_tags > 1 or (without_tags and parts[-1][0]) or views != len(parts):
            return []
        if any(side * side != text.count(self.place) for side, (*_, text) in zip(sides, parts, strict=True)):
            return []
        rows, columns = (max((int(part[k] or 0) for part in parts), default=0) for k in (0, 1))
        tiles = [
            Grid((int(column) - 1) / columns, (int(row) - 1) / rows, 1 / columns, 1 / rows, side, side)
            for side, (row, column, _) in zip(sides, parts, strict=True)
            if row
        ]
        whole = Grid(*self._seen(*picture.size), sides[-1], sides[-1])
        return [layer for layer in (tiles, [whole] * (not parts[-1][0])) if layer]

    def _seen(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, width and height of what the model sees of a picture, in shares of it."""
        image = self.processor.image_processor
        if not getattr(image, "do_center_crop", False):
            return 0.0, 0.0, 1.0, 1.0
        size = dict(image.size)
        small = size.get("shortest_edge")
        wide, high = (
            (width * small / min(width, height), height * small / min(width, height))
            if small
            else (size["width"], size["height"])
        )
        part = image.crop_size["width"] / wide, image.crop_size["height"] / high
        return (1 - part[0]) / 2, (1 - part[1]) / 2, *part

    def _expansion(self, picture: Picture) -> _Expansion:
        """What the processor makes of a picture's place, from the picture's size alone."""
        from PIL import Image

        size = picture.size
        if size not in self._expansions:
            encoding = self._process(Picture(Image.new("RGB", size), picture.place))
            offsets = encoding.get("text_replacement_offsets")
            if not offsets:
                raise ValueError(f"{type(self.processor).__name__} does not tell what replaces a picture in a text.")
            count = int((encoding["input_ids"] == self.place_id).sum())
            if not count:
                raise picture.refusal(f"have a token, but {type(self.processor).__name__} makes none of it")
            views = math.prod(encoding["pixel_values"].shape[:-3]) if "pixel_values" in encoding else 0
            grid = encoding.get("image_grid_thw")
            self._expansions[size] = _Expansion(offsets[0][0]["replacement"], count, grid, views)
        return self._expansions[size]

    @cached_property
    def _reads_others(self) -> bool:
        """Whether what replaces a picture depends on others of its text, as with LLaVA-OneVision's processor."""
        from PIL import Image

        pictures = [Picture(Image.new("RGB", size), "A picture that is tried") for size in ((96, 64), (64, 96))]
        (offsets,) = self._process(*pictures)["text_replacement_offsets"]
        return [offset["replacement"] for offset in offsets] != [self._expansion(picture).text for picture in pictures]

    def _process(self, *pictures: Picture) -> dict[str, Any]:
        options = {"return_text_replacement_offsets": True, "return_tensors": "pt"}
        images = [p.open() for p in pictures]
        try:
            return dict(self.processor(text=[self.place * len(images)], images=[images], **options))
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise pictures[0].refusal(f"suit the model's processor, which says: {first_line(error)}") from error


class Vision:
    """The input embeddings of picture tokens, from the model's vision tower and connector, and their positions.

    While these are frozen, the embeddings of a picture are computed once and kept as long as a prompt has it. If they
    are trained, each call computes them, with a gradient if there is one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pictures: PictureTokens,
        *,
        trained: bool,
        evaluating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.pictures, self.trained, self.evaluating = model, pictures, trained, evaluating
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
            # Without draws of dropout; and not as tensors of inference mode, since a later pass may have a graph.
            with torch.inference_mode(False), torch.no_grad(), self.evaluating():
                self._kept.update(zip(new, self._run(new), strict=True))
        table = torch.cat([self._kept[picture].to(ids.device) for picture in held])
        return table[index]

    def position_ids(self, ids: Tensor, positions: Tensor) -> Tensor:
        """``[R, N] -> [4, R, N]``: positions as they are and on each of three axes, for a model that has such axes.

        On these a picture's tokens have the positions of its grid, and what follows in their row is moved. `positions`
        count the tokens before each token; in a layout in preorder what follows a token has greater ones.
        """
        if not hasattr(self.model.base_model, "get_rope_index"):
            return positions
        moved = positions.expand(4, *positions.shape).clone()
        is_picture = ids >= FIRST_PICTURE_ID
        if not is_picture.any():
            return moved
        held, index = self.pictures.spans(ids[is_picture])
        moves = torch.cat([self._moves(picture) for picture in held], 1).to(ids.device)[:, index]
        moved[1:, is_picture] += moves[:3]
        ends = torch.zeros_like(positions).masked_scatter(is_picture, moves[3])
        row, column = ends.nonzero(as_tuple=True)
        later = torch.arange(ids.shape[1], device=ids.device) > column[:, None]
        behind = later & (~later | (positions[row] > positions[row, column][:, None])).cumprod(1).bool()
        moved[1:] += torch.zeros_like(positions).index_add(0, row, ends[row, column][:, None] * behind)
        return moved

    def _moves(self, held: _Held) -> Tensor:
        """``[4, tokens]``: from plain positions to those on three axes; and, at the last one, that of what follows."""
        number, image = len(held.ids), self.pictures.place_id
        ids = torch.tensor([[image] * number + [0]])
        kinds = (ids == image).int()
        on_axes, _ = self.model.base_model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=held.patches)
        moves = on_axes[:, 0] - torch.arange(number + 1)
        after = torch.zeros(1, number, dtype=torch.long).index_fill(1, torch.tensor(number - 1), int(moves[0, -1]))
        return torch.cat([moves[:, :-1], after])

    def forget(self) -> None:
        """Forget embeddings, because the weights may be others from now on."""
        self._kept.clear()

    def _run(self, held: Sequence[_Held]) -> list[Tensor]:
        """The embeddings of distinct pictures, ``[tokens, D]`` each; neighbours of one shape are run together."""
        pixels = [self.pictures.pixels(picture, keep=self.trained) for picture in held]
        shapes = [[(name, value.shape) for name, value in values.items()] for values in pixels]
        embeddings: list[Tensor] = []
        while (start := len(embeddings)) < len(held):
            stop = next((k for k in range(start, len(held)) if shapes[k] != shapes[start]), len(held))
            part = slice(start, min(stop, start + _AT_ONCE))
            together = {name: torch.cat([values[name] for values in pixels[part]]) for name, _ in shapes[start]}
            inputs = placed(together, self.model)
            features = self.model.get_image_features(**inputs, return_dict=True).pooler_output
            features = torch.cat(list(features)) if isinstance(features, list | tuple) else features.flatten(0, -2)
            sizes = [len(picture.ids) for picture in held[part]]
            if len(features) != sum(sizes):
                raise ValueError(f"the tower gives {len(features)} embeddings for {sum(sizes)} tokens of pictures.")
            embeddings += torch.split(features, sizes)
        return embeddings


def placed(inputs: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """What a processor made, on the device of a model and in its dtype."""
    return {n: v.to(model.device, model.dtype if v.is_floating_point() else None) for n, v in inputs.items()}


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
    """The picture tokens of a policy; None for a policy of text. An error names packages that its processor lacks."""
    if not takes_pictures(name, trust_remote_code):
        return None
    if isinstance(name, LoadedPolicy):
        if name.processor is None:
            raise ValueError("`policy` takes pictures: give it with its processor, (model, processor).")
        return PictureTokens(copy.deepcopy(name.processor), tokenizer)
    from transformers import AutoProcessor

    with reading(name) as path:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not hasattr(processor, "image_token"):
        raise ValueError(
            f"`policy` {name!r} takes pictures, but has no processor for them ({type(processor).__name__}). Copy "
            "processor_config.json or preprocessor_config.json from the model that it was made of."
        )
    return PictureTokens(processor, tokenizer)
