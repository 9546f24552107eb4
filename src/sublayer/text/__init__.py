"""Text to token ids and back: bytes, and the tokenizers that checkpoints bring."""

from .bytes import Bytes
from .pretrained import Pretrained, load_tokenizer
from .tokenizer import StreamDecoder, Tokenizer

__all__ = ["Bytes", "Pretrained", "StreamDecoder", "Tokenizer", "load_tokenizer"]
