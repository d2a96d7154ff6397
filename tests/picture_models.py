"""Tiny models of pictures and text with random weights, their processors on Pillow alone, and pictures for them."""

import copy
import io

import numpy as np
from PIL import Image
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from grail_lightning import Loading, resolve_policy
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.records.picture import Picture

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # Large enough for attention to tell tokens apart.
    "bos_token_id": None,
}
SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.2,
}


def _idefics3():
    """A picture is enlarged and cut into tiles, each of which has 4 tokens, as has the whole."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_policy("words"))
    image = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    processor = Idefics3Processor(image, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Idefics3Config(
        text_config=TEXT | ends | {"model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=SIGHT,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    return Idefics3ForConditionalGeneration(config), processor


def _llava():
    """A picture has 16 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_policy("words"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        image,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlavaConfig(
        text_config=TEXT | ends | {"model_type": "qwen3", "head_dim": 8, "vocab_size": len(tokenizer)},
        vision_config=SIGHT | {"model_type": "clip_vision_model", "projection_dim": 16},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return LlavaForConditionalGeneration(config), processor


class PillowQwenProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **rest):
        self.image_token = "<image>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


AutoProcessor.register(Qwen2_5_VLConfig, PillowQwenProcessor, exist_ok=True)


def _qwen():
    """Four patches are a token, so that a square picture has 16 tokens and others a grid of their own."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_policy("words"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = Qwen2VLImageProcessorPil(size={"shortest_edge": 1024, "longest_edge": 2048}, patch_size=4, merge_size=2)
    # Without a text between them the model takes two pictures for one.
    processor = PillowQwenProcessor(image, tokenizer, chat_template=TEMPLATE.replace("<image>", "( <image> )"))
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sight = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32, "depth": 2}
    config = Qwen2_5_VLConfig(
        text_config=TEXT
        | ends
        | {"vocab_size": len(tokenizer), "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        vision_config=sight
        | {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "initializer_range": 0.2},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        initializer_range=0.2,
    )
    return Qwen2_5_VLForConditionalGeneration(config), processor


MAKERS = {"idefics3": _idefics3, "llava": _llava, "qwen2.5-vl": _qwen}
TILES = {"idefics3": 5, "llava": 1, "qwen2.5-vl": 1}  # Of a square picture.


def checkpoint(name, folder):
    """The folder of a checkpoint with random weights."""
    model, processor = MAKERS[name]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def seeing(name, folder, **loading):
    """A policy that takes pictures, loaded by the package itself, in float64."""
    return load_policy(checkpoint(name, folder), Loading(**loading)).double()


def image(seed, width=16, height=16):
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def cut_off():
    """The bytes of a picture whose end is missing."""
    whole = io.BytesIO()
    image(0, 64, 64).save(whole, "PNG")
    return whole.getvalue()[:-2000]


def question(*shown, text="what is 3 + 4 ?"):
    """A prompt whose pictures come before its text."""
    parts = [{"type": "image", "image": picture} for picture in shown]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def pictures(number, *size):
    """Different pictures."""
    return [Picture(image(seed, *size)) for seed in range(number)]


def plain(messages):
    """The messages as Transformers takes them, and their pictures."""
    messages = copy.deepcopy(messages)
    images = [part.pop("image").open() for m in messages for part in m["content"] if part["type"] == "image"]
    return messages, images


def letters(responses, references, **columns):
    """A reward that differs between rollouts of random weights."""
    return [float(len(set(text)) % 3) for text in responses]
