"""Text corpora and packed windows of tokens."""
