"""Attacks that change texts: words by near ones, and characters."""
