"""Steps of a span by number, counted from 1 as t is in the paper. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from realvr.errors import UserError


def check_steps(steps: Iterable[int], latents: int, what: str = "an intervention") -> None:
    """Refuse a step that a span of K latents does not have; ``what`` asked for it."""
    for step in steps:
        if latents == 0:
            raise UserError(f"{what}: there is no step {step}, because there is no latent span (K = 0)")
        if not 1 <= step <= latents:
            raise UserError(
                f"{what}: there is no step {step}; the span has K = {latents} latents, steps 1 to {latents}"
            )


def parse_numbers(text: str, option: str, what: str, least: str) -> tuple[int, ...]:
    """``2,4,6`` as numbers, ascending, each once. Errors say ``what`` they are, and why none is below 1: ``least``."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"{option} is {text!r}: write {what} separated by commas, such as 2,4,6") from None
    if numbers[0] < 1:
        raise UserError(f"{option} is {text!r}: {least}")
    return tuple(numbers)


def parse_steps(text: str, option: str) -> tuple[int, ...]:
    """Steps of a span."""
    return parse_numbers(text, option, "steps of the span", "steps are counted from 1")
