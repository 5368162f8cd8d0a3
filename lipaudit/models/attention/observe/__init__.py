"""Meet attention calls and linear maps while an unmodified model runs."""
