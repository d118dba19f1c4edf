"""Short-run MCMC energy-based models (Nijkamp et al. 2019): the trainer, and the study of what it learns."""
