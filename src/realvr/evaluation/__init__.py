"""Evaluation: benchmarks, runner, scoring, comparison."""
