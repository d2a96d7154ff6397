"""Token credit in a training loop of one's own: `run_credit` between the rewards and the loss."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grail_lightning import resolve_policy
from grail_lightning.credit import GRAIL, GivenRollouts, as_policy, run_credit

folder = resolve_policy("arithmetic")  # a packaged policy; any causal language model of Transformers will do
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
policy = as_policy(model, tokenizer)  # once
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
problems = {"Compute 7+5-3+8+2.": "19", "Compute 9-4+6+1-5.": "7"}
group_size, history = 8, []

for step in range(4):
    prompts = tokenizer(
        [problem for problem in problems for _ in range(group_size)],
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )
    width = prompts["input_ids"].shape[1]
    ids = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=48)
    responses = ids[:, width:]
    ended = (responses == tokenizer.eos_token_id).long().cumsum(1)
    mask = (ended == 0) | ((ended == 1) & (responses == tokenizer.eos_token_id))  # the end token included
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    answers = [answer for answer in problems.values() for _ in range(group_size)]
    rewards = torch.tensor([float(rf"\boxed{{{a}}}" in text) for a, text in zip(answers, texts, strict=True)])

    rollouts = GivenRollouts(
        prompt_ids=prompts["input_ids"],
        prompt_mask=prompts["attention_mask"],
        response_ids=responses,
        response_mask=mask,
        rewards=rewards,
        group=torch.arange(len(texts)) // group_size,
    )
    advantages = run_credit(GRAIL(), policy, rollouts, step=step)  # [B, T]

    attention = torch.cat([prompts["attention_mask"], mask.long()], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, width - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)
    loss = -(logprobs * advantages).sum() / mask.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(rewards.mean().item())
