"""Training: one plain loop over packed windows."""
