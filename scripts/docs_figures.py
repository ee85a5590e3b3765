"""Draw the diagrams of docs/how_it_works.md as SVG: the latent span, and a step of Stage 2.

    python scripts/docs_figures.py docs/figures

No dependency. The pictures follow the reader's colour scheme and have their own background, so they can be read on a
light or dark page whichever scheme the page has.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

STYLE = """
  svg { font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
  .page { fill: #ffffff; stroke: #d0d7de; }
  .box { fill: #f3f5f8; stroke: #8b949e; }
  .model { fill: #e8ecf3; stroke: #57606a; }
  .marker { fill: #fff4d6; stroke: #b08800; }
  .latent { fill: #dbeafe; stroke: #2563eb; }
  .good { fill: #dcf5e3; stroke: #1a7f37; }
  .bad { fill: #fde2e0; stroke: #cf222e; }
  .bar { fill: #2563eb; } .bar.wrong { fill: #cf222e; } .bar.right { fill: #1a7f37; }
  text { fill: #1f2328; font-size: 14px; }
  .small { font-size: 12px; fill: #57606a; }
  .title { font-weight: 600; font-size: 15px; }
  .code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; }
  .sub { font-size: 75%; }
  .line { stroke: #57606a; fill: none; stroke-width: 1.5; }
  .flow { stroke: #2563eb; fill: none; stroke-width: 2; }
  .grad { stroke: #cf222e; fill: none; stroke-width: 2; stroke-dasharray: 5 4; }
  .head { fill: #57606a; } .head.flow { fill: #2563eb; stroke: none; } .head.grad { fill: #cf222e; stroke: none; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d; }
    .box { fill: #161b22; stroke: #6e7681; }
    .model { fill: #21262d; stroke: #8b949e; }
    .marker { fill: #3b2f0b; stroke: #d4a72c; }
    .latent { fill: #132d52; stroke: #58a6ff; }
    .good { fill: #12351f; stroke: #3fb950; }
    .bad { fill: #45191b; stroke: #f85149; }
    .bar { fill: #58a6ff; } .bar.wrong { fill: #f85149; } .bar.right { fill: #3fb950; }
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .line { stroke: #9da7b3; } .flow { stroke: #58a6ff; } .grad { stroke: #f85149; }
    .head { fill: #9da7b3; } .head.flow { fill: #58a6ff; } .head.grad { fill: #f85149; }
  }
"""

SUBSCRIPT = '<tspan class="sub" dy="4">\\1</tspan><tspan dy="-4">&#8203;</tspan>'
"""The closing part, a space of no width, goes back to the line."""


class Drawing:
    """Shapes of one picture, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="t d">',
            f'<title id="t">{escape(title)}</title>',
            f'<desc id="d">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            "<defs>" + "".join(_head(kind) for kind in ("line", "flow", "grad")) + "</defs>",
            f'<rect class="page" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line; ``z_t`` is z with the subscript t."""
        words = re.sub(r"(?<!lvr)_(\w)", SUBSCRIPT, escape(words))
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>')

    def box(self, x: float, y: float, w: float, h: float, kind: str, words: str = "", style: str = "") -> None:
        """A rectangle with centred lines of text, which stay inside it."""
        self.parts.append(
            f'<g class="labelled"><rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6"/>'
        )
        lines = words.split("\n") if words else []
        for number, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + 18 * (number - (len(lines) - 1) / 2), line, style, "middle")
        self.parts.append("</g>")

    def arrow(self, path: str, kind: str = "line", head: bool = True) -> None:
        end = f' marker-end="url(#{kind})"' if head else ""
        self.parts.append(f'<path class="{kind}" d="{path}"{end}/>')

    def bars(self, x: float, y: float, heights: list[float], kind: str, width: float = 12, gap: float = 6) -> None:
        """Bars that stand on y."""
        for number, height in enumerate(heights):
            left = x + number * (width + gap)
            self.parts.append(
                f'<rect class="bar {kind}" x="{left:g}" y="{y - height:g}" width="{width:g}" height="{height:g}"/>'
            )
        self.arrow(f"M{x - 4:g} {y:g} H{x + len(heights) * (width + gap):g}", head=False)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def _head(kind: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="head {kind}" d="M0 0 L10 5 L0 10 z"/></marker>'
    )


def board(drawing: Drawing, x: float, y: float, cell: float) -> None:
    """A small picture of the world: arrows that lead to a circle."""
    drawing.parts.append(f'<rect class="box" x="{x:g}" y="{y:g}" width="{4 * cell:g}" height="{3 * cell:g}" rx="3"/>')
    arrows = {(0, 0): (1, 0), (0, 1): (0, 1), (1, 1): (1, 0), (1, 2): (0, 1), (2, 0): (0, -1), (2, 1): (-1, 0)}
    for (row, column), (dx, dy) in arrows.items():
        middle_x, middle_y, reach = x + (column + 0.5) * cell, y + (row + 0.5) * cell, 0.3 * cell
        kind = "flow" if (row, column) in ((0, 0), (0, 1), (1, 1), (1, 2)) else "line"
        start, end = (middle_x - dx * reach, middle_y - dy * reach), (middle_x + dx * reach, middle_y + dy * reach)
        drawing.arrow(f"M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}", kind)
    for row, column, kind in ((2, 2, "good"), (0, 3, "bad"), (2, 3, "marker")):
        centre = f'cx="{x + (column + 0.5) * cell:g}" cy="{y + (row + 0.5) * cell:g}" r="{0.3 * cell:g}"'
        drawing.parts.append(f'<circle class="{kind}" {centre}/>')


def span() -> str:
    """The span: image, K latents, answer; each latent is fed back as the next input."""
    d = Drawing(
        886,
        410,
        "The latent span",
        "The image and the question are read, then a start marker. The hidden state at each position becomes the input "
        "of the next slot, K times. An end marker follows, then the answer text.",
    )
    d.text(24, 34, "z_t is the decoder's hidden state after the final norm, at the position before slot t.", "title")
    d.text(24, 55, "It goes back in as the input of slot t, unchanged. Nothing is sampled inside the span.", "small")
    inputs, outputs, top, bottom = 252.0, 98.0, 146.0, 206.0
    columns = [("visual tokens", 20, 104, "box"), ("question", 132, 80, "box"), ("<|lvr_start|>", 220, 112, "marker")]
    slots = [("z₁", 372), ("z₂", 438), ("…", 504), ("z_K", 570)]
    columns += [(name, x, 46, "latent") for name, x in slots]
    columns += [("<|lvr_end|>", 640, 104, "marker"), ("answer text", 756, 110, "good")]
    d.box(20, top, 846, bottom - top, "model")
    d.text(38, top + 27, "decoder", "title")
    d.text(38, top + 46, "a stock transformers model, causal attention", "small")
    for name, x, width, kind in columns:
        d.box(x, inputs, width, 40, kind, name, "code" if name.startswith("<") else "")
        d.arrow(f"M{x + width / 2:g} {inputs:g} V{bottom + 4:g}")
    # The recurrence: what comes out above a position goes in at the next slot.
    sources = [(220 + 56, "z₁"), *((x + 23, name) for (_, x), name in zip(slots, ("z₂", "…", "z_K"), strict=False))]
    for (middle, name), (_, slot) in zip(sources, slots, strict=True):
        d.arrow(f"M{middle:g} {top:g} V{outputs + 34:g}", "flow")
        d.box(middle - 22, outputs, 44, 30, "latent", name)
        side = slot - 9
        path = f"M{middle + 22:g} {outputs + 15:g} H{side - 8:g} Q{side:g} {outputs + 15:g} {side:g} {outputs + 23:g}"
        d.arrow(f"{path} V{inputs + 12:g} Q{side:g} {inputs + 20:g} {slot:g} {inputs + 20:g}", "flow")
    d.arrow(f"M692 {top:g} V{outputs + 34:g}")
    d.box(640, outputs, 104, 30, "box", "first token")
    d.arrow(f"M811 {top:g} V{outputs + 34:g}")
    d.box(758, outputs, 106, 30, "box", "next tokens")
    # Below: the picture, and what is forced.
    board(d, 26, 322, 23)
    d.arrow(f"M72 320 V{inputs + 44:g}")
    d.text(128, 366, "image, encoded once", "small")
    d.text(128, 384, "by the vision tower", "small")
    d.arrow("M220 304 V310 H744 V304", head=False)
    d.text(482, 330, "the span: both markers are forced, exactly K latents run", "title", "middle")
    d.text(482, 350, "K is stored in the checkpoint. K = 0: no span and no markers.", "small", "middle")
    d.text(806, 322, "sampled text:", "small", "middle")
    d.text(806, 342, "<answer>B</answer>", "code", "middle")
    return d.svg()


def _rollout_panel(d: Drawing, x: float) -> None:
    d.text(x, 40, "1  Roll out", "title")
    d.text(x, 60, "no gradient; G texts behind one span", "small")
    d.box(x, 84, 120, 44, "box", "prompt\nread once")
    d.arrow(f"M{x + 120:g} 106 H{x + 146:g}")
    d.box(x + 150, 84, 126, 44, "latent", "z₁ … z_K\nthought once")
    for number, (answer, reward, kind) in enumerate((("B", "1", "good"), ("D", "0", "bad"), ("B", "1", "good"))):
        y = 162 + 44 * number
        d.arrow(f"M{x + 213:g} 128 V142 H{x + 12:g} V{y + 15:g} H{x + 24:g}")
        d.box(x + 28, y, 168, 30, "box", f"<answer>{answer}</answer>", "code")
        d.arrow(f"M{x + 196:g} {y + 15:g} H{x + 212:g}")
        d.box(x + 216, y, 60, 30, kind, f"r = {reward}")
    d.text(x + 28, 312, "G completions, rewards", "small")
    d.text(x + 28, 330, "advantages within the group", "small")
    d.text(x, 372, "Kept: latents z, log-probabilities,", "small")
    d.text(x, 390, "rewards, the wrong answers", "small")


def _passes_panel(d: Drawing, x: float) -> None:
    d.text(x, 40, "2  One prefill with gradient", "title")
    d.text(x, 60, "shared by replay, trajectory and readout", "small")
    d.box(x, 84, 300, 44, "model", "prompt, current weights")
    d.arrow(f"M{x + 70:g} 128 V158")
    d.box(x, 162, 140, 62, "box", "saved z, as\nconstants")
    d.arrow(f"M{x + 70:g} 224 V248")
    d.box(x, 252, 140, 62, "box", "sampled text,\nteacher-forced")
    d.arrow(f"M{x + 70:g} 314 V342")
    d.box(x, 346, 140, 50, "good", "policy loss\n(GRPO)")
    d.arrow(f"M{x + 230:g} 128 V158", "flow")
    d.box(x + 160, 162, 140, 62, "latent", "z₁ … z_K again,\ndifferentiable")
    d.arrow(f"M{x + 216:g} 224 V248", "flow")
    d.arrow(f"M{x + 244:g} 248 V228", "grad")
    d.box(x + 160, 252, 140, 62, "box", "gradient through\nall K steps")
    d.arrow(f"M{x + 230:g} 314 V342", "flow")
    d.box(x + 160, 346, 140, 50, "good", "evidence loss\n→ panel 3")
    d.text(x, 424, "loss = policy + λ · evidence", "title")


def _credit_panel(d: Drawing, x: float, y: float) -> None:
    d.text(x, y, "3  Evidence credit", "title")
    d.text(x, y + 20, "how much each latent counts", "small")
    d.text(x, y + 52, "attention of each answer to the K slots:", "small")
    shown: list[tuple[str, list[float], str]] = [
        ("correct", [14, 30, 10, 26], "right"),
        ("wrong", [13, 12, 12, 10], "wrong"),
        ("γ", [1, 18, 0.5, 16], ""),
    ]
    for number, (name, heights, kind) in enumerate(shown):
        left = x + 8 + 104 * number
        d.bars(left, y + 104, heights, kind)
        d.text(left + 33, y + 124, name, "small", "middle")
    d.text(x + 90, y + 94, "−", "", "middle")
    d.text(x + 194, y + 94, "→", "", "middle")
    d.text(x, y + 154, "w_t = η/K + (1 − η) γ_t, no gradient", "small")
    d.text(x, y + 174, "γ: the correct answer reads this latent", "small")
    d.text(x, y + 192, "and the wrong ones do not.", "small")
    right = x + 344
    d.text(right, y + 20, "what it is compared with", "small")
    d.box(right, y + 42, 90, 50, "latent", "z_t")
    d.box(right + 160, y + 36, 140, 30, "good", "p⁺ evidence box")
    d.box(right + 160, y + 72, 140, 30, "bad", "p⁻ other images")
    d.arrow(f"M{right + 90:g} {y + 60:g} L{right + 156:g} {y + 52:g}")
    d.arrow(f"M{right + 90:g} {y + 74:g} L{right + 156:g} {y + 86:g}")
    d.text(right, y + 130, "g_t = cos(z_t, p⁺) − max cos(z_t, p⁻)", "small")
    d.box(right, y + 148, 300, 40, "good", "Σ_t w_t · max(0, m − g_t)")


def stage2() -> str:
    """A step of Stage 2: rollout, the passes with gradient, evidence credit."""
    d = Drawing(
        692,
        694,
        "A step of Stage 2",
        "Rollout without gradient; one differentiable prefill for the replay and for a regenerated trajectory; the "
        "evidence loss weighs each latent by what the correct answer reads from it beyond the wrong ones.",
    )
    _rollout_panel(d, 24)
    _passes_panel(d, 368)
    _credit_panel(d, 24, 486)
    d.arrow("M334 24 V430", head=False)
    d.arrow("M24 450 H668", head=False)
    return d.svg()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("span.svg", span), ("stage2.svg", stage2)):
        (folder / name).write_text(draw(), encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures"))
