"""Queries to English. Several wordings a kind, all of them with the same answer."""

from __future__ import annotations

from realvr.world.queries import Query
from realvr.world.words import plural, with_article

PHRASINGS: dict[str, tuple[str, ...]] = {
    "color": ("What color is the {a}?", "Which color does the {a} have?", "Look at the {a}. What is its color?"),
    "shape": ("What shape is the {a}?", "What is the shape of the {a}?", "Look at the {a}. Which shape does it have?"),
    "texture": (
        "What pattern does the {a} have?",
        "Which pattern is on the {a}?",
        "Look at the {a}. How is it filled: plain, striped, dotted or checkered?",
    ),
    "size": ("Is the {a} small or large?", "What is the size of the {a}, small or large?"),
    "direction": (
        "Which way does the {a} point?",
        "In which direction is the {a} pointing?",
        "Look at the {a}. Where does it point?",
    ),
    "count": (
        "How many {as} are there?",
        "How many {as} can you see in the image?",
        "Count the {as}. What number do you get?",
    ),
    "exist": ("Is there {an_a} in the image?", "Does the image contain {an_a}?", "Can you see {an_a} anywhere?"),
    "position": (
        "Where is the {a}?",
        "In which part of the image is the {a}?",
        "Find the {a}. Which part of the image is it in?",
    ),
    "at_color": ("What color is the object at the {p}?", "Look at the {p} of the image. Which color is the object?"),
    "at_shape": ("What shape is the object at the {p}?", "Look at the {p} of the image. Which shape is the object?"),
    "relation_x": (
        "Is the {a} to the left or to the right of the {b}?",
        "Seen from the {b}, is the {a} on the left or on the right?",
        "On which side of the {b} is the {a}, left or right?",
    ),
    "relation_y": (
        "Is the {a} above or below the {b}?",
        "Seen from the {b}, is the {a} higher up (above) or lower down (below)?",
    ),
    "holds": ("Is the {a} {p} the {b}?", "Does the {a} lie {p} the {b}?", "True or not: the {a} is {p} the {b}?"),
    "front": (
        "Which object is in front: the {a} or the {b}?",
        "Two objects overlap, the {a} and the {b}. Which one covers part of the other?",
    ),
    "bigger": ("Which is larger: the {a} or the {b}?", "Compare the {a} with the {b}. Which one is bigger?"),
    "more": ("Are there more {as} or more {bs}?", "Which are more numerous: the {as} or the {bs}?"),
    "extreme_color": ("What color is the {p} object?", "Find the {p} object. Which color does it have?"),
    "extreme_shape": ("What shape is the {p} object?", "Find the {p} object. Which shape does it have?"),
}

SIDE_PHRASES = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}


def phrase(query: Query, variant: int) -> str:
    """One wording of a query."""
    wordings = PHRASINGS[query.kind]
    a, b = str(query.a), str(query.b)
    place = SIDE_PHRASES.get(query.place, query.place)
    return wordings[variant % len(wordings)].format(
        a=a, b=b, p=place, an_a=with_article(a), **{"as": plural(a), "bs": plural(b)}
    )
