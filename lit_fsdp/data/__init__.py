"""From files of rows to batches of token ids: sources, formats, templates, cache, order, collate."""
