"""Stage 1 (LVR-SFT), Stage 2 (GRPO and evidence), and training a base model from nothing."""
