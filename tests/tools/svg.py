"""What the scripts that draw charts share: text, a panel with its axes' ranges, and the frame around all panels.

Places and sizes are in pixels; y grows downwards.
"""
from dataclasses import dataclass


def text(x: float, y: float, words: str, kind: str | None = None) -> str:
    """kind: its classes in the style sheet. An int is written as it is, a float with one decimal."""
    place = f'x="{round(x, 1)}" y="{round(y, 1)}"'
    if kind is None:
        return f"<text {place}>{words}</text>"
    return f'<text class="{kind}" {place}>{words}</text>'


@dataclass
class Panel:
    """One chart: where it lies, and the ranges of its axes."""
    left: float
    top: float
    width: float
    height: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return self.top + self.height * (self.y_high - value) / (self.y_high - self.y_low)

    def places(self, points: list[tuple]) -> str:
        """What SVG calls the points of a line or an area. points: (x, y), in the units of the axes."""
        written = [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points]
        return " ".join(written)

    def line(self, points: list[tuple], kind: str) -> str:
        return f'<polyline class="{kind}" points="{self.places(points)}"/>'

    def area(self, points: list[tuple], kind: str) -> str:
        return f'<polygon class="{kind}" points="{self.places(points)}"/>'

    def level(self, value: float, kind: str) -> str:
        """A horizontal line through the whole panel."""
        return f'<path class="{kind}" d="M{self.left} {self.y(value):.1f}H{self.right}"/>'

    def plumb(self, value: float, kind: str) -> str:
        """A vertical one."""
        return f'<path class="{kind}" d="M{self.x(value):.1f} {self.top}V{self.bottom}"/>'

    def box(self, x: float, width: float, low: float, high: float, kind: str) -> str:
        """From `low` to `high`, beginning at x, `width` wide in the units of the axis."""
        left = self.x(x)
        right = self.x(x + width)
        top = self.y(high)
        bottom = self.y(low)
        return (f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" '
                f'width="{right - left:.1f}" height="{bottom - top:.1f}"/>')


def picture(width: int, height: int, style: str, parts: list[str]) -> str:
    """It paints its own background (class "paper"), so that it can be read on a page of any color."""
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}>'
    paper = f'<rect class="paper" {size} rx="8"/>'
    return "\n".join([head, style, paper, *parts, "</svg>\n"])
