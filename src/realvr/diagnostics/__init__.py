"""Questions asked of a latent: measure, summarise, draw."""
