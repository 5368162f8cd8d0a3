"""Adversarial attacks: from a function f, samples x, labels y and a radius to x_adv."""
