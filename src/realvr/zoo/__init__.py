"""Presets of the paper's backbones, tiny and mini builders."""
