"""Tokenizers trained or written here, one of each kind that checkpoints bring, small enough for every test."""

import io
from functools import cache

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from sublayer.text import BytePairs, Bytes, Pretrained, Tokenizer
from sublayer.text.patterns import PATTERNS
from sublayer.text.sentence_piece import SentencePiece
from tests.text.strings import HARD

CORPUS = ["the cat sat on the mat, didn't it? <|im_start|> x != y !", "   indented\n\n    naïve 日本語 €€€ 👩‍👧"]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, with Llama 3's frame."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    frame = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    model.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), frame])
    return model


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: spaces are ▁, one is put before the text, and unknown characters become bytes."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *byte_pieces, "▁", "c", "a", "t", "ca", "cat", "▁cat"]
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    return model


def word_piece() -> tokenizers.Tokenizer:
    """As BERT."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[", "]", "cat", "##s", "sep", ",", "."]
    model = tokenizers.Tokenizer(models.WordPiece({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer()
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    model.decoder = decoders.WordPiece()
    model.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return model


def unigram() -> tokenizers.Tokenizer:
    """As T5: the special tokens are pieces of the model itself."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -5.0) for letter in "acst</>")]
    model = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    model.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return model


LIBRARY = (byte_level, byte_fallback, word_piece, unigram)


def byte_pairs(**options) -> tokenizers.Tokenizer:
    """As GPT-4, trained on texts of all kinds, an end of text after them."""
    model = tokenizers.Tokenizer(models.BPE(**options))
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS["cl100k"]), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator([text for text in HARD for _ in range(3)], trainer)
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return model


@cache
def sentence_piece_model(kind: str) -> bytes:
    """Trained with byte fallback, as Llama 2's and Gemma's; with a user-defined piece, as Gemma's."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in [*CORPUS, *HARD] for line in text.split("\n") if line] * 4),
        model_writer=out,
        vocab_size=420,
        model_type=kind,
        byte_fallback=True,
        user_defined_symbols=["<tool>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


ALL: dict[str, Tokenizer] = {
    "bytes": Bytes(("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "byte pairs": BytePairs(byte_pairs()),
    "byte fallback": Pretrained(byte_fallback(), unknown=0),
    "word piece": Pretrained(word_piece(), unknown=1),
    "unigram": Pretrained(unigram(), unknown=2),
    "sentencepiece bpe": SentencePiece(sentence_piece_model("bpe")),
    "sentencepiece unigram": SentencePiece(sentence_piece_model("unigram")),
}
"""Each kind, as its class has it."""

LOSSLESS = ("bytes", "byte pairs", "byte fallback", "sentencepiece bpe", "sentencepiece unigram")
"""Those that give back every text, but for the character that stands for a space in some."""
