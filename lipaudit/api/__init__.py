"""lipaudit from Python: what `import lipaudit` offers by name, loaded when it is first used."""
