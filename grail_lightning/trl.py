"""Token credit inside TRL's `GRPOTrainer`. A name that is asked for imports TRL (extra `trl`)."""

from typing import TYPE_CHECKING

from grail_lightning._lazy import lazy

if TYPE_CHECKING:
    from grail_lightning.app.trl.pages import CreditPages
    from grail_lightning.app.trl.trainer import TokenCreditGRPOTrainer, TokenCreditMixin

__all__ = ["CreditPages", "TokenCreditGRPOTrainer", "TokenCreditMixin"]

_EXPORTS = {
    "CreditPages": "grail_lightning.app.trl.pages",
    "TokenCreditGRPOTrainer": "grail_lightning.app.trl.trainer",
    "TokenCreditMixin": "grail_lightning.app.trl.trainer",
}

__getattr__ = lazy(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
