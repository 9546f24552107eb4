"""Text to token ids and back: bytes, and the tokenizers that checkpoints bring."""

from .byte_pairs import BytePairs
from .bytes import Bytes
from .counted import Characters, Words
from .load import load_tokenizer
from .pretrained import Pretrained
from .sentence_piece import SentencePiece
from .tokenizer import Ids, Policy, StreamDecoder, Tokenizer
from .train import train_bpe

__all__ = [
    "BytePairs",
    "Bytes",
    "Characters",
    "Ids",
    "Policy",
    "Pretrained",
    "SentencePiece",
    "StreamDecoder",
    "Tokenizer",
    "Words",
    "load_tokenizer",
    "train_bpe",
]
