"""Letters to phonemes by a recurrent encoder-decoder (g2p-en, Apache-2.0): from an npz to a folder of Sublayer's.

One GRU reads the letters forward, another tells the phonemes from the state in which the first ended.
"""

from pathlib import Path

import numpy as np
import torch

from sublayer.names import Row
from sublayer.recipes.seq2seq import seq2seq
from tests import assets
from tests.assets.folder import write

UNKNOWN, END = 1, 2
LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
BEGIN, STOP = 2, 3
SIGNS = (
    "<pad> <unk> <s> </s> AA0 AA1 AA2 AE0 AE1 AE2 AH0 AH1 AH2 AO0 AO1 AO2 AW0 AW1 AW2 AY0 AY1 AY2 B CH D DH EH0 EH1 "
    "EH2 ER0 ER1 ER2 EY0 EY1 EY2 F G HH IH0 IH1 IH2 IY0 IY1 IY2 JH K L M N NG OW0 OW1 OW2 OY0 OY1 OY2 P R S SH T TH "
    "UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH"
)
PHONEMES = SIGNS.split()

SPEC = seq2seq(256, vocab=len(PHONEMES), source_vocab=len(LETTERS), attention=False).override(
    **{"encoder.embed.layers.0.direction": "forward"}  # the papers read backward
)

READER, TELLER = "encoder.embed.layers.0.cell", "decoder.blocks.0.mixer.op.cell"
NAMES = [
    Row("enc_emb", "encoder.embed.tokens.weight"),
    Row("dec_emb", "decoder.embed.tokens.weight"),
    *(
        Row(f"{theirs}_{end}", f"{ours}.{name}")
        for theirs, ours in (("enc", READER), ("dec", TELLER))
        for end, name in (("w_ih", "input"), ("w_hh", "recurrent"), ("b_ih", "input_bias"), ("b_hh", "recurrent_bias"))
    ),
    Row("fc_w", "head.weight"),
    Row("fc_b", "head.bias"),
]


def convert(folder: Path) -> Path:
    """Writes spec.json and model.safetensors."""
    return write(folder, SPEC, NAMES, {name: torch.from_numpy(array) for name, array in stored().items()})


def stored() -> dict[str, np.ndarray]:
    """The weights as they are in the package."""
    return dict(np.load(assets.pypi("g2p-en", "2.1.0") / "g2p_en" / "checkpoint20.npz").items())


def ids(word: str) -> list[int]:
    """What the encoder reads of a word."""
    return [LETTERS.index(letter) if letter in LETTERS else UNKNOWN for letter in word] + [END]
