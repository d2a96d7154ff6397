"""Token credit in a trainer that is not this package's: from ids, masks and rewards to advantages of tokens.

What another trainer calls, once and in each step::

    policy = as_policy(model, tokenizer)
    advantages = run_credit(GRAIL(), policy, GivenRollouts(prompt_ids=…, …), step=step)      # [B, T]

It needs no LightningModule. The trainer samples, scores and updates; its loss takes an advantage for each token.
"""
