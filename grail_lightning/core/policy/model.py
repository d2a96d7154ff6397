"""The policy as a module: log-probabilities and entropy without full logits, for any layout of tokens.

Shapes: ``B`` rows, ``W`` columns, ``T`` response tokens, ``R × N`` places for tokens, ``M`` predictions, ``D`` width,
``V`` vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from grail_lightning.core.functional.certainty import teacher_divergence
from grail_lightning.core.functional.tokens import HeadGradient, TokenStats, token_logprobs, token_stats
from grail_lightning.core.policy import capabilities
from grail_lightning.core.policy.compile import CompiledBlocks
from grail_lightning.core.policy.encode import encode_prompt
from grail_lightning.core.policy.layout import TokenLayout, packed_layout, padded_layout, token_positions
from grail_lightning.core.policy.source import Loading, end_token_ids
from grail_lightning.core.policy.trees import TreeKernel, tree_layout
from grail_lightning.core.policy.vision import PictureTokens, Vision
from grail_lightning.core.policy.weights import evaluation_mode, merged_adapters, rotary_frequencies_kept
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, Messages, pictures_in
from grail_lightning.core.rollout.batch import SampledBatch
from grail_lightning.core.runtime.seeds import preserved

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

_LOGIT_RULES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Options of a text config that change the logits after the product with the head's weight."""


class Policy(nn.Module):
    """A Transformers causal language model that gives the log-probabilities of responses.

    Of `loading` the chat template's arguments and the chunk size are used here. A model that takes pictures has the
    picture tokens of the run. With `samples` the model's generation config is replaced, so that the sampling defaults
    of the checkpoint do not change what engines sample; without it the model stays as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        loading: Loading | None = None,
        pictures: PictureTokens | None = None,
        *,
        samples: bool = True,
    ) -> None:
        super().__init__()
        if samples:
            # For every new shape cuDNN plans its attention anew, in 50 to 140 ms. Each micro-batch and each token has
            # one. The switch is that of the whole process.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.model = model
        self.tokenizer = tokenizer
        self.loading = loading or Loading()
        self.vision: Vision | None = None
        if pictures is not None:
            train = self.loading.train_vision
            self.vision = Vision(model, pictures, trained=train, evaluating=self.evaluating)
        # The checkpoint's sampling defaults are kept for the export.
        self.saved_generation_config = copy.deepcopy(model.generation_config)
        self.end_token_ids = end_token_ids(tokenizer, model.generation_config)
        if samples:
            model.generation_config = type(model.generation_config)(
                eos_token_id=list(self.end_token_ids) or None, pad_token_id=tokenizer.pad_token_id
            )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """See `torch.nn.Module.to`; rotary frequencies keep their dtype."""
        with rotary_frequencies_kept(self):
            return super().to(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def reachable_ends(self) -> list[int]:
        """The end tokens for which the model's head has a row, so that they can be sampled."""
        return [token for token in self.end_token_ids if token < self.head_rows]

    @property
    def head_rows(self) -> int:
        """The number of rows of the model's head: the ids from 0 below it can be sampled."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return int(weight.shape[0])

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the blocks compute: autocast's, or that of the weights."""
        kind, weight_dtype = self.device.type, cast(torch.dtype, self.model.dtype)
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_dtype

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained in place of all weights."""
        return self.loading.lora is not None

    @property
    def uses_flash(self) -> bool:
        """Whether flash-attn computes attention."""
        return str(self.model.config._attn_implementation).startswith("flash_attention")

    @cached_property
    def supports_kv_continuation(self) -> bool:
        """Whether the model can continue from keys and values; tested once."""
        return capabilities.supports_kv_continuation(self)

    @cached_property
    def tree_kernel(self) -> TreeKernel | None:
        """What computes attention in prefix trees, None if the model cannot run them; tested once.

        Under FSDP2 it is tested before the weights are sharded.
        """
        return capabilities.find_tree_kernel(self)

    @cached_property
    def compiled_blocks(self) -> CompiledBlocks | None:
        """The compiled blocks, None if `Loading.compile` or a trial says so; tried once, as `tree_kernel` is."""
        return capabilities.find_compiled_blocks(self)

    @property
    def shares_prefixes(self) -> bool:
        """Whether common beginnings of rows may be run once at present. Dropout forbids it: rows draw separately."""
        drops = self.training and capabilities.has_dropout(self)
        return not self.loading.packing and not drops and self.tree_kernel is not None

    @property
    def decoder(self) -> nn.Module:
        """The stack without the language-model head."""
        decoder: nn.Module = self.model.get_decoder()
        return decoder

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks, first to last."""
        return cast(nn.ModuleList, self.decoder.layers)

    def encode(self, messages: Messages | str) -> list[int]:
        """The token ids of a prompt; each token of a picture has an id of its own, beyond the vocabulary."""
        pictures = None if self.vision is None else self.vision.pictures
        ids = encode_prompt(self.tokenizer, messages, self.loading.chat_template_kwargs, pictures)
        return ids if pictures is None else pictures.name(ids, pictures_in(messages))

    def embed(self, input_ids: Tensor) -> Tensor:
        """``[B, P+T] -> [B, P+T, D]``: the input embeddings; those of picture tokens are what the model sees there."""
        table: nn.Module = self.model.get_input_embeddings()
        if self.vision is None:
            return cast(Tensor, table(input_ids))
        is_picture = input_ids >= FIRST_PICTURE_ID
        embeddings: Tensor = table(input_ids.masked_fill(is_picture, 0))
        if not is_picture.any():
            return embeddings
        return embeddings.masked_scatter(is_picture[..., None], self.vision(input_ids[is_picture]).to(embeddings.dtype))

    def inputs(self, input_ids: Tensor, embeds: Tensor | None = None) -> dict[str, Tensor | None]:
        """The model's arguments for ids: these, or their embeddings if it takes pictures or `embeds` replace them."""
        if embeds is None and self.vision is not None:
            embeds = self.embed(input_ids)
        return {"input_ids": input_ids if embeds is None else None, "inputs_embeds": embeds}

    def position_ids(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The model's argument for ``positions [R, N]``, the tokens before each; see `Vision.position_ids`."""
        return positions if self.vision is None else self.vision.position_ids(input_ids, positions)

    def head(self, hidden: Tensor) -> Tensor:
        """``[..., D] -> [..., V]``: the model's logits from its decoder's output."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        scale, divisor, cap = (getattr(config, name, None) for name in _LOGIT_RULES)
        if scale:  # Cohere
            logits = logits * scale
        if divisor:  # Granite
            logits = logits / divisor
        if cap:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _head_gradient(self, in_place: bool) -> HeadGradient | None:
        """The head's trainable parameters, for a backward pass that is written by hand; see `HeadGradient`.

        None if the head draws random numbers, since autograd repeats these draws in the backward pass.
        """
        head: nn.Module = self.model.get_output_embeddings()
        if any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in head.modules()):
            return None
        config = self.model.config.get_text_config()
        changed = any(getattr(config, name, None) for name in _LOGIT_RULES)
        is_product = type(head) is nn.Linear and getattr(head, "bias", None) is None and not changed
        trained = [p for p in head.parameters() if p.requires_grad]
        return HeadGradient(trained, cast(nn.Linear, head).weight if is_product else None, in_place)

    @property
    def chunk_tokens(self) -> int:
        """Positions whose logits exist at one time: at most 128 MiB in float32 on a CPU, 1 GiB on an accelerator."""
        logits = 2**25 if self.device.type == "cpu" else 2**28
        vocabulary: int = self.model.config.get_text_config().vocab_size
        return max(1, min(self.loading.chunk_tokens, logits // vocabulary))

    def layout(
        self, rows: SampledBatch, starts: Sequence[int] | None = None, *, share_responses: bool = True
    ) -> TokenLayout:
        """The layout of some rows: prefix trees that begin at the rows `starts`, or separate rows if it is None.

        Separate rows are packed if `Loading.packing` is set, else padded. See `tree_layout` for `share_responses`. It
        is made on the CPU, where rows of a copy of the batch cost no wait for the device, and moved to the policy's.
        """
        tensors = rows.input_ids.cpu(), rows.attention_mask.cpu(), rows.response_mask.cpu()
        if starts is not None:
            kernel = self.tree_kernel or "sdpa"
            return tree_layout(*tensors, starts, share_responses=share_responses, kernel=kernel).to(self.device)
        if self.loading.packing:
            return packed_layout(*tensors, flash=self.uses_flash).to(self.device)
        return padded_layout(*tensors).to(self.device)

    def decode(self, layout: TokenLayout, embeds: Tensor | None = None, *, compiled: bool = True) -> Tensor:
        """The decoder's output ``[R, N, D]`` for the tokens of a layout, or for embeddings that replace them.

        Without `compiled` blocks run as they are, for callers that look into them.
        """
        blocks = self.compiled_blocks if compiled else None
        with nullcontext() if blocks is None else blocks.running():
            return self._run_decoder(
                layout.ids,
                embeds,
                position_ids=self.position_ids(layout.ids, layout.positions),
                use_cache=False,
                **layout.attention.arguments(self.compute_dtype),
            )

    def _run_decoder(self, input_ids: Tensor, embeds: Tensor | None, **options: Any) -> Tensor:
        """The decoder's output for ids; `embeds` replace their embeddings where the model computes them.

        Models may read the ids elsewhere, too: Gemma 3n has embeddings for each layer, DeepSeek-V4 routes by ids.
        """
        if embeds is None or self.vision is not None:
            return cast(Tensor, self.decoder(**self.inputs(input_ids, embeds), **options).last_hidden_state)
        hook = self.model.get_input_embeddings().register_forward_hook(lambda *_: embeds)
        try:
            return cast(Tensor, self.decoder(input_ids=input_ids, **options).last_hidden_state)
        finally:
            hook.remove()

    def hidden(
        self,
        attention_mask: Tensor,
        input_ids: Tensor,
        *,
        embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """The decoder's output at every column of padded rows ``[B, W]`` that is not yet in the cache.

        `embeds` replace the input embeddings of all columns.
        """
        begun = 0 if past_key_values is None else past_key_values.get_seq_length()
        return self._run_decoder(
            input_ids[:, begun:],
            embeds,
            attention_mask=attention_mask.long(),
            position_ids=self.position_ids(input_ids, token_positions(attention_mask))[..., begun:],
            use_cache=past_key_values is not None,
            **{capabilities.cache_argument(self.decoder): past_key_values},
        )

    def forward(
        self,
        layout: TokenLayout,
        *,
        temperature: float = 1.0,
        decode: Callable[[TokenLayout], Tensor] | None = None,
        figures: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """``[B, T]``: the log-probability of each valid response token, zero outside the mask.

        Sharded weights (FSDP2) are whole only inside a call of this module, so other computations with the policy are
        passed to it as functions.

        Args:
            layout: The layout of the rows.
            temperature: The number by which the logits are divided.
            decode: What runs the decoder, for callers that need more of it than its output; default `Policy.decode`.
            figures: What is computed and returned in place of the log-probabilities, from the decoder's output
                ``[M, D]`` at the predictions of the layout.
        """
        states = layout.at_predictors((decode or self.decode)(layout))
        if figures is not None:
            return figures(states)
        return layout.to_rows(
            token_logprobs(
                states,
                self.head,
                layout.targets,
                temperature=temperature,
                chunk_tokens=self.chunk_tokens,
                head_gradient=self._head_gradient(in_place=False),
            )
        )

    def token_stats(
        self,
        layout: TokenLayout,
        *,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        in_place: bool = False,
        other_states: Tensor | None = None,
        decode: Callable[[TokenLayout], Tensor] | None = None,
    ) -> TokenStats:
        """Log-probability and entropy (in nats) of each valid response token, ``[B, T]``, zero outside the mask.

        Args:
            layout: The layout of the rows.
            temperature: The number by which the logits are divided.
            entropy_gradient: Whether the entropy carries a gradient.
            in_place: Whether the backward pass adds the gradient of the head's weight to `weight.grad` itself.
            other_states: ``[M, D]``, the states of another distribution at the predictions of the layout, for the
                divergence from it.
            decode: See `forward`.
        """

        def figures(states: Tensor) -> TokenStats:
            chunk = self.chunk_tokens
            flat = token_stats(
                states,
                self.head,
                layout.targets,
                temperature=temperature,
                chunk_tokens=chunk,
                entropy_gradient=entropy_gradient,
                head_gradient=self._head_gradient(in_place),
            )
            divergence = None
            if other_states is not None:
                divergence = layout.to_rows(
                    teacher_divergence(states, other_states, self.head, temperature=temperature, chunk_tokens=chunk)
                )
            return TokenStats(layout.to_rows(flat.logprobs), layout.to_rows(flat.entropy), divergence)

        stats: TokenStats = self(layout, decode=decode, figures=figures)
        return stats

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode inside the context; afterwards every module is in its earlier mode."""
        return evaluation_mode(self)

    @contextmanager
    def trial(self, rows: int, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and their mask ``[rows, columns]`` for a trial run, which leaves modes and random states as they were."""
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.arange(rows * columns, device=self.device).reshape(rows, columns)
        # The first ids are often special tokens, whose states may be so large that rounding grows a thousandfold.
        ids = (ids + vocabulary // 2) % vocabulary
        with self.evaluating(), torch.no_grad(), preserved(self.device):
            yield ids, torch.ones_like(ids, dtype=torch.bool)

    @contextmanager
    def eager_attention(self) -> Iterator[None]:
        """Eager attention inside the context: flash-attn runs neither on CPUs nor in float32."""
        chosen = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(chosen)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Run without LoRA adapters."""
        self.model.disable_adapters()
        try:
            yield
        finally:
            self.model.enable_adapters()

    def save(self, folder: str | Path) -> None:
        """Write model (adapters merged), tokenizer and generation config in Hugging Face format."""
        model, ours = self.model, self.model.generation_config
        try:
            if self.loading.lora is not None:
                model = merged_adapters(copy.deepcopy(model))
            model.generation_config = self.saved_generation_config
            model.save_pretrained(folder)
        finally:
            self.model.generation_config = ours
        if self.vision is not None:
            self.vision.pictures.processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
