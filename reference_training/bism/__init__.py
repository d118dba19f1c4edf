"""Energy-based models with latent variables, by bi-level score matching (BiSM) and its baselines.

Bao et al. 2020, *Bi-level Score Matching for Learning Energy-based Latent Variable Models*. A model
is E(v, h) of visible v and latent h, a posterior is q(h | v) with parameters phi.
"""
