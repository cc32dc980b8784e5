"""Turn files of rows into batches of token ids: sources, formats, templates, cache, order, collation."""
