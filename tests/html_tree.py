"""A page as the standard library's parser sees it: elements with attributes, text, and tables as lists of cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "img", "input", "hr"}


@dataclass(eq=False)
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)
    parent: Element | None = None

    def all(self, tag: str | None = None, **wanted: str) -> Iterator[Element]:
        """Elements below this one, in order."""
        for child in self.children:
            if isinstance(child, Element):
                if tag in (None, child.tag) and all(child.attributes.get(k) == v for k, v in wanted.items()):
                    yield child
                yield from child.all(tag, **wanted)

    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)

    def inside(self, kind: str) -> bool:
        """Whether this element or one around it has the class."""
        if kind in self.attributes.get("class", "").split():
            return True
        return self.parent is not None and self.parent.inside(kind)

    def table(self, caption: str) -> list[list[str]]:
        """Cells of the table whose caption begins so, header first; a second line of a cell follows a |."""
        (found,) = [one for one in self.all("table") if next(one.all("caption")).text().startswith(caption)]
        return [[_cell(cell) for cell in row.all() if cell.tag in ("th", "td")] for row in found.all("tr")]


def _cell(cell: Element) -> str:
    parts = [
        child if isinstance(child, str) else ("|" if child.tag == "span" else "") + child.text()
        for child in cell.children
    ]
    return "".join(parts).strip()


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.here = self.root

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attributes}, parent=self.here)
        self.here.children.append(made)
        if tag not in VOID:
            self.here = made

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.here.children.append(Element(tag, {name: value or "" for name, value in attributes}, parent=self.here))

    def handle_endtag(self, tag: str) -> None:
        assert self.here.tag == tag, f"</{tag}> closes <{self.here.tag}>"
        assert self.here.parent is not None
        self.here = self.here.parent

    def handle_data(self, data: str) -> None:
        self.here.children.append(data)


def read(path: Path) -> Element:
    """The tree of a page; elements must be closed in order."""
    parser = _Parser()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.here is parser.root
    return parser.root
