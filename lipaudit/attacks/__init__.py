"""Adversarial attacks: a callable f, samples x, labels y and a radius in; x_adv out."""
