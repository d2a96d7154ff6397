"""Engines that sample with vLLM. No module here imports vllm at its top: `--help` and other engines do without it."""
