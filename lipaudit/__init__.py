"""lipaudit audits how robust a transformer checkpoint is (Lipschitz bounds, norms, attacks)."""

__version__ = "0.1.0"
