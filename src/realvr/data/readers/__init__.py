"""One module per real file format."""
