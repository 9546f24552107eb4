"""Text corpora: documents read, kept as tokens on disk, packed into rows; and labelled images.

`sublayer.data.batches` and `.images` are imported by their own names, for they bring torch: reading and tokenizing need
none.
"""

from .readers import Document, Seen, documents, measure
from .shards import Progress, Tokens, prepare, write

__all__ = ["Document", "Progress", "Seen", "Tokens", "documents", "measure", "prepare", "write"]
