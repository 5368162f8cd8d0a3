"""lipaudit: how sensitive is a transformer checkpoint, and where?

    import lipaudit

    report = lipaudit.audit("demo", ["bounds", "jacobian"], samples=8)
    report.section("bounds").frame()
    lipaudit.render(report, "html")
    lipaudit.bounds.sharp(x, wq, wk, wv)

Each public name is loaded when it is first used; `import lipaudit` does not load torch.
"""

__version__ = "0.2.0"

# Module and object of each public name of the core; wings add more.
PUBLIC = {
    "LipauditError": "lipaudit.errors:LipauditError",
    "ModelSpec": "lipaudit.models.net:ModelSpec",
    "Observer": "lipaudit.engine.execute:Observer",
    "Report": "lipaudit.tables:Report",
    "audit": "lipaudit.api:audit",
    "bounds": "lipaudit.tensors",
    "load": "lipaudit.schema:load",
    "measure": "lipaudit.api:measure",
    "merge": "lipaudit.engine.shards:merge",
    "rank": "lipaudit.gate:rank",
    "render": "lipaudit.report:render",
    "summarize": "lipaudit.report:summarize",
}


def list_public() -> dict[str, str]:
    """Return module and object of each public name, also of those that wings add."""
    from lipaudit.tables.plugins import collect

    return PUBLIC | collect(str, "public", PUBLIC)


def __getattr__(name: str) -> object:
    from pkgutil import resolve_name

    if name in PUBLIC:
        return resolve_name(PUBLIC[name])
    if name == "__all__":
        return ["__version__", *list_public()]
    # Python and its tools look for many names like __path__.
    if not name.startswith("_"):
        from lipaudit.tables.plugins import explain_missing

        added = list_public()
        if name in added:
            return resolve_name(added[name])
        hint = explain_missing()
        raise AttributeError(f"module 'lipaudit' has no attribute {name!r}. {hint}".strip())
    raise AttributeError(f"module 'lipaudit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *list_public()])
