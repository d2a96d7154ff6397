"""Views of rollouts with their token credit, as pictures and as HTML pages. Nothing here imports torch.

Text from a model is shown, never interpreted.
"""

from grail_lightning.app.views.page import show_credit, write_page

__all__ = ["show_credit", "write_page"]
