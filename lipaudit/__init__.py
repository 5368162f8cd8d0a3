"""lipaudit: how sensitive is a transformer checkpoint, and where?

    import lipaudit

    report = lipaudit.audit("demo", ["bounds", "jacobian"], samples=8)
    report.section("bounds").frame()
    lipaudit.render(report, "html")
    lipaudit.bounds.sharp(x, wq, wk, wv)

Each public name is loaded when it is first used; `import lipaudit` does not load torch.
"""

__version__ = "0.3.0"

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
    # Python calls this for a name that is not loaded yet: import its module and return the object.
    from pkgutil import resolve_name

    if name in PUBLIC:
        return resolve_name(PUBLIC[name])
    if name == "__all__":
        return ["__version__", *list_public()]
    text = f"module 'lipaudit' has no attribute {name!r}"
    # Python also asks for names like __path__, and for a module of this folder before it imports
    # it. Then the answer is no, and there is no need to look for plug-ins.
    if name.startswith("_") or _is_module(name):
        raise AttributeError(text)
    from lipaudit.tables.plugins import explain_missing

    added = list_public()
    if name in added:
        return resolve_name(added[name])
    raise AttributeError(f"{text}. {explain_missing()}".strip())


def _is_module(name: str) -> bool:
    # Whether the package has a module or folder of this name.
    from importlib.util import find_spec

    spec = find_spec(f"{__name__}.{name}")
    # A folder without Python files has no origin.
    return spec is not None and spec.origin is not None


def __dir__() -> list[str]:
    return sorted(["__version__", *list_public()])
