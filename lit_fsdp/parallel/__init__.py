"""How a model is spread over ranks: mesh, units, dtypes, loading, and the two engines."""
