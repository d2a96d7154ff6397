"""The policy: any Hugging Face causal language model, its tokenizer, and log-probabilities without full logits."""
