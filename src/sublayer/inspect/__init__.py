"""Tools that show what a model is and what it does, over the same modules that compute it."""
