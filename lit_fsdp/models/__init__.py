"""Models: where they come from, how they are built without memory, and how each rank reads only its part."""
