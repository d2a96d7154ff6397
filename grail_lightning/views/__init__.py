"""Views of rollouts with their token credit, as pictures and as HTML pages. Nothing here imports torch.

Text from a model is shown, never interpreted.
"""

from grail_lightning.views.notebook import show_credit
from grail_lightning.views.page import render, write_page
from grail_lightning.views.prefix_tree import Node, forks, prefix_tree
from grail_lightning.views.rollouts import Credit, Rollout, read_rollouts

__all__ = ["Credit", "Node", "Rollout", "forks", "prefix_tree", "read_rollouts", "render", "show_credit", "write_page"]
