"""Numbers and their units, exactly: "1/2", "0.5", "50 %", "1,000", "1.5e3", "12 cm". Standard library only.

What this module reads it decides without a computer algebra system; anything else is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

SIGNIFICANT = 6
"""A decimal with at least so many significant digits may stand for the number that it abbreviates: 0.333333 for 1/3."""

_UNITS: dict[str, dict[str, tuple[Fraction, str]]] = {
    "length": {
        "mm": (Fraction(1, 1000), "millimeter millimetre"),
        "cm": (Fraction(1, 100), "centimeter centimetre"),
        "m": (Fraction(1), "meter metre"),
        "km": (Fraction(1000), "kilometer kilometre"),
        "in": (Fraction(254, 10000), "inch inches"),
        "ft": (Fraction(3048, 10000), "foot feet"),
        "yd": (Fraction(9144, 10000), "yard"),
        "mi": (Fraction(1609344, 1000), "mile"),
    },
    "mass": {
        "mg": (Fraction(1, 1000), "milligram"),
        "g": (Fraction(1), "gram"),
        "kg": (Fraction(1000), "kilogram kilo"),
        "lb": (Fraction(45359237, 100000), "lbs pound"),
        "oz": (Fraction(45359237, 1600000), "ounce"),
    },
    "time": {
        "ms": (Fraction(1, 1000), "millisecond"),
        "s": (Fraction(1), "sec secs second"),
        "min": (Fraction(60), "mins minute"),
        "h": (Fraction(3600), "hr hrs hour"),
        "day": (Fraction(86400), "d"),
    },
    "volume": {"ml": (Fraction(1, 1000), "milliliter millilitre"), "l": (Fraction(1), "liter litre")},
    "speed": {"m/s": (Fraction(1), "mps"), "km/h": (Fraction(10, 36), "kph kmh"), "mph": (Fraction(44704, 100000), "")},
    "percent": {"%": (Fraction(1), "percent percentage")},
    "angle": {"°": (Fraction(1), "degree deg")},
    "celsius": {"°c": (Fraction(1), "celsius")},
    "fahrenheit": {"°f": (Fraction(1), "fahrenheit")},
    "dollar": {"$": (Fraction(1), "dollar usd")},
    "euro": {"€": (Fraction(1), "euro eur")},
    "sterling": {"£": (Fraction(1), "gbp")},
    "yen": {"¥": (Fraction(1), "jpy yen")},
}
_KNOWN: dict[str, tuple[str, Fraction]] = {}
for _kind, _units in _UNITS.items():
    for _short, (_factor, _names) in _units.items():
        for _name in (_short, *_names.split()):
            _KNOWN[_name] = (_kind, _factor)
            if len(_name) > 3:
                _KNOWN.setdefault(f"{_name}s", (_kind, _factor))
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NOT_UNIT = re.compile(
    r"hal(?:f|ves)|(?:third|fourth|quarter|tenth|hundredth|thousandth)s?|less|more|fewer|plus|minus|times|squared|cubed"
    r"|over|and|not|than|between|about"
)
"""Words that change the number before them."""

_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_BODY = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<currency>[$€£¥]?)\s*(?:(?P<whole>[0-9]+)\s+(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)"
    rf"|(?P<top>{_NUMBER})\s*/\s*(?P<bottom>{_NUMBER})"
    rf"|(?P<decimal>{_NUMBER})(?:e(?P<e>[+-]?[0-9]{{1,3}})|\s*[×x*]\s*10\s*\^\s*\{{?(?P<ten>[+-]?[0-9]{{1,3}})\}}?)?"
    r")(?P<rest>.*)",
    re.DOTALL,
)
_POWER = re.compile(r"(?:\^\{?(?P<power>[23])\}?)?")
_FRACTIONS = (
    (re.compile(r"(?<=[0-9])\s*\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?[0-9.,]+)\s*\}\s*\{\s*([0-9.,]+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r"\1/\2"),
)
_MARKS = (
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm|operatorname)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"), "°"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:times|cdot)(?![a-z])"), "×"),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\[,;:! ]|~"), " "),
)


@dataclass(frozen=True)
class Unit:
    """``kind`` is what can be converted, its power included; an unknown word is a kind of its own."""

    kind: str = ""
    factor: Fraction = Fraction(1)


@dataclass(frozen=True)
class Quantity:
    """``value`` in the unit as it is written; ``places`` decimals of ``digits`` significant digits, None: exact."""

    value: Fraction
    unit: Unit
    places: int | None = None
    digits: int = 0


def _plain(text: str, *patterns: tuple[re.Pattern[str], str]) -> str:
    """Text without some of the LaTeX of numbers and units."""
    for pattern, replacement in patterns:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def read(text: str) -> Quantity | None:
    """The number with its unit that ``text`` is as a whole (compatible and tidy, see `realvr.answers.text`)."""
    match = _BODY.fullmatch(_plain(text.casefold(), *_FRACTIONS, *_MARKS))
    if match is None:
        return None
    number = _value(match)
    unit = _unit(match["rest"])
    if number is None or unit is None or (match["currency"] and unit[0].kind):
        return None
    value, places, digits = number
    if match["currency"]:
        unit = (_named_unit(match["currency"]) or Unit(), unit[1])
    sign = -1 if match["sign"] == "-" else 1
    scaled = unit[1] != 1
    return Quantity(sign * value * unit[1], unit[0], None if scaled else places, digits)


def _value(match: re.Match[str]) -> tuple[Fraction, int | None, int] | None:
    """(value, decimals, significant digits); None for a division by zero."""
    if match["whole"]:
        under = int(match["under"])
        return (int(match["whole"]) + Fraction(int(match["over"]), under), None, 0) if under else None
    if match["top"]:
        bottom = _decimal(match["bottom"])
        return (_decimal(match["top"]) / bottom, None, 0) if bottom else None
    text = match["decimal"].replace(",", "")
    exponent = int(match["e"] or match["ten"] or 0)
    places = len(text.partition(".")[2]) - exponent
    digits = len(text.replace(".", "").lstrip("0"))
    return _decimal(text) * Fraction(10) ** exponent, places if places > 0 else None, digits


def _decimal(text: str) -> Fraction:
    text = text.replace(",", "").rstrip(".")
    return Fraction(f"0{text}")


def _unit(rest: str) -> tuple[Unit, int] | None:
    """The unit after a number, and the scale of words such as "million"; None where the rest is no unit."""
    attached = rest[:1] not in ("", " ")
    words = rest.strip().rstrip(".").split()
    scale = 1
    while words and words[0] in _SCALES:
        scale *= _SCALES[words.pop(0)]
    if not words:
        return Unit(), scale
    if words[0] in ("°", "degree", "degrees", "deg") and len(words) == 2:
        words = [{"c": "°c", "celsius": "°c", "f": "°f", "fahrenheit": "°f"}.get(words[1], words[1])]
    if words[0] in ("square", "sq", "cubic") and len(words) == 2:
        words = [f"{words[1]}^{3 if words[0] == 'cubic' else 2}"]
    name = "".join(words) if len(words) == 2 and words[0] == "per" else " ".join(words)
    if name.replace(" ", "") == "percent":
        name = "percent"
    known = _named_unit(name)
    if known is not None:
        return known, scale
    # "3 apples": words that count something. A letter or two may be a variable, and other words change the number.
    counted = not attached and len(words) <= 3 and all(re.fullmatch(r"[^\W\d_]{3,}", word) for word in words)
    if not counted or any(_NOT_UNIT.fullmatch(word) for word in words):
        return None
    return Unit(name.removesuffix("s")), scale


def _named_unit(name: str) -> Unit | None:
    """A unit of the table, with a power 2 or 3."""
    match = re.fullmatch(rf"(?P<name>\D+?){_POWER.pattern}", name)
    if match is None or match["name"] not in _KNOWN:
        return None
    kind, factor = _KNOWN[match["name"]]
    power = int(match["power"] or 1)
    if power > 1 and kind != "length":
        return None
    return Unit(kind if power == 1 else f"{kind}^{power}", factor**power)


def same_value(one: Quantity, other: Quantity) -> bool:
    """Whether two quantities are equal.

    A unit may be left out on one side; "50 %" is 0.5, and 50 where the sign was left out. Units of one kind are
    converted; other units differ.
    """
    if one.unit.kind == other.unit.kind:
        return _close(one, other, one.unit.factor, other.unit.factor)
    if one.unit.kind and other.unit.kind:
        return False
    if _close(one, other):
        return True
    hundredth = Fraction(1, 100)
    if one.unit.kind == "percent":
        return _close(one, other, hundredth)
    return other.unit.kind == "percent" and _close(one, other, Fraction(1), hundredth)


def _close(one: Quantity, other: Quantity, by: Fraction = Fraction(1), other_by: Fraction = Fraction(1)) -> bool:
    difference = abs(one.value * by - other.value * other_by)
    return difference == 0 or any(
        quantity.places is not None
        and quantity.digits >= SIGNIFICANT
        and difference < Fraction(1, 10**quantity.places) * factor
        for quantity, factor in ((one, by), (other, other_by))
    )


_TRAILING = re.compile(
    r"(?P<body>.*[0-9)}\]])\s*(?P<unit>[a-z%°$€£][a-z%°/ ]*(?:\^\{?[23]\}?)?)", re.DOTALL | re.IGNORECASE
)


def without_units(one: str, other: str) -> tuple[str, str] | None:
    """Two expressions without the known units at their ends; None where these differ."""
    (first, unit), (second, other_unit) = _split(one), _split(other)
    if unit.kind and other_unit.kind and unit != other_unit:
        return None
    return first, second


def _split(text: str) -> tuple[str, Unit]:
    """An expression, and the unit behind it where it has one of the table. In "5m + 2m" the m is a variable."""
    match = _TRAILING.fullmatch(_plain(text, *_MARKS))
    unit = _named_unit(" ".join(match["unit"].casefold().split())) if match else None
    if match is None or unit is None or re.search(r"[a-z]", re.sub(r"\\[A-Za-z]+", "", match["body"]), re.IGNORECASE):
        return text, Unit()
    return match["body"], unit
