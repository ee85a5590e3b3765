"""realvr: train, evaluate and look inside latent visual reasoning in vision-language models."""

__version__ = "0.1.0"
