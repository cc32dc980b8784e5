"""Configurations of Accelerate, Transformers and DeepSpeed as recipes, with the fate of every key."""
