# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The report of ``block32 quantize``: what each layer lost, as JSON or as one HTML page."""

from __future__ import annotations

import json
from html import escape

from block32.passes.quantizing.weights import QuantizedWeight

_BAR_HEIGHT = 18
_PLOT_WIDTH = 480

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: 0.2rem 0.6rem; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
svg text { font-size: 11px; } svg rect { fill: #3b6ea5; }
"""


def render_report(weights: list[QuantizedWeight], *, is_json: bool) -> str:
    """The report's text.

    Args:
        weights: What was quantised, in program order.
        is_json: JSON, and not HTML.
    """
    rows = [_row(weight) for weight in weights]
    total = {
        "bytes_before": sum(weight.bytes_before for weight in weights),
        "bytes_after": sum(weight.bytes_after for weight in weights),
        "clipped": sum(weight.loss.clipped for weight in weights),
    }
    if is_json:
        return json.dumps({"layers": rows, "total": total}, indent=2) + "\n"
    return _page(rows, total)


def _row(weight: QuantizedWeight) -> dict[str, object]:
    return {
        "name": weight.name,
        "n": weight.n,
        "k": weight.k,
        "format": weight.format,
        "block": f"{weight.block[0]}x{weight.block[1]}",
        "rule": weight.rule,
        "relative_error": weight.loss.relative(),
        "clipped": weight.loss.clipped,
        "bytes_before": weight.bytes_before,
        "bytes_after": weight.bytes_after,
        "matmuls": weight.layers,
    }


def _page(rows: list[dict[str, object]], total: dict[str, int]) -> str:
    columns = ("name", "n", "k", "relative_error", "clipped", "bytes_before", "bytes_after")
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in columns) + "</tr>\n"
        for row in rows
    )
    share = total["bytes_after"] / max(total["bytes_before"], 1)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>block32 quantize</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{len(rows)} weights in {rows[0]['format']}</h1>\n"
        f"<p>{total['bytes_before']:,} bytes became {total['bytes_after']:,} ({share:.1%}); blocks "
        f"of {rows[0]['block']}, rule {rows[0]['rule']}, {total['clipped']:,} values clipped.</p>\n"
        f"<h2>Relative error (Frobenius) by layer</h2>\n{_plot(rows)}\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n</body></html>\n"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3%}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def _plot(rows: list[dict[str, object]]) -> str:
    """A bar a layer, as SVG."""
    errors = [float(str(row["relative_error"])) for row in rows]
    largest = max(errors) or 1.0
    bars = []
    for index, (row, error) in enumerate(zip(rows, errors, strict=True)):
        y = index * _BAR_HEIGHT
        width = error / largest * _PLOT_WIDTH
        bars.append(
            f'<text x="0" y="{y + 13}">{escape(str(row["name"]))}</text>'
            f'<rect x="300" y="{y + 3}" width="{width:.1f}" height="{_BAR_HEIGHT - 6}"/>'
            f'<text x="{306 + width:.1f}" y="{y + 13}">{error:.3%}</text>'
        )
    height = len(rows) * _BAR_HEIGHT
    return f'<svg width="100%" viewBox="0 0 {_PLOT_WIDTH + 380} {height}">{"".join(bars)}</svg>'
