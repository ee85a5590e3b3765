"""Evaluation: the five benchmarks, counterfactual pairs and latent exchange, with numbers one can defend."""
