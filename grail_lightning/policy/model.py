"""The policy as a module: log-probabilities and entropy without full logits, and the leaves for saliency.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from grail_lightning.functional.tokens import TokenStats, token_logprobs
from grail_lightning.policy.masters import Masters
from grail_lightning.policy.options import Loading
from grail_lightning.policy.packing import boundaries, pack, unpack
from grail_lightning.policy.tokenizer import encode_prompt, end_token_ids
from grail_lightning.rollout import Messages
from grail_lightning.seeds import preserved


class Policy(nn.Module):
    """A causal language model that says how likely given responses are.

    Args:
        model: A Transformers causal language model with a decoder stack.
        tokenizer: Its tokenizer.
        loading: How it was loaded; the chat template's arguments and the chunk size are used from here on.
    """

    def __init__(self, model: Any, tokenizer: Any, loading: Loading | None = None) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.loading = loading or Loading()
        # What the checkpoint says about sampling must not leak into ours; it is kept for the export.
        self.saved_generation_config = copy.deepcopy(model.generation_config)
        self.end_token_ids = end_token_ids(tokenizer, model.generation_config)
        model.generation_config = type(model.generation_config)(
            eos_token_id=list(self.end_token_ids) or None, pad_token_id=tokenizer.pad_token_id
        )
        # The balance loss of experts is not trained. Transformers would compute it at each decoding step, with the
        # mask of all columns so far, and fail.
        configs = {id(c): c for c in (model.config, model.config.get_text_config())}
        self._routed = [c for c in configs.values() if getattr(c, "output_router_logits", False)]
        self._report_routers(False)

    compute_device: torch.device | None = None
    """Set by `shard` where weights stay on the host."""

    continues: bool | None = None
    """Whether the decoder can go on behind keys and values; None until `policy.prefix.can_share` has tried."""

    branches: bool | None = None
    """Whether rows can be run as trees of tokens; None until `policy.trees.can_branch` has tried."""

    masters: Masters | None = None
    """What the optimiser moves in place of weights in half precision."""

    adds_up: bool = False
    """Whether a backward pass adds the head's gradient to what its weight has, instead of leaving that to autograd."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self.compute_device or next(self.model.parameters()).device
        return device

    @property
    def compute_dtype(self) -> torch.dtype:
        """In which blocks compute: autocast's, or that of the weights."""
        kind, own = self.device.type, cast(torch.dtype, self.model.dtype)
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own

    @property
    def flash(self) -> bool:
        """Whether flash-attn attends."""
        return str(self.model.config._attn_implementation) == "flash_attention_2"

    @property
    def trained_weights(self) -> list[Tensor]:
        """What the optimiser moves: the weights that need a gradient, or their masters."""
        return [p for p in self.parameters() if p.requires_grad] if self.masters is None else self.masters.parameters

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
        """A prompt as token ids."""
        return encode_prompt(self.tokenizer, messages, self.loading.chat_template_kwargs)

    def embed(self, input_ids: Tensor) -> Tensor:
        """``[B, P+T] -> [B, P+T, D]``: the input embeddings."""
        embeddings: Tensor = self.model.get_input_embeddings()(input_ids)
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        """``[..., D] -> [..., V]``: logits as the model itself makes them from its decoder's output."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scale := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def chunk_tokens(self) -> int:
        """Positions whose logits exist at a time: at most 128 MiB of them in float32, on an accelerator 1 GiB."""
        logits = 2**25 if self.device.type == "cpu" else 2**28
        vocabulary: int = self.model.config.get_text_config().vocab_size
        return max(1, min(self.loading.chunk_tokens, logits // vocabulary))

    def _trained_head(self) -> list[Tensor] | None:
        """What the head trains; None where it is random, so that autograd repeats its draws in the backward pass."""
        head = self.model.get_output_embeddings()
        if any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in head.modules()):
            return None
        return [p for p in head.parameters() if p.requires_grad]

    def _head_weight(self) -> Tensor | None:
        """The matrix with which the head is a product and nothing else; None if there is more to it."""
        linear: Any = self.model.get_output_embeddings()
        more = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        extra = any(getattr(self.model.config.get_text_config(), name, None) for name in more)
        plain = type(linear) is nn.Linear and getattr(linear, "bias", None) is None and not extra
        return linear.weight if plain else None

    def hidden(
        self,
        attention_mask: Tensor,
        *,
        input_ids: Tensor | None = None,
        embeds: Tensor | None = None,
        behind: Any = None,
    ) -> Tensor:
        """The decoder's output ``[B, P+T, D]`` for ids or for embeddings; padding does not shift positions.

        Packed, it is zero on padding. Transformers then tells the rows apart by positions that begin again. `behind` is
        a key-value cache of what stands before: ids or embeddings and the output are then of the last columns alone.
        """
        positions = left_to_run((attention_mask.long().cumsum(1) - 1).clamp(min=0), behind)
        out = self.decoder(
            input_ids=None if input_ids is None else self.pack(input_ids, attention_mask),
            inputs_embeds=None if embeds is None else self.pack(embeds, attention_mask),
            attention_mask=None if self.loading.packing else attention_mask.long(),
            position_ids=self.pack(positions, attention_mask),
            past_key_values=behind,
            use_cache=behind is not None,
            **(boundaries(attention_mask.bool()) if self.loading.packing and self.flash else {}),
        )
        return self.unpack(out.last_hidden_state, attention_mask)

    def pack(self, padded: Tensor, attention_mask: Tensor) -> Tensor:
        """Padded rows ``[B, P+T, ...]`` as the blocks get them: ``[1, N, ...]`` under packing, else as they are."""
        return pack(padded, attention_mask.bool()) if self.loading.packing else padded

    def unpack(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """What the blocks have as padded rows ``[B, P+T, ...]``; zero on padding under packing."""
        return unpack(states, attention_mask.bool()) if self.loading.packing else states

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        behind: Any = None,
        trees: Any = None,
    ) -> TokenStats:
        """Log-probability of each valid response token, and on request the entropy of its distribution.

        The head runs on valid response positions alone, in chunks.

        Args:
            input_ids: ``[B, P+T]``, prompts padded left, responses padded right.
            attention_mask: ``[B, P+T]`` bool.
            response_mask: ``[B, T]`` bool.
            temperature: Divides the logits.
            with_entropy: Whether to return the entropy in nats, too.
            entropy_gradient: Whether it carries a gradient.
            behind: Keys and values of all prompt tokens but the last, which then are not run.
            trees: The rows as `PrefixTrees`, which are run in their place.

        Returns:
            ``[B, T]`` each, zero outside the mask.
        """
        if trees is None:
            # The last column predicts nothing.
            ids, mask = input_ids[:, :-1], attention_mask[:, :-1]
            states = last_columns(self.hidden(mask, input_ids=left_to_run(ids, behind), behind=behind), response_mask)
        else:
            states = self._through_trees(trees)
        return self.score(
            states,
            input_ids,
            response_mask,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            trees=trees,
        )

    def _through_trees(self, trees: Any) -> Tensor:
        """The decoder's output ``[G, N, D]``."""
        out = self.decoder(
            input_ids=trees.ids,
            attention_mask=trees.mask(self.compute_dtype),
            position_ids=trees.positions,
            use_cache=False,
        )
        return cast(Tensor, out.last_hidden_state)

    def score(
        self,
        states: Tensor,
        input_ids: Tensor,
        response_mask: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        trees: Any = None,
    ) -> TokenStats:
        """`forward` from the decoder's output ``[B, T, D]`` on, that of the token before each response token.

        Of trees it is their tokens' ``[G, N, D]``.
        """
        if trees is None:
            chosen, targets = states[response_mask], last_columns(input_ids, response_mask)[response_mask]
        else:
            chosen, targets = trees.predictors(states), trees.targets
        flat = token_logprobs(
            chosen,
            self.head,
            targets,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            trained=self._trained_head(),
            weight=self._head_weight(),
            add_up=lambda: self.adds_up,
        )

        def padded(found: Tensor) -> Tensor:
            values = found if trees is None else trees.spread(found)
            return values.new_zeros(response_mask.shape).masked_scatter(response_mask, values)

        return TokenStats(padded(flat.logprobs), None if flat.entropy is None else padded(flat.entropy))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode for a while; afterwards every module is in the mode that it was in."""
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    @contextmanager
    def trial(self, rows: int, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Token ids and their mask, ``[rows, columns]``, to try the model on: in evaluation mode and without gradients.

        Afterwards every module is in the mode that it was in, and random numbers go on where they were.
        """
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.arange(rows * columns, device=self.device).reshape(rows, columns) % vocabulary
        with self.evaluating(), torch.no_grad(), preserved(self.device):
            yield ids, torch.ones_like(ids, dtype=torch.bool)

    @contextmanager
    def eager_attention(self) -> Iterator[None]:
        """Run where flash-attn cannot: on the CPU on which weights are loaded, and in full precision. Not compiled."""
        chosen = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self.model.set_attn_implementation(chosen)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Run without LoRA adapters: the reference policy of an adapter run costs no second copy."""
        self.model.disable_adapters()
        try:
            yield
        finally:
            self.model.enable_adapters()

    def _report_routers(self, value: bool) -> None:
        for config in self._routed:
            config.output_router_logits = value

    def save(self, folder: str | Path) -> None:
        """Write model (adapters merged), tokenizer and generation config in Hugging Face format."""
        model, ours = self.model, self.model.generation_config
        self._report_routers(True)
        try:
            if self.loading.lora is not None:
                model = merge_adapters(copy.deepcopy(model))
            model.generation_config = self.saved_generation_config
            model.save_pretrained(folder)
        finally:
            self.model.generation_config = ours
            self._report_routers(False)
        self.tokenizer.save_pretrained(folder)


@contextmanager
def requiring_grad(parameters: list[nn.Parameter], value: bool) -> Iterator[None]:
    """Parameters that need a gradient, or need none, for a while; none of them may be that way before."""
    for parameter in parameters:
        parameter.requires_grad_(value)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(not value)


def last_columns(values: Tensor, mask: Tensor) -> Tensor:
    """``[B, W, ...] -> [B, T, ...]`` for a mask ``[B, T]``; none if ``T`` is 0, where ``-T:`` would be all."""
    return values[:, values.shape[1] - mask.shape[1] :]


def left_to_run(columns: Tensor, behind: Any) -> Tensor:
    """``[B, W] -> [B, w]``: the columns that a key-value cache does not hold yet; all without one."""
    return columns if behind is None else columns[:, behind.get_seq_length() :]


def merge_adapters(model: Any) -> Any:
    """Fold LoRA adapters into the weights of `model`, in place, and take them out."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model
