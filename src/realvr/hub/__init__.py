"""The Hugging Face hub, through ``huggingface_hub``: what went wrong in one line, and datasets by name. No torch."""
