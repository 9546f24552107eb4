"""Word vectors: skip-gram and GloVe trained on text, their neighbours and analogies, and TF-IDF to hold them against.

They are tables, not transformers, so they stand beside the models and not among the recipes.
"""

from .corpus import Corpus
from .glove import Glove
from .skipgram import SkipGram
from .tables import fit
from .vectors import Vectors

__all__ = ["Corpus", "Glove", "SkipGram", "Vectors", "fit"]
