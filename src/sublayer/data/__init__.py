"""Text corpora: documents read, kept as tokens on disk, packed into rows.

`sublayer.data.batches` is imported by its own name, for it brings torch: reading and tokenizing need none.
"""

from .readers import Document, Seen, documents, measure
from .shards import Progress, Tokens, prepare, write

__all__ = ["Document", "Progress", "Seen", "Tokens", "documents", "measure", "prepare", "write"]
