"""Samples from every supported file format, ready for training and evaluation. Imports no torch."""
