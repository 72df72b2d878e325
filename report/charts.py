"""Line charts as inline SVG.

Drawn by hand, because a page must be one file that shows its charts without a script, in a mail, on paper and behind a
firewall, in the reader's light or dark colours. Of the chart libraries, those for browsers need scripts, and matplotlib
is a heavy dependency whose pictures do not take a page's colours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

from report.formatting import short

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 34  # the margins around the plot
MOST_POINTS = 160  # a curve with more is drawn as means of equal stretches, over a band from least to most


@dataclass
class Series:
    """One curve. `style` is a number: the colour; `dots` marks each point (evaluations), else it is a line
    (training)."""

    label: str
    points: list[tuple[float, float]]  # (x, value), finite; x counts examples in a run's curves
    style: int = 1
    dots: bool = False
    marks: list[tuple[float, float, str]] = field(default_factory=list)  # (x, value, what was marked)


def chart(
    series: list[Series],
    *,
    level: tuple[float, str] | None = None,
    fixed: tuple[float, float] | None = None,
    across: str = "examples",
) -> str:
    """An SVG of the curves; `level` is a dashed line (value, label), `fixed` the range of the y axis, `across` what the
    x axis counts."""
    series = [one for one in series if one.points]
    assert series
    xs = [x for one in series for x, _ in one.points]
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 0.5 * max(1, abs(left)), right + 0.5 * max(1, abs(right))
    low, high, logarithmic = _value_range(series, level, fixed)
    rise = (lambda v: math.log10(max(v, 1e-300))) if logarithmic else (lambda v: v)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        share = (rise(y) - rise(low)) / (rise(high) - rise(low))
        return round(across, 1), round(HEIGHT - BOTTOM - min(max(share, 0), 1) * (HEIGHT - TOP - BOTTOM), 1)

    parts = []
    for value in _log_ticks(low, high) if logarithmic else _ticks(low, high):
        _, y = place(left, value)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{_label(value)}</text>')
    below = f'y="{HEIGHT - BOTTOM + 15}" text-anchor="middle"'
    for value in _ticks(left, right, 4):
        x, _ = place(value, low)
        parts.append(f'<text class="tick" x="{x}" {below}>{_label(value, thousands=right >= 1e4)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(across)}</text>')
    if level is not None and low <= level[0] <= high:
        _, y = place(left, level[0])
        above = y - 4 if y > TOP + 14 else y + 12
        parts.append(f'<path class="level" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="note" x="{WIDTH - RIGHT - 2}" y="{above}" text-anchor="end">{escape(level[1])}</text>'
        )
    for one in series:
        parts += _curve(one, place, across)
    name = escape(", ".join(one.label for one in series), quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _curve(one: Series, place, across: str) -> list[str]:
    means, bands = thin(one.points)
    parts = [f'<g class="s{one.style}{"" if one.dots else " raw"}">']
    if bands:
        upper = [place(x, most) for x, _, most in bands]
        lower = [place(x, least) for x, least, _ in reversed(bands)]
        parts.append(f'<path class="band" d="M{" ".join(f"{x},{y}" for x, y in upper + lower)}Z"/>')
    places = [place(x, y) for x, y in means]
    if len(places) > 1:
        parts.append(f'<path class="curve" d="M{" ".join(f"{x},{y}" for x, y in places)}"/>')
    if one.dots or len(places) == 1:
        radius = 3 if len(places) <= 60 else 1.5
        for (x, y), (number, value) in zip(places, means):
            where = f"{number:,.0f}" if number == round(number) else short(number)
            text = f"{one.label} at {where} {across}: {short(value)}"
            parts.append(f'<circle cx="{x}" cy="{y}" r="{radius}"><title>{escape(text)}</title></circle>')
    parts.append("</g>")
    for number, value, what in one.marks:
        x, y = place(number, value)
        text = f"{number:,.0f} {across}: {what}"
        parts.append(f'<path class="mark" d="M{x} {y - 4}l4 7h-8z"><title>{escape(text)}</title></path>')
    return parts


def thin(points: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """(means, bands) of at most MOST_POINTS stretches: (x, mean) and (x, least, most); no bands if nothing was
    merged."""
    if len(points) <= MOST_POINTS:
        return points, []
    means, bands = [], []
    for stretch in range(MOST_POINTS):
        part = points[len(points) * stretch // MOST_POINTS : len(points) * (stretch + 1) // MOST_POINTS]
        values = [y for _, y in part]
        x = sum(x for x, _ in part) / len(part)
        means.append((x, sum(values) / len(values)))
        bands.append((x, min(values), max(values)))
    return means, bands


def _value_range(series, level, fixed) -> tuple[float, float, bool]:
    """(low, high, logarithmic) of the y axis. A few outliers do not flatten the rest: they are drawn at its edge."""
    if fixed is not None:
        return *fixed, False
    values = sorted(y for one in series for _, y in one.points)
    low, high = values[0], values[-1]
    if len(values) >= 20:
        inner_low, inner_high = values[len(values) // 50], values[-1 - len(values) // 50]
        if low > 0 and inner_high / inner_low > 100:
            return low, high, True
        if high - low > 4 * (inner_high - inner_low) > 0:
            low, high = max(low, 2 * inner_low - inner_high), min(high, 2 * inner_high - inner_low)
    if level is not None:
        low, high = min(low, level[0]), max(high, level[0])
    pad = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    floor = 0.0 if low >= 0 and pad > low else low - pad
    return floor, high + pad, False


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, within [low, high]."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 3) if len(powers) < 4 else (1,)
    return [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]


def _label(value: float, thousands: bool = False) -> str:
    if value == 0:
        return "0"
    if thousands and 1e3 <= abs(value) < 1e4:  # 5k, where the next one is 10k
        return f"{value / 1e3:.3g}k"
    size = abs(value)
    if size >= 1e4:
        return short(value).replace("+", "")
    return f"{value:.6g}" if size >= 1e-3 else f"{value:.1e}"
