"""The speed of each batch."""

import sys
import time

import torch

from grail_lightning.callbacks import Throughput
from tests.callbacks.scripted import Scripted, board, box, loader, prompts, run, scalars


class Slow(Scripted):
    """Each batch takes at least 50 ms, and logs a reward for the bar."""

    def training_step(self, problems, batch_idx):
        time.sleep(0.05)
        self.log("train/reward", torch.tensor(0.25), prog_bar=True, logger=False, batch_size=1)
        return super().training_step(problems, batch_idx)


def _say(prompt, k, step):
    return box(prompt.reference)


def _count(module):
    """Tokens of a batch: two problems with two samples each: prompt, response, end token."""
    encode = module.tokenizer
    return sum(2 * len(encode(p.messages)["input_ids"] + encode(box(p.reference))["input_ids"]) + 2 for p in prompts(2))


def test_tokens_time_and_memory_of_each_batch_are_logged_and_the_bar_shows_the_speed(tmp_path, capsys):
    module = Slow(_say)
    run(4, Throughput(), logger=board(tmp_path), enable_progress_bar=True).fit(module, loader(*[prompts(2)] * 3))
    shown, found, tokens = capsys.readouterr().out, scalars(tmp_path), _count(module)
    assert "train/reward" in shown
    assert "tokens_per_" in shown
    assert found["speed/num_tokens"] == [(2, tokens), (4, 2 * tokens)]
    for (_, seconds), (_, rate) in zip(found["speed/step_time"], found["speed/tokens_per_second"], strict=True):
        assert 0.05 < seconds < 5
        assert abs(rate * seconds - tokens) < 1e-3 * tokens
    if sys.platform == "linux":
        # A process that has imported torch holds more than 100 MiB, and this one less than the machine has.
        with open("/proc/self/status") as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
        assert 0.1 < found["speed/peak_memory_gb"][-1][1] <= resident * 1.01


def test_the_count_goes_on_after_a_resume_and_starts_anew_in_a_new_fit(tmp_path):
    data, throughput = loader(*[prompts(2)] * 2), Throughput()
    tokens = _count(Scripted(_say))
    first = run(4, throughput)
    first.fit(Scripted(_say), data)
    first.save_checkpoint(tmp_path / "at4.ckpt")
    resumed = Throughput()
    run(8, resumed).fit(Scripted(_say), data, ckpt_path=tmp_path / "at4.ckpt", weights_only=True)
    assert (throughput.num_tokens, resumed.num_tokens) == (2 * tokens, 4 * tokens)
    run(2, throughput).fit(Scripted(_say), data)
    assert throughput.num_tokens == tokens
