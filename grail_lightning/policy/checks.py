"""Checks that a policy can be loaded, made before any weights are read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grail_lightning.policy.adapters import add_adapters
from grail_lightning.policy.options import (
    LoadedPolicy,
    Loading,
    PolicySource,
    check_attention,
    check_length,
    first_line,
    read_config,
    resolve_policy,
)
from grail_lightning.runtime.hub import hub_or_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS_ENDINGS = (".safetensors", ".bin")
_WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_config.json")  # Transformers loads adapters, too.
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PREFIX = "policy.model."  # The names of the weights in a checkpoint of a run begin with it.


def check_policy(name: PolicySource, loading: Loading, response_length: int = 0) -> None:
    """Check cheaply that a policy can be loaded: its config, its architecture, and its weights if they are local.

    Raises:
        ValueError: If it cannot be loaded; the message says what to do.
    """
    check_length(name, loading, response_length)
    check_attention(loading.attention, loading.tree_attention)
    if isinstance(name, LoadedPolicy):
        check_decoder(name.model)
        return
    folder = Path(resolve_policy(name))
    blueprint(name, loading)
    if folder.is_dir() and not loading.from_scratch:
        named = getattr(read_config(name, loading.trust_remote_code), "transformers_weights", None)
        _check_files(name, folder, {*_WHOLE, *_INDICES, named})


def check_weights(name: str, loading: Loading, state: Mapping[str, Any]) -> None:
    """Check that the weights of a run's checkpoint have the names and the shapes of a policy's.

    Weights that cannot be known before a policy is loaded, those of a quantised one, are not checked.

    Args:
        name: The policy.
        loading: The options with which it will be loaded.
        state: The weights of the checkpoint, by their names there.

    Raises:
        ValueError: If some differ.
    """
    model = blueprint(name, loading)
    if model is None or getattr(model.config, "quantization_config", None) is not None:
        return
    wanted = {_PREFIX + key: value.shape for key, value in model.state_dict().items()}
    found = {key: getattr(value, "shape", None) for key, value in state.items() if key.startswith(_PREFIX)}
    differing = [key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)]
    if differing:
        raise ValueError(other_policy(sorted(differing)))


def other_policy(differing: list[str]) -> str:
    """The message about a checkpoint in which some weights have other names or shapes than the policy's."""
    return (
        f"`ckpt_path` must be a checkpoint of this policy, but {len(differing)} of its weights have other names or "
        f"shapes, such as {differing[0]}. Give the `model.policy` and `model.loading.lora` that it was trained with; "
        "they are in the config.yaml of its run."
    )


def blueprint(name: str, loading: Loading) -> PreTrainedModel | None:
    """The policy's model with its adapters, but without weights: all tensors are on the meta device.

    Returns:
        The model; None if its class cannot be made there, as some classes from checkpoints (`trust_remote_code`).

    Raises:
        ValueError: If it is no causal language model with decoder blocks, or has no layer that is to be adapted.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(name, loading.trust_remote_code)
    options = {"attn_implementation": "eager", "trust_remote_code": loading.trust_remote_code}
    try:
        with torch.device("meta"), hub_or_cache(), _silent("transformers"):
            model = AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # Classes that were not written for it fail in their own ways.
        if str(error).startswith("Unrecognized configuration class"):
            raise ValueError(
                f"`policy` must be a causal language model, but got {name!r}, whose config is a "
                f"{type(config).__name__}. Give another model."
            ) from None
        return None
    check_decoder(model)
    if loading.lora is not None:
        with torch.device("meta"):
            add_adapters(model, loading.lora)
    return model


def check_decoder(model: PreTrainedModel) -> None:
    """Check that a model has a stack of decoder blocks.

    Raises:
        ValueError: If it has none.
    """
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(
            f"`policy` must be a causal language model with decoder blocks, but got {type(model).__name__}. Give "
            "another model."
        )


def _check_files(name: str, folder: Path, expected: set[str | None]) -> None:
    """Check that a folder holds weights, one of the files that Transformers looks for, and that none was cut off."""
    from safetensors import SafetensorError, safe_open

    files = sorted(file.name for file in folder.iterdir())
    weights = [file for file in files if file.endswith(_WEIGHTS_ENDINGS)]
    if not weights:
        raise ValueError(
            f"`policy` {name!r} has a config but no weights. Set `loading.from_scratch: true` to make some."
        )
    if not expected & {*files}:
        raise ValueError(
            f"`policy` {name!r} must have its weights in {_WHOLE[0]}, or in shards that {_INDICES[0]} names, but got "
            f"{', '.join(weights)}. Copy the whole folder again."
        )
    for index in {*_INDICES} & {*files}:
        shards = set(re.findall(r'"([^"/]+\.(?:safetensors|bin))"', (folder / index).read_text(errors="replace")))
        if missing := sorted(shards - {*files}):
            raise ValueError(
                f"`policy` {name!r} must have all its weights, but {', '.join(missing)} is missing, which {index} "
                "names. Copy or download it again."
            )
    for file in weights:
        if not file.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / file, "pt"):  # The header says how long the file must be.
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"`policy` {name!r} cannot be loaded: {folder / file} is damaged ({first_line(error)}). Copy or "
                "download it again."
            ) from None


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Switch the log of a library off: what it says about a model is said when the model is loaded."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
