"""The options with which a policy is loaded, its config, its tokenizer, and the checks of all."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from grail_lightning.core.functional.tokens import DEFAULT_CHUNK_TOKENS
from grail_lightning.core.policy.compile import Compile
from grail_lightning.core.policy.files import damaged_file
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.files import looked_in
from grail_lightning.core.runtime.import_path import GIVEN, refuse_given

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


_ASSETS = Path(__file__).parents[2] / "worlds" / "assets"

_Dtype = Literal["float32", "bfloat16", "float16", "auto"]
_Attention = Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "eager"]


class LoadedPolicy(NamedTuple):
    """A model that a Python program has loaded, and its tokenizer. Runs train copies of it; it stays as it is."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: Any = None  # Of a model that takes pictures.

    def __repr__(self) -> str:
        return f"{type(self.model).__name__} {GIVEN}"


PolicySource = str | LoadedPolicy


def as_source(policy: object) -> PolicySource:
    """The name of a policy, or a model with its tokenizer; a `ValueError` if a copy of it could not be trained."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    match policy:
        case str():
            return policy
        case (PreTrainedModel() as model, PreTrainedTokenizerBase() as tokenizer):
            source = LoadedPolicy(model, tokenizer)
        case LoadedPolicy():
            source = policy
        case (PreTrainedModel() as model, processor) if hasattr(processor, "image_processor"):
            source = LoadedPolicy(model, cast(Any, processor).tokenizer, processor)
        case _:
            got = ", ".join(type(part).__name__ for part in (policy if isinstance(policy, tuple) else [policy]))
            raise ValueError(
                "`policy` must be a name, a folder, or a Transformers model with its tokenizer, (model, tokenizer), "
                f"but got {got}. For adapters set `loading.lora`."
            )
    # A copy of such a model would call the modules of the first one, or be exported as adapters alone.
    model = source.model
    if getattr(model, "_hf_peft_config_loaded", False) or any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise ValueError("`policy` must be a model without adapters or `device_map`. Merge them, or load it again.")
    return source


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Options of low-rank adapters (peft). All other weights are frozen.

    Attributes:
        rank: Rank of the update.
        alpha: Numerator of the update's scale, which is ``alpha / rank``.
        dropout: Dropout rate on the adapter's input.
        target_modules: Names of the linear layers that get an adapter, or "all-linear".
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        check_options(self, "loading.lora", rank="[1, inf)", alpha="(0, inf)", dropout="[0, 1)")


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Options with which a policy is loaded.

    Attributes:
        dtype: Dtype of the weights. In full precision they are master weights; pair float32 with
            `--trainer.precision=bf16-mixed` on GPUs. float16 evaluates and predicts, but is never trained.
        train_vision: Whether vision tower and connector of a policy that takes pictures are trained, too.
        master_weights: Whether weights in half precision have float32 copies, which the optimiser updates. Does not
            apply to sharded weights.
        attention: Attention implementation. auto takes SDPA, with which common beginnings of rows are run once; with
            `packing` flash-attn 2 on CUDA in half precision where it is installed.
        gradient_checkpointing: Whether activations are recomputed in the backward pass.
        compile: Whether the decoder's blocks are compiled by `torch.compile` for the passes of the update and of credit
            methods. auto does so on CUDA, unless deterministic algorithms are asked for. true takes the backend
            inductor; a name takes another, `aot_eager` and `eager` to find out what a model fails in. Blocks that fail
            in a trial run as they are, which one line says.
        lora: Options of adapters, which are then trained in place of all weights; null trains all weights.
        trust_remote_code: Whether to run Python code from the checkpoint. Leave it off unless you trust the source.
        from_scratch: Whether to build the architecture of the config with random weights.
        chat_template_kwargs: Arguments of the chat template.
        chunk_tokens: Most positions whose logits exist at one time; fewer if the vocabulary is large.
        packing: Whether the decoder runs on valid tokens alone, all rows as one, through flash-attn's variable-length
            kernels.
        reduce_once: Whether each rank keeps whole gradients under FSDP2 and reduces them with the last micro-batch of a
            step. This needs less traffic, and memory for all gradients on every rank.
    """

    dtype: _Dtype = "float32"
    train_vision: bool = False
    master_weights: bool = True
    attention: _Attention = "auto"
    gradient_checkpointing: bool = False
    compile: Compile = "auto"
    lora: LoRA | None = None
    trust_remote_code: bool = False
    from_scratch: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=lambda: {"enable_thinking": False})
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    packing: bool = False
    reduce_once: bool = False

    def __post_init__(self) -> None:
        check_options(self, chunk_tokens="[1, inf)")
        if self.lora is not None and importlib.util.find_spec("peft") is None:
            raise ValueError(
                "`loading.lora` needs peft, which is not installed. Run: pip install 'grail-lightning[lora]'."
            )


def resolve_policy(name: str) -> str:
    """A name in the form that Transformers accepts; that of a packaged policy becomes its folder."""
    refuse_given("policy", name)
    folder, packaged = Path(name).expanduser(), _ASSETS / name
    if name not in os.listdir(_ASSETS):
        return str(folder) if folder.is_dir() else name
    if (folder / "config.json").is_file() and not folder.samefile(packaged):
        raise ValueError(
            f"`policy` must name one model, but {name!r} is one that came with the package, and a folder here. "
            f"Write ./{name} for the folder, or {packaged} for the other one."
        )
    return str(packaged)  # Any other folder of that name holds no model.


@contextmanager
def reading(name: str, option: str = "policy") -> Iterator[str]:
    """The folder or hub name of a policy, for Transformers to read from; what fails inside the context is one line.

    `option` is the one that names it, for messages.
    """
    path = resolve_policy(name)
    # Transformers would speak of a "repo id"; one on the hub has one slash at most.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(path).exists():
        raise ValueError(
            f"`{option}` {name!r} cannot be loaded: it does not exist. Give a folder in Hugging Face format "
            f"({looked_in()})."
        )
    _check_name(path, name, option)
    try:
        yield path
    except Exception as error:  # The library, the network and the hub raise many types.
        reason = first_line(error)
        if isinstance(error, ImportError):  # Its first line is empty, and its first sentence names the package.
            reason = " ".join(str(error).split()).partition(". ")[0]
            raise ValueError(f"`{option}` {name!r} cannot be loaded: {reason}. Install it.") from error
        if damaged := damaged_file(path):
            raise ValueError(f"`{option}` {name!r} cannot be loaded: {damaged}") from error
        if reason.startswith("We couldn't connect"):
            reason = f"it is in no folder here ({looked_in()}) nor in the hub's cache, and the hub cannot be reached"
        raise ValueError(
            f"`{option}` {name!r} cannot be loaded: {reason.rstrip('.')}. "
            "Give a folder in Hugging Face format, a model on the hub, or a packaged policy such as `arithmetic`."
        ) from error


def _check_name(path: str, name: str, option: str) -> None:
    """Check that what is no folder may be the name of a model on the hub, whose library would speak of a "repo id"."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # A lazy export.

    if Path(path).exists():
        return
    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise ValueError(
            f"`{option}` must be a folder in Hugging Face format, a model on the hub, or a packaged policy such as "
            f"`arithmetic`, but got {name!r}, which is no folder here ({looked_in()}), and which no model on the hub "
            "can be called. Correct it."
        ) from error


def read_config(name: PolicySource, trust_remote_code: bool = False, option: str = "policy") -> Any:
    """The model's config; `option` names the model in messages."""
    from transformers import AutoConfig

    if isinstance(name, LoadedPolicy):
        config = copy.deepcopy(name.model.config)
        config.dtype = name.model.dtype  # The program may have converted the weights.
        return config
    with reading(name, option) as path:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none; that of a KeyError is a key alone."""
    line = "" if isinstance(error, KeyError) else next(iter(str(error).splitlines()), "").strip()
    return line or type(error).__name__


def context_length(name: PolicySource, loading: Loading) -> int | None:
    """The number of positions of a policy's model; see `positions`."""
    return positions(read_config(name, loading.trust_remote_code))


def positions(config: Any) -> int | None:
    """The number of positions of a model; None if it has no limit.

    With LongRoPE (Phi-3, Phi-4-mini) it is that before the extension. Beyond, Transformers takes other frequencies for
    all rows of a forward pass, so that log-probabilities of a row would depend on the longest one beside it.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    before = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return cast(int | None, before or getattr(text, "max_position_embeddings", None))


def check_policy(name: PolicySource, loading: Loading, response_length: int = 0) -> None:
    """Check that the config can be read, and that a prompt and such a response fit into the model."""
    limit = context_length(name, loading)
    if limit is not None and response_length >= limit:
        raise ValueError(
            f"`max_response_length` must leave room for a prompt in the {limit} positions of {name!r}, but got "
            f"{response_length}. Lower it."
        )


def check_precision(precision: object, sharded: tuple[PolicySource, Loading] | None = None) -> None:
    """Refuse precisions that need loss scaling, and one that would convert the weights of a sharded policy."""
    if str(precision) in ("16", "16-mixed", "16-true"):
        raise ValueError(f"`trainer.precision` {precision} needs loss scaling. Use bf16-mixed, or 32-true.")
    if sharded is not None and str(precision) == "bf16-true" and _dtype_of_loading(*sharded) != "bfloat16":
        raise ValueError(
            "`trainer.precision` bf16-true would convert weights that are sharded already. Set "
            "`model.loading.dtype: bfloat16`, which loads them as such."
        )


def _dtype_of_loading(name: PolicySource, loading: Loading) -> str:
    auto = loading.dtype == "auto"
    dtype: object = read_config(name, loading.trust_remote_code).dtype if auto else loading.dtype
    return str(dtype).removeprefix("torch.")


def check_dtype(name: PolicySource, loading: Loading) -> None:
    """Refuse to train weights in float16, in which small gradients are zero unless losses are scaled."""
    if _dtype_of_loading(name, loading) == "float16":
        raise ValueError(
            f"`loading.dtype` must not be float16 in training, which needs loss scaling, but got {loading.dtype} for "
            f"{name!r}. Use bfloat16, or float32."
        )


# --- tokenizer and prompts --------------------------------------------------------------------------------------------


def load_tokenizer(name: PolicySource, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy. Its pad token must have an embedding; if it has none, the end token replaces it."""
    from transformers import AutoTokenizer

    if isinstance(name, LoadedPolicy):
        tokenizer = copy.deepcopy(name.tokenizer)
    else:
        with reading(name) as path:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # Transformers makes one without words.
        raise ValueError(
            f"`policy` {name!r} must have a tokenizer, but its files (tokenizer.json, say) are missing. Copy them from "
            "the model that it was made of."
        )
    config = read_config(name, trust_remote_code)
    vocab_size = getattr(config.get_text_config(), "vocab_size", None) or len(tokenizer)
    # Masks are made from lengths, so any token can be the pad token. A token that was added to the tokenizer but not to
    # the model has no embedding.
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocab_size:
        ends = tokenizer.eos_token_id is not None and tokenizer.eos_token_id < vocab_size
        tokenizer.pad_token = tokenizer.eos_token if ends else tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> tuple[int, ...]:
    """The end tokens of tokenizer and generation config together: many chat models name theirs in only one of them."""
    ids = generation_config.eos_token_id
    named = [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]
    return tuple(sorted({*named, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}))
