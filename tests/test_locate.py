"""Answers and labelled steps on sampled token ids, with the packaged tokenizer."""
