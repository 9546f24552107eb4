"""Training: one plain loop over packed windows."""

from .loop import bits_per_byte, next_token_loss, pack, train

__all__ = ["bits_per_byte", "next_token_loss", "pack", "train"]
