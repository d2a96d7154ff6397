"""The worker extension with a method that changes a weight, as no push would; for tests alone."""

import torch

from grail_lightning.core.engines.vllm.worker import WeightReceiver


class Changeable(WeightReceiver):
    """Adds a method with which a test changes one weight behind the trainer's back."""

    def change_a_norm(self, name: str, row: int, by: float) -> dict:
        """Add a number to one element of a vector, which vLLM packs nowhere."""
        with torch.inference_mode(False), torch.no_grad():
            self.model_runner.get_model().get_parameter(name)[row] += by
        return {}
