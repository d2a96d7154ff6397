"""The names that others have for our options: those of TRL, of Transformers' `Trainer`, of verl, and of papers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from grail_lightning.app.cli.classes import choices
from grail_lightning.core.runtime.pages import page

_NAMES = """
model.policy: model model_name_or_path model.path
model.loading.dtype: torch_dtype model_init_kwargs
model.loading.attention: attn_implementation
model.loading.lora: use_peft peft_config use_lora
model.loading.lora.rank: lora_r lora_rank
model.loading.lora.alpha: lora_alpha
model.loading.lora.dropout: lora_dropout
model.loading.lora.target_modules: lora_target_modules target_modules
model.loading.packing: use_remove_padding use_liger_kernel padding_free
model.loading.gradient_checkpointing: enable_gradient_checkpointing gradient_checkpointing_kwargs
model.loading.compile: torch_compile use_torch_compile torch_compile_backend
model.loading.chat_template_kwargs: apply_chat_template_kwargs
model.execution.group_size: group_size num_generations rollout.n n num_rollouts rollouts_per_prompt
model.execution.num_iterations: num_iterations updates_per_batch ppo_epochs num_ppo_epochs
model.execution.mini_batches: ppo_mini_batch_size num_mini_batches steps_per_generation mini_batch_size
model.execution.token_budget: per_device_train_batch_size gradient_accumulation_steps ppo_micro_batch_size
    ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu use_dynamic_bsz
    micro_batch_size
model.execution.max_grad_norm: grad_clip
model.execution.refill_rounds: filter_groups dynamic_sampling max_num_gen_batches
model.execution.sampler_cap: vllm_importance_sampling_cap vllm_importance_sampling_correction tis_imp_ratio_cap
model.execution.sample_ahead: async_rollout one_step_off
model.sampling.max_response_length: max_completion_length max_new_tokens max_tokens response_length
model.sampling.stop: stop_strings stop_sequences
model.objective: loss_type loss_mode
model.objective.aggregation: loss_agg_mode
model.advantage.scale: norm_adv_by_std_in_grpo scale_advantages scale_rewards
model.objective.clip_low: epsilon clip_ratio clip_ratio_low cliprange eps_clip
model.objective.clip_high: epsilon_high clip_ratio_high
model.objective.ratio_cap: delta clip_ratio_c
model.objective.level: importance_sampling_level
model.objective.kl_coefficient: beta kl_coef kl_loss_coef use_kl_loss use_kl_in_reward init_kl_coef
model.objective.kl_estimator: kl_loss_type kl_penalty
model.objective.entropy_coefficient: entropy_coeff entropy_coef
model.objective.mask_truncated: mask_truncated_completions
model.credit: top_entropy_quantile
model.advantage: adv_estimator advantage_estimator multi_objective_aggregation normalize_advantages
model.engine: use_vllm vllm_mode vllm_server_base_url vllm_gpu_memory_utilization rollout.name
    gpu_memory_utilization
model.optimizer: optim
model.optimizer.lr: learning_rate
model.scheduler: lr_scheduler_type warmup_steps warmup_ratio lr_warmup_steps lr_warmup_steps_ratio
data.train: train_dataset train_files dataset_name train_file
data.val: eval_dataset val_files
data.prompts_per_batch: train_batch_size gen_batch_size generation_batch_size
data.eval_prompts_per_batch: per_device_eval_batch_size val_batch_size
data.max_prompt_length: max_prompt_len
data.overlong: filter_overlong_prompts truncation
data.task.rewards: reward_funcs reward_weights reward_function custom_reward_function reward_model reward_fn
data.task.environment: environment_factory
data.task.isolation: sandbox_fusion.url
evaluation.num_samples: num_generations_eval val_kwargs.n
evaluation.at_start: val_before_train eval_on_start
trainer.max_epochs: num_train_epochs total_epochs
trainer.max_steps: total_training_steps
trainer.devices: n_gpus_per_node
trainer.num_nodes: nnodes
trainer.precision: bf16 fp16
trainer.strategy: fsdp deepspeed
trainer.logger: report_to project_name experiment_name run_name
trainer.log_every_n_steps: logging_steps
trainer.val_check_interval: eval_steps test_freq
trainer.default_root_dir: output_dir default_local_dir
trainer.callbacks: log_completions
checkpoint.every_n_train_steps: save_steps save_freq
checkpoint.save_top_k: save_total_limit
ckpt_path: resume_from_checkpoint resume_mode
seed_everything: seed data_seed
"""


def _names() -> Iterator[tuple[str, str]]:
    ours = ""
    for line in _NAMES.strip().splitlines():
        before, colon, theirs = line.partition(": ")
        ours, theirs = (before, theirs) if colon else (ours, line)
        yield from ((name, ours) for name in theirs.split())


KNOWN_AS = dict(_names())
"""Our option by the name that it has elsewhere, which may be the end of a longer one."""
_GROUPS = ("actor_rollout_ref", "algorithm", "actor", "rollout", "critic", "reward_model", "custom_reward_function")


_KINDS = {
    "model.objective": "an objective",
    "model.advantage": "an estimator of the advantage",
    "model.credit": "a credit method",
    "model.control": "a control",
}
_SHORT = {"gspo": "gspotoken", "rloo": "leaveoneout", "oarg": "oargradient"}


def known_algorithm(option: str, name: str) -> str:
    """A sentence, after a space, about an algorithm that is misspelt or the value of another option; else empty."""
    plain = re.sub("[-_. ]", "", name.lower())
    plain = _SHORT.get(plain, plain)
    for place, kind in _KINDS.items():
        for cls in choices(place):
            if cls.lower() == plain:
                here = place == option or (place == "model.credit" and option == "predictions.compare")
                return f" Did you mean {cls}?" if here else f" `{cls}` is {kind}: --{place}={cls}."
    return ""


def known_as(option: str) -> str:
    """A sentence, after a space, with our option for one of another trainer; empty if it is none that we know."""
    parts = option.split(".")
    if option == "tools":  # At the end of a longer name it is our own.
        return " Here it is `data.task.tools`."
    for start in range(len(parts)):
        if ours := KNOWN_AS.get(".".join(parts[start:])):
            return f" Here it is `{ours}`."
    if parts[0] in _GROUPS:  # Of verl; in a file that is all that is named.
        return f" It is a group of verl's options: {page('reference/options.md')} has ours."
    return ""
