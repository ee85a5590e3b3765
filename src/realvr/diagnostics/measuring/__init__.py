"""What the diagnostics of this package do with a model's tensors. Imports torch: only `measure` imports it."""
