"""Short-run MCMC models (Nijkamp et al. 2019): their trainer, and the study of what they learn."""
