"""The typed, frozen sections of a recipe. Standard library only: nothing here may import torch."""
