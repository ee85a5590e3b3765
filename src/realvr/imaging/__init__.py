"""Opening images, processors to patches, grids, one identity per picture."""
