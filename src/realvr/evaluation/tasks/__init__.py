"""One file a benchmark; see `realvr.evaluation.benchmark.Benchmark`. Nothing here imports torch."""
