"""Distribute a model over ranks: mesh, units, dtypes, loading, and the engines."""
