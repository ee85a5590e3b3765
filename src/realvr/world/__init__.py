"""The embedded synthetic world: scenes, questions, counterfactual edits and mini-benchmarks. Imports no torch.

from realvr.world.splits import Recipe, items, samples
for sample in samples(Recipe("train-boxes", seed=0, count=100)): ...
"""
