"""Self-contained pages: templates, the scripts that draw figures, and atomic writes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .cache import cached
from .charts import DARK, VEGA_LITE, variable_name


def render(template: str, **values: object) -> str:
    """Return a page from a template, with the scripts and colours of its figures."""
    environment = Environment(
        loader=PackageLoader("leakfrontier.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    page = environment.get_template(template)
    palette = [(variable_name(light), light, dark) for light, dark in DARK.items()]
    return page.render(**values, bundle=javascript(), palette=palette)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _unbroken(text: str) -> str:
    """Return a text whose percentages and intervals stay on one line. Markup stays markup."""
    joined = re.sub(r"(?<=\d) (?=%)|(?<==) (?=\d)|(?<=,) (?=[-+\d.]+\])", "\u00a0", text)
    return type(text)(joined)


@cache
def javascript() -> Markup:
    """Return the scripts that draw figures. Bundling takes seconds, so they are cached."""
    code = "window.vegaEmbed = vegaEmbed;"
    bundle = cached(
        lambda: str(vl_convert.javascript_bundle(code, vl_version=VEGA_LITE)).encode(),
        "bundle",
        code,
        VEGA_LITE,
    )
    return Markup(bundle.decode().replace("</script", "<\\/script"))
