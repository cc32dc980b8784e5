"""Compare the training of two recipes, or of a recipe and a plain PyTorch loop, and find the setting that differs."""
