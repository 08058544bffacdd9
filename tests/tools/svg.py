"""What the scripts that draw charts share: a panel with its axes' ranges, and the frame around all panels."""
from dataclasses import dataclass


@dataclass
class Panel:
    """One chart: where it lies, in pixels, and the ranges of its axes."""
    left: float
    top: float
    width: float
    height: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return self.top + self.height * (self.y_high - value) / (self.y_high - self.y_low)

    def line(self, points: list[tuple], kind: str) -> str:
        """points: (x, y), in the units of the axes."""
        text = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="{kind}" points="{text}"/>'

    def box(self, x: float, width: float, low: float, high: float, kind: str) -> str:
        """From `low` to `high`, beginning at x, `width` wide in the units of the axis."""
        top, bottom = self.y(high), self.y(low)
        return (f'<rect class="{kind}" x="{self.x(x):.1f}" y="{top:.1f}" '
                f'width="{self.x(x + width) - self.x(x):.1f}" height="{bottom - top:.1f}"/>')


def picture(width: int, height: int, style: str, parts: list[str]) -> str:
    """It paints its own background (class "paper"), so that it can be read on a page of any color."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, style, f'<rect class="paper" width="{width}" height="{height}" rx="8"/>', *parts, "</svg>\n"])
