"""A static page from saved results: `realvr report`. Loads no model and imports no torch."""
