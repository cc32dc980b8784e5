"""Whether two recipes, or a recipe and a plain PyTorch loop, train alike, and which choice makes the difference."""
