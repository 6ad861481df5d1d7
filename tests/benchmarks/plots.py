"""Pictures of what was measured, for the documentation: `python -m tests.benchmarks.plots FOLDER RESULTS.json ...`.

RESULTS.json is what `python -m tests.benchmarks --json` prints. The last file counts, where several have a figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from tests.browser.conftest import chromium

Result = Mapping[str, Any]
_SIZE: Final = {"width": 960, "height": 540}
_LOOK: Final[dict[str, Any]] = {
    "template": "simple_white",
    "font": {"family": "system-ui, sans-serif", "size": 14},
    "margin": {"l": 70, "r": 20, "t": 50, "b": 60},
    "legend": {"orientation": "h", "y": -0.18},
    **_SIZE,
}


def of_ratios(results: Sequence[Result]) -> go.Figure | None:
    """Durable's messages a second divided by each floor's: a bar each, and a line where they are equal."""
    found, last = dict[str, float](), ""
    for each in results:
        if "statements_per_message" in each:
            last = last if each["name"] == "the same" else each["name"]
            found[f"{last}<br><sup>{each['floor_name']}</sup>"] = each["ratio"]
    if not found:
        return None
    names, ratios = list(found), list(found.values())
    bars = go.Bar(x=ratios, y=names, orientation="h", text=[f"{ratio:.2f}" for ratio in ratios], marker_color="#2a6fb0")
    figure = go.Figure(bars, {**_LOOK, "height": 120 + 40 * len(names)})
    figure.add_vline(x=1, line_dash="dot")
    figure.update_layout(title="messages a second: durable / beside", margin_l=420)
    figure.update_yaxes(autorange="reversed")
    return figure


def of_latencies(results: Sequence[Result]) -> go.Figure | None:
    """The time from commit to effect at each pace: the median, with lines to what 99.9 % do not exceed."""
    rows = {(each["name"], each["pace"]): each for each in results if "p999" in each}
    if not rows:
        return None
    paces = list(dict.fromkeys(pace for _, pace in rows))
    figure = go.Figure(layout=_LOOK)
    for name in dict.fromkeys(name for name, _ in rows):
        _add_spread(figure, name, paces, {pace: rows[name, pace] for pace in paces if (name, pace) in rows})
    beside = {pace: each for (_, pace), each in rows.items()}
    floors = {pace: {"p50": each["floor_p50"], "p999": each["floor_p99"]} for pace, each in beside.items()}
    _add_spread(figure, next(iter(beside.values()))["floor_name"] + " (to p99)", paces, floors)
    figure.update_layout(title="from commit to effect, ms: p50, and up to p99.9", scattermode="group", scattergap=0.4)
    figure.update_yaxes(type="log", title="ms", tickvals=[n * 10**power for power in range(-1, 5) for n in (1, 2, 5)])
    figure.update_xaxes(title="messages")
    return figure


def _add_spread(figure: go.Figure, name: str, paces: Sequence[str], rows: Mapping[str, Result]) -> None:
    shown = [pace for pace in paces if pace in rows]
    p50 = [rows[pace]["p50"] * 1000 for pace in shown]
    above = [rows[pace]["p999"] * 1000 - low for pace, low in zip(shown, p50, strict=True)]
    bars = {"type": "data", "array": above, "arrayminus": [0] * len(above), "symmetric": False}
    figure.add_scatter(x=shown, y=p50, error_y=bars, mode="markers", name=name, marker_size=9)


FIGURES: Final = {"ratios": of_ratios, "latencies": of_latencies}


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw each figure for which there are results, and return the pictures."""
    made = []
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        script = Path(scratch) / "plotly.js"
        script.write_text(get_plotlyjs())
        page = browser.new_page(device_scale_factor=2)
        for name, figure_of in FIGURES.items():
            if (figure := figure_of(results)) is None:
                continue
            drawn = Path(scratch) / f"{name}.html"
            config = {"staticPlot": True, "displayModeBar": False}
            figure.write_html(drawn, include_plotlyjs="plotly.js", config=config)
            page.goto(drawn.as_uri())
            made.append(folder / f"benchmarks-{name}.png")
            page.locator(".plot-container").screenshot(path=made[-1])
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plots", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    results = [each for path in arguments.results for each in json.loads(path.read_text())]
    for picture in draw(results, arguments.folder):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
