"""Text to token ids and back: bytes, and the tokenizers that checkpoints bring."""

from sublayer.text.bytes import Bytes
from sublayer.text.pretrained import Pretrained, load_tokenizer
from sublayer.text.tokenizer import StreamDecoder, Tokenizer

__all__ = ["Bytes", "Pretrained", "StreamDecoder", "Tokenizer", "load_tokenizer"]
