"""What runs in the processes of vLLM. It imports nothing else of grail-lightning, and needs nothing that vLLM lacks.

vllm serve MODEL --worker-extension-cls grail_lightning.vllm_worker.WeightReceiver
"""

from grail_lightning.vllm_worker.extension import PROTOCOL, WeightReceiver
from grail_lightning.vllm_worker.model import report_whole_vocabulary, take_weights

__all__ = ["PROTOCOL", "WeightReceiver", "report_whole_vocabulary", "take_weights"]
