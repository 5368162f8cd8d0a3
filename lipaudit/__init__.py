"""lipaudit: how sensitive is a transformer checkpoint, and where?

    import lipaudit

    report = lipaudit.audit("demo", ["bounds", "jacobian"], samples=8)
    report.section("bounds").frame()
    lipaudit.render(report, "html")
    lipaudit.bounds.sharp(x, wq, wk, wv)

Each public name is loaded when it is first used; `import lipaudit` does not load torch.
"""

__version__ = "0.2.0"

# Module and object of each public name.
PUBLIC = {
    "LipauditError": "lipaudit.errors:LipauditError",
    "ModelSpec": "lipaudit.models.net:ModelSpec",
    "Observer": "lipaudit.engine.execute:Observer",
    "Report": "lipaudit.tables:Report",
    "attention_penalty": "lipaudit.wings.training.penalty:attention_penalty",
    "audit": "lipaudit.api:audit",
    "bounds": "lipaudit.tensors",
    "load": "lipaudit.schema:load",
    "measure": "lipaudit.api:measure",
    "merge": "lipaudit.engine.results:merge",
    "monitor": "lipaudit.wings.training.monitor",
    "rank": "lipaudit.gate:rank",
    "render": "lipaudit.report:render",
    "summarize": "lipaudit.report:summarize",
    "watch": "lipaudit.wings.training.watching:watch",
}

__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module 'lipaudit' has no attribute {name!r}")
    from pkgutil import resolve_name

    return resolve_name(PUBLIC[name])


def __dir__() -> list[str]:
    return sorted(__all__)
